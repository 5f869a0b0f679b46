"""The pieces of a step, predicted for a cluster (pure)."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from hpczero.comm.trace import evenly
from hpczero.model.families import family
from hpczero.model.shapes import Layer
from hpczero.parallel.layout import UnitLayout
from hpczero.parallel.pipeline.partition import Tied
from hpczero.parallel.states import Precision, Sharded, bytes_over_bus, shares_nodes
from hpczero.planner.activations import element_bytes, sent_to_host
from hpczero.planner.cluster import Cluster
from hpczero.planner.links import Links
from hpczero.planner.memory import Platform, saves_behind
from hpczero.planner.rates import PassTime, Rates
from hpczero.planner.software import Software
from hpczero.planner.spread import Nodes, Spread, in_order, spreads
from hpczero.planner.step_costs import Edge, Seconds
from hpczero.planner.volumes import GroupVolumes, Operations, Sent, Volumes
from hpczero.planner.work import Alike, Batch, Part, layout_of, parts_of, passes
from hpczero.spec.schema import Spec

_GIGA, _MICRO = 1e9, 1e-6
_FP32 = 4


@dataclass(frozen=True)
class Machine:
    """What a job runs on, and how the software works there."""

    cluster: Cluster
    platform: Platform
    software: Software


class Predicted:
    """The costs of a spec on a machine's nodes."""

    def __init__(
        self, spec: Spec, layers: Sequence[Layer], nodes: Nodes, machine: Machine
    ) -> None:
        self.spec, self.nodes, self.machine = spec, nodes, machine
        cluster, platform, software = machine.cluster, machine.platform, machine.software
        self.spreads = spreads(in_order(spec, nodes), nodes)
        data = self.spreads["data"]
        self.rates = Rates.of(cluster, spec.train.precision, nodes.most, software)
        self.links = Links.of(cluster, nodes)
        self.volumes = Volumes(spec, layers, data.ranks)
        self.batches = self.volumes.batches(data.ranks - 1)  # the last rank has the most
        self.batch = Batch.of(self.batches)
        self.parts = [parts_of(stage, spec.model, spec.memory) for stage in self.volumes.chunks]
        self.shared = not platform.on_gpus and shares_nodes(spec.zero, data.on_nodes)
        self.sharded = Sharded.at_stage(spec.zero.stage, self.shared)
        self.precision = Precision(element_bytes(spec), self.batch.micro_batches > 1)
        self._layout = layout_of(spec, self.batch.samples, platform.kernels)
        self._passes: dict[Alike, tuple[PassTime, PassTime]] = {}
        self._known: dict[object, Seconds] = {}
        self._of_tensor: dict[int, tuple[float, float]] = {}
        self._of_data: dict[int, tuple[float, float]] = {}

    def hidden(self) -> float:
        return self.machine.software.hidden

    # ------------------------------------------------------------------------ a micro-batch

    def action(self, kind: str, stage: int, chunk: int) -> Seconds:
        part = self.parts[stage][chunk]
        held = sum(unit.size for unit in self._units(self.volumes.chunks[stage][chunk]))
        key = kind, part, held
        if key not in self._known:
            self._known[key] = self._action(kind == "backward", stage, part, held)
        return self._known[key]

    def _action(self, backward: bool, stage: int, part: Part, held: int) -> Seconds:
        total = dict.fromkeys(("compute", "attention", "memory"), 0.0)
        host = 0.0
        for alike, count in part.layers:
            time = self._time(alike)[backward]
            total["compute"] += count * time.compute
            total["attention"] += count * time.attention
            total["memory"] += count * time.memory
            host += count * time.host
        if backward and self.precision.accumulates and not self.sharded.gradients:
            moved = held * (self.precision.weight + 2 * self.precision.gradient)
            total["memory"] += self.rates.moved(moved) * self.machine.software.accumulates_apart
        device = sum(total.values())
        total["launch"] = max(0.0, host - device) if self.rates.is_gpu else host
        total["tensor"] = self._tensor_sum(stage)[backward] * self._sums(part)[backward]
        return total

    def _time(self, alike: Alike) -> tuple[PassTime, PassTime]:
        if alike not in self._passes:
            forward, backward = passes(self.spec.model, alike, self._layout)
            self._passes[alike] = self.rates.time(forward, False), self.rates.time(backward, True)
        return self._passes[alike]

    def _sums(self, part: Part) -> tuple[int, int]:
        """Return the sums of activations over tensor ranks in forward, and in backward."""
        sums = family(self.spec.model).tensor_sums
        forward, backward = (
            sum(sums[alike.layer.kind][column] * count for alike, count in part.layers)
            for column in range(2)
        )
        return forward, backward + part.recomputed_blocks * sums["blocks"][0]

    def _tensor_sum(self, stage: int) -> tuple[float, float]:
        """Return the seconds of tensor's collectives for each sum, in forward and in backward.

        With sequence parallelism a backward gathers once more, so its sum takes half as long again.
        The few other collectives are spread over the sums.
        """
        if stage not in self._of_tensor:
            spread = self.spreads["tensor"]
            sums = [self._sums(part) for part in self.parts[stage]]
            forward, backward = (sum(column) for column in zip(*sums, strict=True))
            more = 1.5 if self._layout.sequence else 1.0
            each = 0.0
            if spread.ranks > 1 and forward + backward:
                each = self._tensor_seconds(stage, spread) / (forward + more * backward)
            self._of_tensor[stage] = each, more * each
        return self._of_tensor[stage]

    def _tensor_seconds(self, stage: int, spread: Spread) -> float:
        """Return the seconds of all of tensor's collectives for a micro-batch."""
        elsewhere = spread.ranks - spread.on_one
        seconds = 0.0
        for samples, times in self.batches:
            for operation, size, count in self.volumes.tensor_messages(stage, samples, times):
                sent = Sent(*evenly(size, spread.ranks, elsewhere))
                seconds += count * self._collective(operation, sent, spread)
        return seconds / self.batch.micro_batches

    def bus(self, kind: str, stage: int, chunk: int) -> float:
        spec, cluster = self.spec, self.machine.cluster
        if not self.machine.platform.on_gpus or spec.memory.offload_activations == "none":
            return 0.0
        chunks = self.volumes.chunks[stage][chunk : chunk + 1]
        samples = -(-int(self.batch.samples) // 1)
        kept = sent_to_host(spec, samples, chunks, self.machine.platform.kernels)
        return sum(moments.kept for moments in kept) / (self._bus_rate(cluster))

    def _bus_rate(self, cluster: Cluster) -> float:
        return (cluster.device.bus_gb_s or cluster.node.bandwidth_gb_s) * _GIGA

    def transfer(self, part: int) -> float:
        spread = self.spreads["pipeline"]
        stages = spread.ranks
        sent = next(iter(self.volumes.of_pipeline(0, self.batches, spread.on_nodes)))[0][0]["send"]
        messages = (2 * self.spec.parallel.chunks - 1) * self.batch.micro_batches
        size = (sent.inside + sent.between) / messages
        nodes = [node for node, count in enumerate(spread.on_nodes) for _ in range(count)]
        between = nodes[part % stages] != nodes[(part + 1) % stages]
        tensor = self.spreads["tensor"]
        if not self.machine.software.divides_messages or self._layout.sequence:
            return self.links.message(size, spread, between)
        gathered = Sent(int(size * (tensor.ranks - 1) / tensor.ranks))
        return self.links.message(size / tensor.ranks, spread, between) + self.links.collective(
            "all_gather", gathered, tensor, rings=True
        )

    # ------------------------------------------------------------------------ the data axis

    def _units(self, layers: Sequence[Layer]) -> list[UnitLayout]:
        return self.volumes.units.of(layers)

    def _stage_units(self, stage: int) -> list[UnitLayout]:
        return [unit for chunk in self.volumes.chunks[stage] for unit in self._units(chunk)]

    @cached_property
    def _data_rings(self) -> frozenset[str]:
        return self.machine.software.rings

    def _collective(self, operation: str, sent: Sent, spread: Spread, count: float = 1) -> float:
        rings = operation in self.machine.software.rings
        return self.links.collective(operation, sent, spread, rings, count)

    def _step_sums(self, stage: int) -> tuple[float, float]:
        """Return the seconds of all of a step's reduce_scatters, and of its all_gathers."""
        if stage not in self._of_data:
            spread = self.spreads["data"]
            found = 0.0, 0.0
            if spread.ranks > 1:
                found = self._data_seconds(stage, spread)
            self._of_data[stage] = found
        return self._of_data[stage]

    def _data_seconds(self, stage: int, spread: Spread) -> tuple[float, float]:
        totals = GroupVolumes(self.volumes.of_data(stage, 0, spread.on_nodes, True)).totals
        units = self._stage_units(stage)
        micro_batches = self.batch.micro_batches
        sums = len(units) * (micro_batches if self.sharded.gradients else 1)
        gathers = len(units) * (2 * micro_batches if self.sharded.parameters else 1)
        reduced = self._collective("reduce_scatter", totals["reduce_scatter"].rank, spread, sums)
        gathered = self._collective("all_gather", totals["all_gather"].rank, spread, gathers)
        if self.shared:  # what the ranks of a node read of each other's gradients
            read = sum(unit.size for unit in units) * self.precision.weight * sums / len(units)
            reduced += self.rates.moved(read)
        return reduced, gathered

    def data(self, kind: str, stage: int, chunk: int) -> float:
        """Return those of stage 2 and 3, spread over the chunks by their parameters."""
        reduced, gathered = self._step_sums(stage)
        seconds = gathered / 2 if self.sharded.parameters else 0.0
        if kind == "backward" and self.sharded.gradients:
            seconds += reduced
        whole = sum(unit.size for unit in self._stage_units(stage))
        part = sum(unit.size for unit in self._units(self.volumes.chunks[stage][chunk]))
        return seconds * part / max(1, whole) / self.batch.micro_batches

    def weights(self, stage: int) -> Edge:
        """Return the gathers of new weights, and the update of states that are elsewhere.

        The first unit is waited for: at stage 3 that of the first forward.
        """
        _, gathered = self._step_sums(stage)
        units = self._stage_units(stage)
        first = units[0].size / max(1, sum(unit.size for unit in units))
        offload = self._offload(units)
        if self.sharded.parameters:
            return Edge(gathered / 2 / self.batch.micro_batches * first, 0.0, offload)
        if not self.sharded.optimizer:
            return Edge(offload=offload)
        if not self.machine.software.hides_weights:
            return Edge(gathered, 0.0, offload)
        return Edge(gathered * first, gathered * (1 - first), offload)

    def gradients(self, stage: int) -> Edge:
        """Return the sums of the last backward: that of the first layer's unit is waited for."""
        reduced, gathered = self._step_sums(stage)
        units = self._stage_units(stage)
        last = units[0].size / max(1, sum(unit.size for unit in units))
        if self.sharded.gradients:
            return Edge(reduced / self.batch.micro_batches * last)
        total = reduced if self.sharded.optimizer else reduced + gathered
        if not self.machine.software.hides_reduction:
            return Edge(total)
        return Edge(total * last, total * (1 - last))

    # ---------------------------------------------------------------------- after all backwards

    def _owned(self, units: Sequence[UnitLayout]) -> int:
        return sum(unit.shard_size if self.sharded.optimizer else unit.size for unit in units)

    def _update_bytes(self, units: Sequence[UnitLayout]) -> float:
        """Return the bytes of memory that a rank's update reads and writes, with the norm.

        Gradients are read twice; master weights and moments are read and written; new weights are
        written.
        """
        gradient = self.precision.gradient if self.sharded.gradients else self.precision.weight
        states = 2 * self.machine.platform.update.of_element
        half = self.precision.weight if self.precision.weight < _FP32 else 0
        return self._owned(units) * (2 * gradient + states + half)

    def _offload(self, units: Sequence[UnitLayout]) -> float:
        """Return the seconds of an update whose states are elsewhere."""
        spec, cluster = self.spec, self.machine.cluster
        on_gpus = self.machine.platform.on_gpus
        if spec.zero.offload == "none" or not (on_gpus or spec.zero.folder):
            return 0.0
        node = cluster.node
        ranks = self.nodes.most
        states = self._update_bytes(units) / (node.bandwidth_gb_s / ranks * _GIGA)
        bus = bytes_over_bus(units, self.sharded, self.precision) / self._bus_rate(cluster)
        seconds = max(states, bus) if on_gpus else states
        if spec.zero.folder and node.nvme_gb_s:
            moved = 2 * self._owned(units) * self.machine.platform.update.of_element
            seconds = max(seconds, moved / (node.nvme_gb_s / ranks * _GIGA))
        return seconds

    def after(self) -> Seconds:
        of_stages = [self._stage_units(stage) for stage in range(len(self.parts))]
        elsewhere = any(self._offload(units) for units in of_stages)
        update = max(self._update_bytes(units) for units in of_stages)
        small = sum(
            self._collective("all_reduce", Sent(), spread) for spread in self.spreads.values()
        )
        return {
            "optimizer": 0.0 if elsewhere else self.rates.moved(update),
            "messages": max(map(self._ties, range(len(self.parts)))),
            "overhead": self.machine.cluster.device.step_us * _MICRO + small,
        }

    def _ties(self, stage: int) -> float:
        """Return the seconds of summing tied parameters over the stages that hold them."""
        spread = self.spreads["pipeline"]
        held = any(isinstance(layer, Tied) for chunk in self.volumes.chunks[stage] for layer in chunk)
        if not held:
            return 0.0
        of_stages = list(self.volumes.of_pipeline(0, self.batches, spread.on_nodes))
        operations: Operations = of_stages[stage][0][0]
        return self._collective("all_reduce", operations["all_reduce"], spread)

    def checkpoint(self, step: float) -> float:
        spec, files = self.spec, self.machine.cluster.files
        if not 0 < spec.checkpoint.every < spec.train.steps or files is None:
            return 0.0
        stages = range(len(self.parts))
        states = max(
            sum(unit.shard_size for unit in self._stage_units(stage)) for stage in stages
        ) * self.machine.platform.update.of_element
        write = states * self.nodes.most / (files.node_gb_s * _GIGA)
        if files.all_gb_s:
            write = max(write, states * self.nodes.ranks / (files.all_gb_s * _GIGA))
        every = spec.checkpoint.every
        if not saves_behind(spec):
            return write / every
        copy = states / (self._bus_rate(self.machine.cluster))
        return (copy + max(0.0, write - every * step)) / every
