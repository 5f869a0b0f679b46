"""All that a step computes, moves and sends on each stage of a job: counts, no seconds (pure).

They do not depend on the cluster, but for how many ranks its nodes have.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

from hpczero.comm.trace import evenly
from hpczero.model.families import family
from hpczero.model.shapes import Layer, sums_of
from hpczero.model.work import Pass, Product
from hpczero.optim.matrices import is_matrix, products
from hpczero.parallel.pipeline.partition import Chunks, Tied
from hpczero.parallel.states import Precision, Sharded, bytes_over_bus, shares_nodes
from hpczero.planner.activations import element_bytes, sent_to_host
from hpczero.planner.allocation import Allocation
from hpczero.planner.data_volumes import norms
from hpczero.planner.once import Once
from hpczero.planner.platform import Platform, as_run
from hpczero.planner.sent import GroupVolumes, RepeatedRanks, Sent, together
from hpczero.planner.spread import in_order, spreads
from hpczero.planner.volumes import Volumes
from hpczero.planner.work import Alike, Batch, Part, layout_of, parts_of, passes
from hpczero.spec.schema import Spec


@dataclass(frozen=True)
class Repeated:
    """An operation that is carried out so many times, and what a rank sends in all of them."""

    operation: str
    count: float
    sent: Sent


_NONE = Repeated("", 0, Sent())
_READ_AGAIN = {"lamb": 12}  # bytes of an element: master weights and moments


@dataclass(frozen=True)
class DataTraffic:
    """The exchange of a stage's busiest data rank in a step.

    `joined`: what replicas exchange, in a step on average. `read`: bytes of other ranks' gradients
    in the memory of a node that shares them.
    """

    reduced: Repeated
    gathered: Repeated
    joined: tuple[Repeated, ...]
    read: float = 0.0


@dataclass(frozen=True)
class Held:
    """The parameters that a rank of a stage holds, by chunk, in elements of whole units."""

    by_chunk: tuple[int, ...]
    units: int
    first: int  # of the unit of its first layer
    shards: int
    over_bus: int  # bytes, where states are elsewhere

    @property
    def all(self) -> int:
        return sum(self.by_chunk)


class StepWork:
    """A step of a spec on some nodes.

    `once`: what layouts of one job share, if there are several. `bounds`: a bound of its time will
    do.
    """

    def __init__(
        self,
        spec: Spec,
        layers: Sequence[Layer],
        nodes: Allocation,
        platform: Platform,
        once: Once | None = None,
        bounds: bool = False,
    ) -> None:
        self.spec = as_run(spec, platform.device)
        self.nodes, self.platform = nodes, platform
        self.once = once or Once()
        self.spreads = spreads(in_order(self.spec, nodes), nodes, spec.zero.shard_ranks)
        data, shard = self.spreads["data"], self.spreads["shard"]
        self.volumes = Volumes(self.spec, layers, data.ranks, self.once)
        self.exchanged = self.volumes.among_data.exchanged
        self._batches = self.volumes.batches(data.ranks - 1)  # the last rank has the most
        self.batch = Batch.of(self._batches)
        parallel, memory = spec.parallel, spec.memory
        self.cut = parallel.pipeline, parallel.chunks
        self._again = memory.recompute, memory.recompute_every
        by = self.cut, self._again
        self.parts = self.once(_parts_of_stages, by, self.volumes.chunks, spec)
        self.shared = shares_nodes(self.spec.zero, shard.on_nodes)
        self.sharded = Sharded.at_stage(spec.zero.stage, self.shared)
        self.precision = Precision(element_bytes(spec), self.batch.micro_batches > 1)
        # stage 3 gathers what was released, by each stage's own course: of those that are alike the
        # last one gathers the least
        gathers = self.sharded.parameters and parallel.pipeline > 1
        alike = self.once(self._alike_stages, by)
        self.like = list(self.stages) if gathers and not bounds else alike
        self._least: dict[int, int] = {}
        if gathers and bounds:
            self._least = {like: stage for stage, like in enumerate(alike)}
        ranks, states = (shard.ranks, parallel.tensor), (self.sharded, self.precision)
        self.held = self.once(self._held, (self.cut, ranks, states))
        self.layout = layout_of(spec, self.batch.samples, platform.kernels)

    @property
    def stages(self) -> range:
        return range(len(self.parts))

    def _alike_stages(self) -> list[int]:
        """Return for each stage the first one that runs as many layers of each kind.

        The first and the last stage, and those that tie parameters, are like no other.
        """
        first: dict[object, int] = {}
        last = len(self.parts) - 1
        like = []
        for stage, (own, layers) in enumerate(zip(self.parts, self.volumes.chunks, strict=True)):
            tied = any(isinstance(layer, Tied) for layer in chain(*layers))
            key = tuple(part.kinds for part in own) if 0 < stage < last and not tied else stage
            like.append(first.setdefault(key, stage))
        return like

    def _held(self) -> list[Held]:
        chunks = self.volumes.chunks
        of_first = {stage: self._held_by(chunks[stage]) for stage in set(self.like)}
        return [of_first[like] for like in self.like]

    def _held_by(self, chunks: Chunks) -> Held:
        layouts = self.volumes.among_data.units(self.spreads["shard"].ranks)
        by_chunk = [layouts.of(chunk) for chunk in chunks]
        units = list(chain.from_iterable(by_chunk))
        return Held(
            tuple(sum(unit.size for unit in each) for each in by_chunk),
            len(units),
            units[0].size,
            sum(unit.shard_size for unit in units),
            bytes_over_bus(units, self.sharded, self.precision),
        )

    @property
    def operations(self) -> float:
        """The operations of one sequence by the model's formula, forward and backward."""
        model = self.spec.model
        of_layers = self.once(family(model).operations, "", model, self.spec.seq_len)
        return sum(of_layers)

    # ------------------------------------------------------------------------ a micro-batch

    def passes(self, alike: Alike) -> tuple[Pass, Pass]:
        """Return forward and backward of one of these layers."""
        return passes(self.spec.model, alike, self.layout)

    def accumulated(self, stage: int, chunk: int) -> float:
        """Return the bytes moved to add a micro-batch's gradients to those before it."""
        if not self.precision.accumulates or self.sharded.gradients:
            return 0.0
        width = self.precision.weight + 2 * self.precision.gradient
        return self.held[stage].by_chunk[chunk] * width

    def sums(self, part: Part) -> tuple[float, float]:
        """Return the sums of activations over tensor ranks in forward, and in backward.

        One of a part of the positions counts as that part.
        """
        model, seq_len = self.spec.model, self.spec.seq_len
        sums, kinds, again = family(model).tensor_sums, Counter[str](), Counter[str]()
        for alike, count in part.layers:
            kinds[alike.layer.kind] += count
            again[alike.layer.kind] += count if alike.repeats == "block" else 0
        forward = backward = 0.0
        for stream, length in enumerate(model.streams(seq_len)):
            ahead, back = sums_of(sums, kinds, stream)
            repeated, _ = sums_of(sums, again, stream)
            forward += ahead * length / seq_len
            backward += (back + repeated) * length / seq_len
        return forward, backward

    def tensor_messages(self, stage: int) -> list[Repeated]:
        """Return the collectives of tensor ranks in a step, each with what one of it sends."""
        spread, memory = self.spreads["tensor"], self.spec.memory
        again = self._again, memory.partition_activations, memory.loss_chunk
        ranks = spread.ranks, spread.on_one, self.layout.sequence
        key = self.cut, stage, again, ranks, self._batches
        return self.once(self._tensor_messages, key, stage)

    def _tensor_messages(self, stage: int) -> list[Repeated]:
        spread = self.spreads["tensor"]
        elsewhere = spread.ranks - spread.on_one
        return [
            Repeated(operation, count, Sent(*evenly(size, spread.ranks, elsewhere)))
            for samples, times in self._batches
            for operation, size, count in self.volumes.tensor_messages(stage, samples, times)
        ]

    def over_bus(self, stage: int, chunk: int) -> float:
        """Return the bytes of activations that a forward, or a backward, moves over the bus."""
        memory = self.spec.memory
        if not self.platform.on_gpus or memory.offload_activations == "none":
            return 0.0
        samples = max(size for size, _ in self._batches)
        again = self._again, memory.partition_activations, memory.loss_chunk
        ranks = self.layout.tensor, self.layout.sequence
        key = self.cut, stage, chunk, again, ranks, samples
        return self.once(self._over_bus, key, stage, chunk, samples)

    def _over_bus(self, stage: int, chunk: int, samples: int) -> float:
        chunks = self.volumes.chunks[stage][chunk : chunk + 1]
        kept = sent_to_host(self.spec, samples, chunks, self.platform.kernels)
        return sum(moments.kept for moments in kept)

    # ---------------------------------------------------------------------------- the pipeline

    @cached_property
    def message(self) -> float:
        """The bytes of a message between stages: all have the same."""
        ranks = self.layout.tensor, self.layout.sequence
        return self.once(self._message, (self.cut, ranks, self._batches))

    def _message(self) -> float:
        on_nodes = self.spreads["pipeline"].on_nodes
        operations, _ = next(iter(self._of_pipeline(on_nodes)))
        sent = operations[0]["send"]
        messages = (2 * self.spec.parallel.chunks - 1) * self.batch.micro_batches
        return (sent.inside + sent.between) / messages

    def _of_pipeline(self, on_nodes: Sequence[int]) -> Iterator[RepeatedRanks]:
        shards = self.spreads["shard"].ranks
        return self.volumes.of_pipeline(0, self._batches, on_nodes, shards)

    @cached_property
    def node_of_stage(self) -> list[int]:
        on_nodes = self.spreads["pipeline"].on_nodes
        return [node for node, count in enumerate(on_nodes) for _ in range(count)]

    @cached_property
    def ties(self) -> list[Sent]:
        """What each stage sends to sum gradients of tied parameters."""
        on_nodes = self.spreads["pipeline"].on_nodes
        ranks = self.layout.tensor, self.spreads["shard"].ranks
        states = self.sharded, self.precision
        return self.once(self._ties, (self.cut, ranks, states, on_nodes), on_nodes)

    def _ties(self, on_nodes: tuple[int, ...]) -> list[Sent]:
        if not any(isinstance(layer, Tied) for layer in chain(*chain(*self.volumes.chunks))):
            return []
        of_stages = self._of_pipeline(on_nodes)
        return [ranks[0]["all_reduce"] for ranks, _ in of_stages]

    # ------------------------------------------------------------------------ the data axis

    def traffic(self, stage: int) -> DataTraffic:
        shard, replica, zero = self.spreads["shard"], self.spreads["replica"], self.sharded
        stage = self._least.get(self.like[stage], stage)
        passes = self.batch.micro_batches if zero.gradients else 1
        scheduled = (self.spec.parallel.schedule, *self._again) if zero.parameters else ()
        on_nodes = shard.on_nodes, replica.on_nodes
        key = self.cut, scheduled, stage, self.layout.tensor, on_nodes, zero, passes
        return self.once(self._traffic, (key, self.shared), stage, passes)

    def _traffic(self, stage: int, passes: int) -> DataTraffic:
        shard, replica, held = self.spreads["shard"], self.spreads["replica"], self.held[stage]
        among_data = self.volumes.among_data
        reduced = gathered = _NONE
        joined: tuple[Repeated, ...] = ()
        if shard.ranks > 1:
            in_8_bits = self.spec.compresses_gathers and shard.nodes > 1
            of_shards = among_data.of_shards(stage, 0, shard.on_nodes, True, in_8_bits)
            totals = GroupVolumes(together(of_shards, norms(shard.on_nodes))).totals
            sums, weights = (totals[name].rank for name in ("reduce_scatter", "all_gather"))
            gathers = 2 * passes if self.sharded.parameters else 1
            reduced = Repeated("reduce_scatter", held.units * passes, sums)
            gathered = Repeated("all_gather", held.units * gathers, weights)
        if replica.ranks > 1:
            exchange = among_data.of_replicas(stage, 0, shard.ranks, 0, replica.on_nodes)
            count = held.units / among_data.exchanged.every
            joined = tuple(
                Repeated(operation, count, total.rank)
                for operation, total in GroupVolumes(exchange).totals.items()
            )
        shared = self.shared and shard.ranks > 1
        read = float(held.all * self.precision.weight * passes) if shared else 0.0
        return DataTraffic(reduced, gathered, joined, read)

    # ---------------------------------------------------------------------- after all backwards

    def owned(self, stage: int) -> int:
        """Return the elements that a rank of the stage steps."""
        held = self.held[stage]
        return held.shards if self.sharded.optimizer else held.all

    def updated(self, stage: int) -> float:
        """Return the bytes of memory that a rank's update reads and writes, with the norm.

        Gradients are read twice; master weights and moments are read and written; new weights are
        written.
        """
        gradient = self.precision.gradient if self.sharded.gradients else self.precision.weight
        states = 2 * self.platform.update_of(self.spec).of_element
        states += _READ_AGAIN.get(self.spec.optimizer.name, 0)
        half = self.precision.weight if self.precision.weight < 4 else 0
        return self.owned(stage) * (2 * gradient + states + half)

    def orthogonalised(self, stage: int) -> list[list[Product]]:
        """Return the products of each parameter of a stage that Muon orthogonalises."""
        optimizer = self.spec.optimizer
        if optimizer.name != "muon":
            return []
        return [
            products(parameter)
            for chunk in self.volumes.chunks[stage]
            for layer in chunk
            for parameter in layer.parameters
            if is_matrix(parameter, optimizer)
        ]

    @property
    def is_elsewhere(self) -> bool:
        """True if master weights and moments are not where the weights are."""
        zero = self.spec.zero
        return zero.offload != "none" and (self.platform.on_gpus or bool(zero.folder))


def _parts_of_stages(chunks: Sequence[Chunks], spec: Spec) -> list[tuple[Part, ...]]:
    return [parts_of(stage, spec.model, spec.memory) for stage in chunks]
