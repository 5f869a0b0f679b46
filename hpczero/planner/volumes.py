"""What the ranks send in a step, along which axis, inside nodes and between them, as the ledger of a run counts it (pure; design 7).

Legend: N ranks along the axis; A micro-batches a data rank has in a step; w bytes of a number in the model's precision; S = samples x sequence x
hidden x w bytes of activations of one micro-batch; all_reduce, reduce_scatter and all_gather of B bytes count 2(N-1)/N B, (N-1)/N B, (N-1)/N B.

every axis but the world: all_gather 8 N, the norm.
data      U: bytes of a unit (a layer of the rank's stage, its part of the tensor split, padded); for every unit
              stage 0   reduce_scatter U, all_gather U (the sum)              stage 1   reduce_scatter U, all_gather U (the weights)
              stage 2   A reduce_scatter U, all_gather U                      stage 3   A reduce_scatter U; all_gather U whenever it is used and
                                                                                        gone (twice a micro-batch, but for what is still there)
          node-shared: nothing inside the node; between M nodes with R ranks on this one, of every shard that belongs to another node one slice
          of R (reduce_scatter), and M - 1 times the own shard (all_gather); stage 3 as stage 2.
tensor    of every micro-batch: a block has two pairs of a column- and a row-parallel layer, of which each has an all_reduce S in forward and one in
          backward; the embedding one in forward, the head one in backward; the loss an all_reduce of 4 and one of 8 bytes a token.
          sequence_parallel: for an all_reduce a reduce_scatter and an all_gather (the sequence padded to a multiple of N), in backward one more
          all_gather for each column-parallel layer, which keeps only its own part of the sequence, and an all_reduce of each norm's gradients.
pipeline  of every micro-batch: S at each boundary of parts forward, and backward (with sequence_parallel the rank's own part of it). Tied
          embeddings: the first and the last stage have an all_reduce of the gradient's own shard, once, in fp32 where it is accumulated so.
world     the loss, whether a save is still being written, and the requests to stop: 56 bytes, summed over all.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial, reduce
from itertools import groupby, permutations
from math import prod

from hpczero.comm.grid import Grid, impossible, order_is_free
from hpczero.comm.trace import evenly
from hpczero.data.sampler import micro_batch_counts, micro_batch_sizes
from hpczero.errors import InputError
from hpczero.model.shapes import Layer, known, layer_count, layers
from hpczero.parallel.pipeline.partition import (
    Tied,
    Units,
    chunks_of_stages,
    handed_on,
    layers_that_run,
)
from hpczero.parallel.states import Sharded, shares_nodes
from hpczero.planner.activations import gathers_in_step
from hpczero.spec.rules import AXES
from hpczero.spec.schema import Parallel, Spec

_NORM = 8
_AGREEMENT = 56
_LOSS = (
    1,
    2,
)  # fp32 numbers of each token that the tensor ranks agree on: the largest logit; the sum of exponentials with the target's logit
# family -> kind of layer -> sums over tensor ranks in forward, in backward, and norms in it.
_TENSOR = {"gpt": {"embedding": (1, 0, 0), "blocks": (2, 2, 2), "head": (0, 1, 1)}}

Batches = tuple[
    tuple[int, int], ...
]  # (samples in a micro-batch, how many such micro-batches) of a data rank


@dataclass(frozen=True, slots=True)
class Sent:
    """Bytes to ranks of the same node and of others."""

    inside: int = 0
    between: int = 0

    def __add__(self, other: "Sent") -> "Sent":
        return Sent(self.inside + other.inside, self.between + other.between)

    def __mul__(self, times: int) -> "Sent":
        return Sent(self.inside * times, self.between * times)

    def most(self, other: "Sent") -> "Sent":
        return Sent(max(self.inside, other.inside), max(self.between, other.between))


Operations = Mapping[str, Sent]


@dataclass(frozen=True)
class Total:
    """Of one operation along one axis: the most that a rank sends inside its node and the most that one sends to others, and all ranks' sum."""

    rank: Sent
    all: Sent


