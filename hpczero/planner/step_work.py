"""All that a step computes, moves and sends on each stage of a job: counts, no seconds (pure).

They do not depend on the cluster, but for how many ranks its nodes have.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from hpczero.comm.trace import evenly
from hpczero.model.families import family
from hpczero.model.shapes import Layer
from hpczero.model.work import Pass
from hpczero.parallel.layout import UnitLayout
from hpczero.parallel.pipeline.partition import Tied
from hpczero.parallel.states import Precision, Sharded, bytes_over_bus, shares_nodes
from hpczero.planner.activations import element_bytes, sent_to_host
from hpczero.planner.allocation import Allocation
from hpczero.planner.platform import Platform, as_run
from hpczero.planner.spread import in_order, spreads
from hpczero.planner.volumes import GroupVolumes, Sent, Volumes
from hpczero.planner.work import Alike, Batch, Part, layout_of, parts_of, passes
from hpczero.spec.schema import Spec


@dataclass(frozen=True)
class Repeated:
    """An operation that is carried out so many times, and what a rank sends in all of them."""

    operation: str
    count: float
    sent: Sent


_NONE = Repeated("", 0, Sent())


@dataclass(frozen=True)
class DataTraffic:
    """The exchange of a stage's busiest data rank in a step.

    `read`: bytes of other ranks' gradients in the memory of a node that shares them.
    """

    reduced: Repeated
    gathered: Repeated
    read: float = 0.0


class StepWork:
    """A step of a spec on some nodes."""

    def __init__(
        self, spec: Spec, layers: Sequence[Layer], nodes: Allocation, platform: Platform
    ) -> None:
        self.spec = as_run(spec, platform.device)
        self.nodes, self.platform = nodes, platform
        self.spreads = spreads(in_order(self.spec, nodes), nodes)
        data = self.spreads["data"]
        self.volumes = Volumes(self.spec, layers, data.ranks)
        self._batches = self.volumes.batches(data.ranks - 1)  # the last rank has the most
        self.batch = Batch.of(self._batches)
        chunks = self.volumes.chunks
        self.parts = [parts_of(stage, spec.model, spec.memory) for stage in chunks]
        self.units = [[self.volumes.units.of(chunk) for chunk in stage] for stage in chunks]
        self.shared = shares_nodes(self.spec.zero, data.on_nodes)
        self.sharded = Sharded.at_stage(spec.zero.stage, self.shared)
        self.precision = Precision(element_bytes(spec), self.batch.micro_batches > 1)
        self.layout = layout_of(spec, self.batch.samples, platform.kernels)
        self._passes: dict[Alike, tuple[Pass, Pass]] = {}
        self._traffic: dict[int, DataTraffic] = {}

    @property
    def stages(self) -> range:
        return range(len(self.parts))

    # ------------------------------------------------------------------------ a micro-batch

    def passes(self, alike: Alike) -> tuple[Pass, Pass]:
        """Return forward and backward of one of these layers."""
        if alike not in self._passes:
            self._passes[alike] = passes(self.spec.model, alike, self.layout)
        return self._passes[alike]

    def held(self, stage: int, chunk: int) -> int:
        """Return the elements of a chunk's units."""
        return sum(unit.size for unit in self.units[stage][chunk])

    def accumulated(self, stage: int, chunk: int) -> float:
        """Return the bytes moved to add a micro-batch's gradients to those before it."""
        if not self.precision.accumulates or self.sharded.gradients:
            return 0.0
        width = self.precision.weight + 2 * self.precision.gradient
        return self.held(stage, chunk) * width

    def sums(self, part: Part) -> tuple[int, int]:
        """Return the sums of activations over tensor ranks in forward, and in backward."""
        sums = family(self.spec.model).tensor_sums
        forward, backward = (
            sum(sums[alike.layer.kind][column] * count for alike, count in part.layers)
            for column in range(2)
        )
        return forward, backward + part.recomputed_blocks * sums["blocks"][0]

    def tensor_messages(self, stage: int) -> list[Repeated]:
        """Return the collectives of tensor ranks in a step, each with what one of it sends."""
        spread = self.spreads["tensor"]
        elsewhere = spread.ranks - spread.on_one
        return [
            Repeated(operation, count, Sent(*evenly(size, spread.ranks, elsewhere)))
            for samples, times in self._batches
            for operation, size, count in self.volumes.tensor_messages(stage, samples, times)
        ]

    def over_bus(self, stage: int, chunk: int) -> float:
        """Return the bytes of activations that a forward, or a backward, moves over the bus."""
        if not self.platform.on_gpus or self.spec.memory.offload_activations == "none":
            return 0.0
        chunks = self.volumes.chunks[stage][chunk : chunk + 1]
        samples = max(size for size, _ in self._batches)
        kept = sent_to_host(self.spec, samples, chunks, self.platform.kernels)
        return sum(moments.kept for moments in kept)

    # ---------------------------------------------------------------------------- the pipeline

    @cached_property
    def message(self) -> float:
        """The bytes of a message between stages: all have the same."""
        on_nodes = self.spreads["pipeline"].on_nodes
        operations, _ = next(iter(self.volumes.of_pipeline(0, self._batches, on_nodes)))
        sent = operations[0]["send"]
        messages = (2 * self.spec.parallel.chunks - 1) * self.batch.micro_batches
        return (sent.inside + sent.between) / messages

    @cached_property
    def node_of_stage(self) -> list[int]:
        on_nodes = self.spreads["pipeline"].on_nodes
        return [node for node, count in enumerate(on_nodes) for _ in range(count)]

    def ties(self, stage: int) -> Sent:
        """Return what a stage sends to sum gradients of tied parameters."""
        chunks = self.volumes.chunks[stage]
        if not any(isinstance(layer, Tied) for chunk in chunks for layer in chunk):
            return Sent()
        on_nodes = self.spreads["pipeline"].on_nodes
        of_stages = list(self.volumes.of_pipeline(0, self._batches, on_nodes))
        return of_stages[stage][0][0]["all_reduce"]

    # ------------------------------------------------------------------------ the data axis

    def stage_units(self, stage: int) -> list[UnitLayout]:
        return [unit for chunk in self.units[stage] for unit in chunk]

    def first_unit(self, stage: int) -> float:
        """Return the share of the stage's elements that are in the unit of its first layer."""
        units = self.stage_units(stage)
        return units[0].size / max(1, sum(unit.size for unit in units))

    def traffic(self, stage: int) -> DataTraffic:
        if stage not in self._traffic:
            self._traffic[stage] = self._count_traffic(stage)
        return self._traffic[stage]

    def _count_traffic(self, stage: int) -> DataTraffic:
        spread = self.spreads["data"]
        micro_batches = self.batch.micro_batches
        units = self.stage_units(stage)
        passes = micro_batches if self.sharded.gradients else 1
        gathers = 2 * micro_batches if self.sharded.parameters else 1
        if spread.ranks == 1:
            return DataTraffic(_NONE, _NONE)
        totals = GroupVolumes(self.volumes.of_data(stage, 0, spread.on_nodes, True)).totals
        read = 0.0
        if self.shared:
            read = float(sum(unit.size for unit in units) * self.precision.weight * passes)
        return DataTraffic(
            Repeated("reduce_scatter", len(units) * passes, totals["reduce_scatter"].rank),
            Repeated("all_gather", len(units) * gathers, totals["all_gather"].rank),
            read,
        )

    # ---------------------------------------------------------------------- after all backwards

    def owned(self, stage: int) -> int:
        """Return the elements that a rank of the stage steps."""
        units = self.stage_units(stage)
        return sum(unit.shard_size if self.sharded.optimizer else unit.size for unit in units)

    def shards(self, stage: int) -> int:
        return sum(unit.shard_size for unit in self.stage_units(stage))

    def updated(self, stage: int) -> float:
        """Return the bytes of memory that a rank's update reads and writes, with the norm.

        Gradients are read twice; master weights and moments are read and written; new weights are
        written.
        """
        gradient = self.precision.gradient if self.sharded.gradients else self.precision.weight
        states = 2 * self.platform.update.of_element
        half = self.precision.weight if self.precision.weight < 4 else 0
        return self.owned(stage) * (2 * gradient + states + half)

    @property
    def is_elsewhere(self) -> bool:
        """True if master weights and moments are not where the weights are."""
        zero = self.spec.zero
        return zero.offload != "none" and (self.platform.on_gpus or bool(zero.folder))

    def updated_over_bus(self, stage: int) -> int:
        return bytes_over_bus(self.stage_units(stage), self.sharded, self.precision)
