"""The pieces of a step, predicted for a cluster (pure)."""

from collections.abc import Iterable

from hpczero.planner.cluster import Cluster
from hpczero.planner.links import Links
from hpczero.planner.memory import saves_behind
from hpczero.planner.rates import PassTime, Rates
from hpczero.planner.software import Software
from hpczero.planner.spread import Spread
from hpczero.planner.step_costs import Edge, Seconds
from hpczero.planner.step_work import Repeated, StepWork
from hpczero.planner.volumes import Sent
from hpczero.planner.work import Alike

_GIGA, _MILLI, _MICRO = 1e9, 1e-3, 1e-6
_GATHERS_ONCE_MORE = 1.5  # a backward's sum by a forward's, with sequence parallelism


class Predicted:
    """The costs of a step's work on a cluster."""

    def __init__(self, work: StepWork, cluster: Cluster, software: Software) -> None:
        self.work, self.cluster, self.software = work, cluster, software
        self.rates = Rates.of(cluster, work.spec.train.precision, work.nodes.most, software)
        self.links = Links.of(cluster, work.nodes)
        self._passes: dict[Alike, tuple[PassTime, PassTime]] = {}
        self._actions: dict[object, Seconds] = {}
        self._of_tensor: dict[int, tuple[float, float]] = {}
        self._of_data: dict[int, tuple[float, float]] = {}

    def hidden(self) -> float:
        return self.software.hidden

    # ------------------------------------------------------------------------ a micro-batch

    def action(self, kind: str, stage: int, chunk: int) -> Seconds:
        work = self.work
        key = kind, work.parts[stage][chunk], work.held(stage, chunk)
        if key not in self._actions:
            self._actions[key] = self._action(kind == "backward", stage, chunk)
        return self._actions[key]

    def _action(self, backward: bool, stage: int, chunk: int) -> Seconds:
        part = self.work.parts[stage][chunk]
        total = dict.fromkeys(("compute", "attention", "memory"), 0.0)
        host = 0.0
        for alike, count in part.layers:
            time = self._time(alike)[backward]
            total["compute"] += count * time.compute
            total["attention"] += count * time.attention
            total["memory"] += count * time.memory
            host += count * time.host
        if backward and self.software.accumulates_apart:
            total["memory"] += self.rates.moved(self.work.accumulated(stage, chunk))
        device = sum(total.values())
        total["launch"] = max(0.0, host - device) if self.rates.is_gpu else host
        total["tensor"] = self._tensor_sum(stage)[backward] * self.work.sums(part)[backward]
        return total

    def _time(self, alike: Alike) -> tuple[PassTime, PassTime]:
        if alike not in self._passes:
            forward, backward = self.work.passes(alike)
            self._passes[alike] = self.rates.time(forward), self.rates.time(backward)
        return self._passes[alike]

    def _tensor_sum(self, stage: int) -> tuple[float, float]:
        """Return the seconds of tensor's collectives for each sum, in forward and in backward.

        The few that are no sums of activations are spread over these.
        """
        if stage not in self._of_tensor:
            spread = self.work.spreads["tensor"]
            sums = [self.work.sums(part) for part in self.work.parts[stage]]
            forward, backward = (sum(column) for column in zip(*sums, strict=True))
            more = _GATHERS_ONCE_MORE if self.work.layout.sequence else 1.0
            each = 0.0
            if spread.ranks > 1 and forward + backward:
                messages = self.work.tensor_messages(stage)
                seconds = self._together(messages, spread) / self.work.batch.micro_batches
                each = seconds / (forward + more * backward)
            self._of_tensor[stage] = each, more * each
        return self._of_tensor[stage]

    def _together(self, messages: Iterable[Repeated], spread: Spread) -> float:
        """Return the seconds of operations, of which each sends what it says."""
        return sum(
            each.count * self._collective(each.operation, each.sent, spread) for each in messages
        )

    def _collective(self, operation: str, sent: Sent, spread: Spread, count: float = 1) -> float:
        rings = operation in self.software.rings
        return self.links.collective(operation, sent, spread, rings, count)

    def bus(self, kind: str, stage: int, chunk: int) -> float:
        return self.work.over_bus(stage, chunk) / self._bus_rate

    @property
    def _bus_rate(self) -> float:
        device = self.cluster.device
        return (device.bus_gb_s or device.bandwidth_gb_s) * _GIGA

    def transfer(self, part: int) -> float:
        work = self.work
        spread, tensor = work.spreads["pipeline"], work.spreads["tensor"]
        here, there = part % spread.ranks, (part + 1) % spread.ranks
        between = work.node_of_stage[here] != work.node_of_stage[there]
        if not self.software.divides_messages or work.layout.sequence or tensor.ranks == 1:
            return self.links.message(work.message, spread, between)
        piece = work.message / tensor.ranks
        gathered = Sent(int(work.message - piece))
        return self.links.message(piece, spread, between) + self.links.collective(
            "all_gather", gathered, tensor, rings=True
        )

    # ------------------------------------------------------------------------ the data axis

    def _exchanged(self, stage: int) -> tuple[float, float]:
        """Return the seconds of all of a step's reduce_scatters, and of its all_gathers."""
        if stage not in self._of_data:
            spread = self.work.spreads["data"]
            traffic = self.work.traffic(stage)
            reduced, gathered = (
                self._collective(each.operation, each.sent, spread, each.count)
                for each in (traffic.reduced, traffic.gathered)
            )
            self._of_data[stage] = reduced + self.rates.moved(traffic.read), gathered
        return self._of_data[stage]

    def data(self, kind: str, stage: int, chunk: int) -> float:
        """Return those of stages 2 and 3, spread over the chunks by their parameters."""
        work = self.work
        reduced, gathered = self._exchanged(stage)
        seconds = gathered / 2 if work.sharded.parameters else 0.0
        if kind == "backward" and work.sharded.gradients:
            seconds += reduced
        if not seconds:
            return 0.0
        whole = sum(work.held(stage, each) for each in range(len(work.parts[stage])))
        return seconds * work.held(stage, chunk) / whole / work.batch.micro_batches

    def _first(self, each: Repeated, stage: int, passes: int) -> float:
        """Return the seconds of the first layer's unit, in one of so many passes over all units."""
        share = self.work.first_unit(stage) / passes
        sent = Sent(int(each.sent.inside * share), int(each.sent.between * share))
        return self._collective(each.operation, sent, self.work.spreads["data"])

    def weights(self, stage: int) -> Edge:
        """Return the gathers of new weights, and the update of states that are elsewhere.

        The first unit is waited for: at stage 3 that of the first forward.
        """
        work = self.work
        _, gathered = self._exchanged(stage)
        each = work.traffic(stage).gathered
        hides = self.software.hides_weights
        offload = self._offload(stage) if work.is_elsewhere and hides else 0.0
        if work.sharded.parameters:
            return Edge(self._first(each, stage, 2 * work.batch.micro_batches), 0.0, offload)
        if not work.sharded.optimizer:
            return Edge(offload=offload)
        if not hides:
            return Edge(gathered)
        first = min(gathered, self._first(each, stage, 1))
        return Edge(first, gathered - first, offload)

    def gradients(self, stage: int) -> Edge:
        """Return the sums of the last backward: that of the first layer's unit is waited for."""
        work = self.work
        reduced, gathered = self._exchanged(stage)
        traffic = work.traffic(stage)
        if work.sharded.gradients:
            return Edge(self._first(traffic.reduced, stage, work.batch.micro_batches))
        total, first = reduced, self._first(traffic.reduced, stage, 1)
        if not work.sharded.optimizer:
            total, first = total + gathered, first + self._first(traffic.gathered, stage, 1)
        if not self.software.hides_reduction:
            return Edge(total)
        first = min(total, first)
        return Edge(first, total - first)

    # ---------------------------------------------------------------------- after all backwards

    def _offload(self, stage: int) -> float:
        """Return the seconds of an update by the CPU, over the bus, or through files."""
        work, node = self.work, self.cluster.node
        ranks = work.nodes.most
        seconds = work.updated(stage) / (node.bandwidth_gb_s / ranks * _GIGA)
        if work.platform.on_gpus:
            seconds = max(seconds, work.updated_over_bus(stage) / self._bus_rate)
        if work.spec.zero.folder and node.nvme_gb_s:
            moved = 2 * work.owned(stage) * work.platform.update.of_element
            seconds = max(seconds, moved / (node.nvme_gb_s / ranks * _GIGA))
        return seconds

    def after(self) -> Seconds:
        work = self.work
        update = max(map(work.updated, work.stages))
        offload = 0.0
        if work.is_elsewhere and not self.software.hides_weights:
            offload = max(map(self._offload, work.stages))
        small = sum(
            self._collective("all_reduce", Sent(), spread) for spread in work.spreads.values()
        )
        pipeline = work.spreads["pipeline"]
        ties = [work.ties(stage) for stage in work.stages]
        return {
            "optimizer": 0.0 if work.is_elsewhere else self.rates.moved(update),
            "messages": max(self._collective("all_reduce", sent, pipeline) for sent in ties)
            if any(sent != Sent() for sent in ties)
            else 0.0,
            "offload": offload,
            "overhead": self.cluster.device.step_us * _MICRO
            + self.software.step_ms * _MILLI
            + small,
        }

    def checkpoint(self, step: float) -> float:
        work, files = self.work, self.cluster.files
        every = work.spec.checkpoint.every
        if not 0 < every < work.spec.train.steps or files is None:
            return 0.0
        states = max(map(work.shards, work.stages)) * work.platform.update.of_element
        write = states * work.nodes.most / (files.node_gb_s * _GIGA)
        if files.all_gb_s:
            write = max(write, states * work.nodes.ranks / (files.all_gb_s * _GIGA))
        if not saves_behind(work.spec):
            return write / every
        return states / self._bus_rate / every + max(0.0, write / every - step)
