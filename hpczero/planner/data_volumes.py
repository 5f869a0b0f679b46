"""Bytes that data ranks send each other in a step, by the formulas of `planner.volumes` (pure).

States are cut into shards among some data ranks, and others may have replicas of them.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import reduce

from hpczero.comm.grid import node_slice
from hpczero.comm.trace import evenly
from hpczero.data.samples import micro_batch_sizes
from hpczero.parallel.layout import UnitLayout
from hpczero.parallel.pipeline import partition
from hpczero.parallel.replicas.exchanged import Exchanged
from hpczero.parallel.replicas.sizes import FORMS, Form, part_of
from hpczero.parallel.states import Sharded, shares_nodes
from hpczero.parallel.zero.gather_sizes import message_sizes
from hpczero.parallel.zero.matrix_places import Ranks
from hpczero.planner import update_volumes
from hpczero.planner.activations import element_bytes
from hpczero.planner.gathers import gathers, gathers_in_step
from hpczero.planner.once import Once
from hpczero.planner.sent import Operations, RepeatedRanks, Sent, both, runs, together
from hpczero.spec.schema import Memory, Parallel, Spec

_NORM = 8
_DIGITS = 3  # of proportions that count as the same


class DataVolumes:
    """Volumes of the data ranks of one spec.

    `once`: what layouts of one job share. `nearly`: gathers of stage 3 may be nearly right.
    """

    def __init__(
        self,
        spec: Spec,
        chunks: Sequence[partition.Chunks],
        data_ranks: int,
        once: Once,
        nearly: bool,
    ) -> None:
        self.spec = spec
        self._chunks = chunks
        self._once = once
        self.data_ranks = data_ranks
        self._nearly = nearly
        self._width = element_bytes(spec)
        self.exchanged = Exchanged.by(spec)
        batch = spec.train.global_batch, spec.train.micro_batch
        self.micro_batches, _, _ = micro_batch_sizes(*batch, data_ranks)

    def units(self, shards: int) -> partition.LayoutCache:
        """Return the layouts of units that are cut among so many data ranks."""
        ranks = shards, self.spec.parallel.tensor
        return self._once(partition.LayoutCache, ranks, *ranks)

    def _layouts(self, shards: int, stage: int, tensor_rank: int) -> Sequence[UnitLayout]:
        layers = [layer for chunk in self._chunks[stage] for layer in chunk]
        return self.units(shards).of(layers, tensor_rank)

    def of_shards(
        self,
        stage: int,
        tensor_rank: int,
        on_nodes: Sequence[int],
        cut_alike: bool,
        in_8_bits: bool = False,
    ) -> Iterator[RepeatedRanks]:
        """Yield the volumes of the data ranks that have one copy of the states, without the norm.

        They have so many ranks on each of their nodes. `cut_alike`: `Grid.nodes_cut_data_alike`.
        `in_8_bits`: weights are gathered so.
        """
        shared = shares_nodes(self.spec.zero, on_nodes, cut_alike)
        sharded = Sharded.at_stage(self.spec.zero.stage, shared)
        ranks = sum(on_nodes)
        units = self._layouts(ranks, stage, tensor_rank)
        sizes = tuple(layout.size for layout in units)
        once = Counter(sizes)
        sums = self.micro_batches if sharded.gradients else 1
        reduced = {size: times * sums for size, times in once.items()}
        gathers = self._gathers(stage, sizes) if sharded.parameters else once
        gradients = [(size * self._width, times) for size, times in reduced.items()]
        messages = message_sizes(units, self.spec.parallel.tensor) if in_8_bits else {}
        weights = [
            (ranks * messages[size] if size in messages else size * self._width, times)
            for size, times in gathers.items()
        ]
        if shared:
            yield from self._node_shared(reduced, weights, on_nodes)
            return
        for count, nodes in runs(on_nodes):
            elsewhere = ranks - count
            operations = {
                name: summed(Sent(*evenly(size, ranks, elsewhere)) * times for size, times in each)
                for name, each in (("reduce_scatter", gradients), ("all_gather", weights))
            }
            yield [operations], count * nodes

    def of_data(
        self,
        stage: int,
        tensor_rank: int,
        on_nodes: Sequence[int],
        cut_alike: bool,
        in_8_bits: bool = False,
    ) -> Iterator[RepeatedRanks]:
        """Yield the volumes of data ranks without replicas: `of_shards`, and `of_all`."""
        of_shards = self.of_shards(stage, tensor_rank, on_nodes, cut_alike, in_8_bits)
        yield from together(of_shards, self.of_all(stage, tensor_rank, sum(on_nodes), on_nodes))

    def of_all(
        self, stage: int, tensor_rank: int, shards: int, on_nodes: Sequence[int]
    ) -> Iterator[RepeatedRanks]:
        """Yield the volumes of the norm, and of the update, which are among all data ranks."""
        of_update = update_volumes.of_data(
            self.spec.optimizer,
            self._layouts(shards, stage, tensor_rank),
            self.update_ranks(shards),
            self._width,
            on_nodes,
        )
        yield from together(norms(on_nodes), of_update)

    def update_ranks(self, shards: int) -> Ranks:
        """Return the ranks among which an update divides its work."""
        sharded = Sharded.at_stage(self.spec.zero.stage, node_shared=False).optimizer
        return Ranks(self.data_ranks, shards, self.spec.parallel.tensor, sharded)

    def _node_shared(
        self,
        reduced: Mapping[int, int],
        gathers: Iterable[tuple[int, int]],
        on_nodes: Sequence[int],
    ) -> Iterator[RepeatedRanks]:
        """Yield the volumes of data ranks whose nodes share states.

        `reduced`: unit's size -> times; `gathers`: (bytes, times).
        """
        ranks = sum(on_nodes)
        others = len(on_nodes) - 1
        weights = summed(Sent(0, others * (size // ranks)) * times for size, times in gathers)
        for count, nodes in runs(on_nodes):
            elsewhere = ranks - count
            node: list[Operations] = []
            for index in range(count):
                sums = 0
                for size, times in reduced.items():
                    part = node_slice(size // ranks, count, index)
                    sums += elsewhere * (part.stop - part.start) * self._width * times
                node.append({"reduce_scatter": Sent(0, sums), "all_gather": weights})
            yield node, nodes

    def workers(self, shards: int) -> int:
        """Return the replicas whose gradients have norms of their own, else 1."""
        return self.data_ranks // shards if self.exchanged.gradients_differ else 1

    def of_replicas(
        self, stage: int, tensor_rank: int, shards: int, shard: int, on_nodes: Sequence[int]
    ) -> Iterator[RepeatedRanks]:
        """Yield the volumes, in a step on average, of the data ranks that have one of the shards.

        They exchange as `parallel.replicas.exchanged` says.
        """
        ranks, form = sum(on_nodes), self.exchanged.form
        units = self._layouts(shards, stage, tensor_rank)
        if form is None:
            sizes = Counter(unit.shard_size for unit in units)
            for count, nodes in runs(on_nodes):
                sums = summed(
                    Sent(*evenly(2 * size * self._width, ranks, ranks - count)) * times
                    for size, times in sizes.items()
                )
                yield [{"all_reduce": sums}], count * nodes
            return
        exchanges = Counter((form, self._exchanged_elements(unit)) for unit in units)
        if form.block and self.spec.parallel.tensor > 1:
            parts = (self._exchanged_part(unit, shard) for unit in units)
            exact = (
                sum(held.stop - held.start for held in unit.held_by_all(part.start, part.stop))
                for unit, part in zip(units, parts, strict=True)
            )
            exchanges.update((FORMS["fp32"], elements) for elements in exact if elements)
        sent = [
            sent_in_exchanges(form, elements, on_nodes, times)
            for (form, elements), times in exchanges.items()
        ]
        for of_rank in zip(*sent, strict=True):
            total = reduce(both, of_rank)
            yield [{name: each // self.exchanged.every for name, each in total.items()}], 1

    def _exchanged_part(self, unit: UnitLayout, shard: int) -> slice:
        """Return the elements of a unit that a rank exchanges: those that it owns, or its shard."""
        zero = Sharded.at_stage(self.spec.zero.stage, node_shared=False)
        if self.exchanged.gradients_differ and not zero.optimizer:
            return slice(0, unit.size)
        return slice(shard * unit.shard_size, (shard + 1) * unit.shard_size)

    def _exchanged_elements(self, unit: UnitLayout) -> int:
        part = self._exchanged_part(unit, 0)
        return part.stop - part.start

    def _gathers(self, stage: int, sizes: tuple[int, ...]) -> Counter[int]:
        parallel, count = self.spec.parallel, self.micro_batches
        cut = parallel.pipeline, parallel.chunks, parallel.schedule
        roughly = self._gathers_alike if self._nearly else None
        memory = self.spec.memory
        key = cut, stage, sizes, count, memory.recompute, memory.recompute_every
        by = self._chunks[stage], sizes, parallel, stage, count, memory, roughly
        return self._once(gathers_in_step, key, *by)

    def _gathers_alike(
        self,
        chunks: partition.Chunks,
        sizes: Sequence[int],
        parallel: Parallel,
        stage: int,
        micro_batches: int,
        memory: Memory,
    ) -> Counter[int]:
        """Return unit -> its all-gathers, of units whose sizes are in the same proportions."""
        cut = parallel.pipeline, parallel.chunks, parallel.schedule
        alike = tuple(round(size / max(sizes), _DIGITS) for size in sizes)
        key = cut, stage, micro_batches, alike, memory.recompute, memory.recompute_every
        return self._once(gathers, key, chunks, sizes, parallel, stage, micro_batches, memory)


def sent_in_exchanges(
    form: Form, elements: int, on_nodes: Sequence[int], times: int
) -> Iterator[Operations]:
    """Yield what each replica sends in so many exchanges of so many elements."""
    ranks = sum(on_nodes)
    parts = [part_of(form, elements, ranks, replica) for replica in range(ranks)]
    messages = [form.message(part.stop - part.start) for part in parts]
    average = form.message(form.part(elements, ranks))
    total = sum(messages)
    first = 0
    for count in on_nodes:
        here = sum(messages[first : first + count])
        for own in messages[first : first + count]:
            yield {
                "all_to_all": Sent(here - own, total - here) * times,
                "all_gather": Sent(*evenly(average * ranks, ranks, ranks - count)) * times,
            }
        first += count


def norms(on_nodes: Sequence[int]) -> Iterator[RepeatedRanks]:
    """Yield the volumes of ranks that make the gradient's norm, and no more."""
    ranks = sum(on_nodes)
    for count, nodes in runs(on_nodes):
        yield [{"all_gather": norm(ranks, ranks - count)}], count * nodes


def norm(ranks: int, elsewhere: int, workers: int = 1) -> Sent:
    return Sent(*evenly(_NORM * workers * ranks, ranks, elsewhere))


def summed(sent: Iterable[Sent]) -> Sent:
    return reduce(Sent.__add__, sent, Sent())