def resolved(spec: Spec, node_of_rank: Sequence[int]) -> Parallel:
    """`spec.parallel` with an order that is decided: for "auto" that which sends the fewest bytes between nodes; of equal ones that which
    has tensor innermost, then data. A model that is not known without building it gets the latter.
    """
    parallel, ranks = spec.parallel, len(node_of_rank)
    if ranks % (parallel.tensor * parallel.pipeline):
        raise InputError(impossible(parallel, ranks, _most(spec)))
    if parallel.order != "auto":
        return parallel
    sizes = {
        "tensor": parallel.tensor,
        "data": ranks // (parallel.tensor * parallel.pipeline),
        "pipeline": parallel.pipeline,
    }
    candidates = [
        parallel.model_copy(update={"order": ",".join(order)}) for order in permutations(AXES)
    ]
    if order_is_free(sizes, node_of_rank) or not known(spec.model):
        return candidates[0]
    volumes = Volumes(spec, layers(spec.model), sizes["data"])
    return min(
        candidates, key=lambda candidate: volumes.between_nodes(Grid.build(candidate, node_of_rank))
    )


def _most(spec: Spec) -> dict[str, int]:
    """What the model allows of the axes."""
    if not known(spec.model):
        return {}
    return {
        "tensor": spec.model.heads,
        "pipeline": max(1, layer_count(spec.model) // spec.parallel.chunks),
    }


Alike = tuple[
    Sequence[Operations], int
]  # what ranks send that follow each other, and how often the same comes again


class Members:
    """What each rank of a group sends along its axis."""

    def __init__(self, alike: Iterable[Alike]) -> None:
        self._alike = list(alike)

    def of(self, index: int) -> Operations:
        for operations, times in self._alike:
            if index < len(operations) * times:
                return operations[index % len(operations)]
            index -= len(operations) * times
        raise IndexError(index)

    @cached_property
    def totals(self) -> dict[str, Total]:
        return merged(
            (name, Total(sent, sent * times))
            for ranks, times in self._alike
            for operations in ranks
            for name, sent in operations.items()
        )


def merged(totals: Iterable[tuple[str, Total]]) -> dict[str, Total]:
    found: dict[str, Total] = {}
    for name, total in totals:
        before = found.get(name, Total(Sent(), Sent()))
        found[name] = Total(before.rank.most(total.rank), before.all + total.all)
    return found


class Volumes:
    """Of one spec, for any order of the grid's axes."""

    def __init__(self, spec: Spec, layers: Sequence[Layer], data_ranks: int) -> None:
        self.spec, self.data_ranks = spec, data_ranks
        self.chunks = chunks_of_stages(spec, layers)
        self.units = Units(data_ranks, spec.parallel.tensor)
        self._width = 4 if spec.train.precision == "fp32" else 2
        self._micro_batches, _, _ = micro_batch_sizes(
            spec.train.global_batch, spec.train.micro_batch, data_ranks
        )
        self._known: dict[object, Members] = {}
        self._gathers_of: dict[object, Counter[int]] = {}

    def of_rank(self, grid: Grid, rank: int) -> dict[str, dict[str, Sent]]:
        """axis -> operation -> what this rank sends."""
        groups = {axis: grid.ranks(rank, axis) for axis in AXES} | {"world": grid.rank_at_place}
        found = {
            axis: self._of_group(grid, axis, group).of(group.index(rank))
            for axis, group in groups.items()
        }
        return {
            axis: sent
            for axis, operations in found.items()
            if (sent := {name: sent for name, sent in operations.items() if sent != Sent()})
        }

    def totals(self, grid: Grid) -> dict[str, dict[str, Total]]:
        """axis -> operation -> what is sent at most by a rank, and by all."""
        groups = {axis: grid.groups(axis) for axis in AXES} | {"world": iter([grid.rank_at_place])}
        found = {
            axis: _of_groups(Counter(self._of_group(grid, axis, group) for group in groups[axis]))
            for axis in groups
        }
        return {axis: totals for axis, totals in found.items() if totals}

    def between_nodes(self, grid: Grid) -> int:
        """What all ranks send to other nodes."""
        return sum(
            total.all.between
            for operations in self.totals(grid).values()
            for total in operations.values()
        )

    def _of_group(self, grid: Grid, axis: str, group: Sequence[int]) -> Members:
        """It depends on the group's place along the other axes, and on how many of its ranks each node has: they are ordered by node."""
        nodes = [grid.node_of_rank[rank] for rank in group]
        on_nodes = (
            (len(nodes),)
            if nodes[0] == nodes[-1]
            else tuple(len(list(same)) for _, same in groupby(nodes))
        )
        place = partial(grid.coordinate, group[0])
        key: tuple[object, ...]
        if axis == "data":
            key = axis, place("pipeline"), place("tensor"), on_nodes, grid.nodes_cut_data_alike
        elif axis == "tensor":
            key = axis, place("pipeline"), self._batches(place("data")), on_nodes
        elif axis == "pipeline":
            key = axis, place("tensor"), self._batches(place("data")), on_nodes
        else:
            key = axis, on_nodes
        if key not in self._known:
            carried_out = {
                "data": self._data,
                "tensor": self._tensor,
                "pipeline": self._pipeline,
                "world": self._world,
            }[axis]
            self._known[key] = Members(carried_out(*key[1:]) if len(group) > 1 else [([{}], 1)])  # type: ignore[operator]
        return self._known[key]

    def _batches(self, data_rank: int) -> Batches:
        train = self.spec.train
        return tuple(
            sorted(
                micro_batch_counts(
                    data_rank, train.global_batch, train.micro_batch, self.data_ranks
                ).items()
            )
        )

    def _layers(self, stage: int) -> list[Layer]:
        return [layer for chunk in self.chunks[stage] for layer in chunk]

    def _world(self, on_nodes: Sequence[int]) -> Iterator[Alike]:
        ranks = sum(on_nodes)
        for count, nodes in _in_a_row(on_nodes):
            yield (
                [{"all_reduce": Sent(*evenly(2 * _AGREEMENT, ranks, ranks - count))}],
                count * nodes,
            )

    def _data(
        self, stage: int, tensor_rank: int, on_nodes: Sequence[int], cut_alike: bool
    ) -> Iterator[Alike]:
        shared = shares_nodes(self.spec.zero, on_nodes, cut_alike)
        sharded, ranks = Sharded.at_stage(self.spec.zero.stage, shared), self.data_ranks
        once = Counter(layout.size for layout in self.units.of(self._layers(stage), tensor_rank))
        reduced = {
            size: times * (self._micro_batches if sharded.gradients else 1)
            for size, times in once.items()
        }
        gathers = self._gathers(stage, tensor_rank) if sharded.parameters else once
        for count, nodes in _in_a_row(on_nodes):
            elsewhere = ranks - count
            norm = self._norm(ranks, elsewhere)
            if not shared:
                sums = _sum(
                    Sent(*evenly(size * self._width, ranks, elsewhere)) * times
                    for size, times in reduced.items()
                )
                weights = _sum(
                    Sent(*evenly(size * self._width, ranks, elsewhere)) * times
                    for size, times in gathers.items()
                )
                yield [{"reduce_scatter": sums, "all_gather": weights + norm}], count * nodes
                continue
            weights = _sum(
                Sent(0, (len(on_nodes) - 1) * size // ranks * self._width) * times
                for size, times in gathers.items()
            )
            of_node: list[Operations] = []
            for index in range(count):
                slices = (
                    (_slice(size // ranks, count, index), times) for size, times in reduced.items()
                )
                sums = _sum(
                    Sent(0, elsewhere * length * self._width) * times for length, times in slices
                )
                of_node.append({"reduce_scatter": sums, "all_gather": weights + norm})
            yield of_node, nodes

    def _gathers(self, stage: int, tensor_rank: int) -> Counter[int]:
        sizes = tuple(layout.size for layout in self.units.of(self._layers(stage), tensor_rank))
        key = stage, sizes
        if key not in self._gathers_of:
            self._gathers_of[key] = gathers_in_step(
                self.chunks[stage], sizes, self.spec.parallel, stage, self._micro_batches
            )
        return self._gathers_of[key]

    def _tensor(self, stage: int, batches: Batches, on_nodes: Sequence[int]) -> Iterator[Alike]:
        ranks = self.spec.parallel.tensor
        messages = [
            message
            for samples, times in batches
            for message in self._tensor_messages(stage, samples, times)
        ]
        for count, nodes in _in_a_row(on_nodes):
            operations = {"all_gather": self._norm(ranks, ranks - count)}
            for operation, size, times in messages:
                operations[operation] = (
                    operations.get(operation, Sent())
                    + Sent(*evenly(size, ranks, ranks - count)) * times
                )
            yield [operations], count * nodes

    def _tensor_messages(
        self, stage: int, samples: int, times: int
    ) -> Iterator[tuple[str, int, int]]:
        """Of so many micro-batches of so many samples: operation, bytes (of an all_reduce twice, as it goes both ways), how often."""
        model, ranks, tokens = (
            self.spec.model,
            self.spec.parallel.tensor,
            samples * self.spec.model.seq_len,
        )
        kinds = [layer.name.partition(".")[0] for layer in layers_that_run(self.chunks[stage])]
        table = _TENSOR[model.family]
        forward, backward, norms = (
            sum(table[kind][column] for kind in kinds) * times for column in range(3)
        )
        if self.spec.parallel.sequence_parallel:
            padded = samples * -(-model.seq_len // ranks) * ranks * model.hidden * self._width
            yield "reduce_scatter", padded, forward + backward
            yield "all_gather", padded, forward + 2 * backward
            yield "all_reduce", 2 * 2 * model.hidden * self._width, norms
        else:
            yield "all_reduce", 2 * tokens * model.hidden * self._width, forward + backward
        if "head" in kinds:
            for numbers in _LOSS:
                yield "all_reduce", 2 * numbers * 4 * tokens, times

    def _pipeline(
        self, tensor_rank: int, batches: Batches, on_nodes: Sequence[int]
    ) -> Iterator[Alike]:
        stages, last = self.spec.parallel.pipeline, self.spec.parallel.pipeline - 1
        nodes = [node for node, count in enumerate(on_nodes) for _ in range(count)]
        size = (
            sum(samples * times for samples, times in batches)
            * prod(handed_on(self.spec, tensor_rank))
            * self._width
        )
        for stage, chunks in enumerate(self.chunks):
            onward = _directly(
                size * (len(chunks) - (stage == last)), nodes[stage] != nodes[(stage + 1) % stages]
            )
            back = _directly(size * (len(chunks) - (stage == 0)), nodes[stage] != nodes[stage - 1])
            operations = {"send": onward + back}
            operations["all_reduce"] = _sum(
                Sent(*evenly(2 * size, 2, nodes[0] != nodes[last]))
                for size in self._tied(stage, tensor_rank)
            )
            operations["all_gather"] = self._norm(stages, stages - on_nodes[nodes[stage]])
            yield [operations], 1

    def _tied(self, stage: int, tensor_rank: int) -> Iterator[int]:
        """Bytes of the own shards of what the first and the last stage have both, as their gradients are accumulated."""
        sharded = Sharded.at_stage(self.spec.zero.stage, node_shared=False)
        width = 4 if sharded.gradients and self._micro_batches > 1 else self._width
        for layout in self.units.of(
            [layer for layer in self._layers(stage) if isinstance(layer, Tied)], tensor_rank
        ):
            yield layout.shard_size * width

    @staticmethod
    def _norm(ranks: int, elsewhere: int) -> Sent:
        return Sent(*evenly(_NORM * ranks, ranks, elsewhere))


def _of_groups(groups: Mapping[Members, int]) -> dict[str, Total]:
    counted = (
        (name, Total(total.rank, total.all * count))
        for members, count in groups.items()
        for name, total in members.totals.items()
    )
    return {name: total for name, total in merged(counted).items() if total.all != Sent()}


def _in_a_row(on_nodes: Sequence[int]) -> Iterator[tuple[int, int]]:
    """(ranks, how many nodes that follow each other have so many)."""
    for count, nodes in groupby(on_nodes):
        yield count, len(list(nodes))


def _sum(sent: Iterable[Sent]) -> Sent:
    return reduce(Sent.__add__, sent, Sent())


def _directly(size: int, elsewhere: bool) -> Sent:
    return Sent(0, size) if elsewhere else Sent(size, 0)


def _slice(length: int, parts: int, index: int) -> int:
    """Elements of slice `index` of a shard, in whole cache lines, as `comm.node` cuts it."""
    step = -(-length // (parts * 64)) * 64
    return min((index + 1) * step, length) - min(index * step, length)
