"""Bytes that an update sends in a step besides gradients and weights (pure).

LAMB adds up two norms of each parameter, in fp64. Muon sends matrices to the ranks that own them,
and what these make of them back (`parallel.zero.matrix_places`).
"""

from collections.abc import Iterator, Sequence

from hpczero.comm.trace import evenly
from hpczero.parallel.layout import UnitLayout
from hpczero.parallel.zero.matrix_places import Place, Ranks, places, size
from hpczero.planner.sent import Operations, RepeatedRanks, Sent, runs
from hpczero.spec.optimizer import Optimizer

_NORMS = 16  # bytes of a parameter's


def of_data(
    optimizer: Optimizer,
    units: Sequence[UnitLayout],
    ranks: Ranks,
    width: int,
    on_nodes: Sequence[int],
) -> Iterator[RepeatedRanks]:
    """Yield what data ranks send; `width`: bytes of a number that Muon sends."""
    if optimizer.name == "lamb":
        yield from _norms(units, on_nodes)
    elif optimizer.name == "muon":
        yield _to_owners_and_back(units, places(units, optimizer, ranks), ranks, width, on_nodes)
    else:
        yield from _nothing(on_nodes)


def of_tensor(
    optimizer: Optimizer,
    units: Sequence[UnitLayout],
    ranks: Ranks,
    width: int,
    on_nodes: Sequence[int],
    data_rank: int,
) -> Iterator[RepeatedRanks]:
    """Yield what the tensor ranks of one data rank send; `units`: as any of them holds them."""
    if optimizer.name == "lamb":
        yield from _norms(units, on_nodes)
    elif optimizer.name == "muon":
        found = [
            place
            for of_unit in places(units, optimizer, ranks)
            for place in of_unit
            if place.data == data_rank
        ]
        yield _among_tensor_ranks(found, ranks.tensor, width, on_nodes)
    else:
        yield from _nothing(on_nodes)


def _nothing(on_nodes: Sequence[int]) -> Iterator[RepeatedRanks]:
    for count, nodes in runs(on_nodes):
        yield [{}], count * nodes


def _norms(units: Sequence[UnitLayout], on_nodes: Sequence[int]) -> Iterator[RepeatedRanks]:
    total = _NORMS * sum(len(unit.slots) for unit in units)
    ranks = sum(on_nodes)
    for count, nodes in runs(on_nodes):
        yield [{"all_reduce": Sent(*evenly(2 * total, ranks, ranks - count))}], count * nodes


def _to_owners_and_back(
    units: Sequence[UnitLayout],
    found: Sequence[Sequence[Place]],
    ranks: Ranks,
    width: int,
    on_nodes: Sequence[int],
) -> RepeatedRanks:
    sent = _Exchange(on_nodes, width)
    for unit, of_unit in zip(units, found, strict=True):
        for place in of_unit:
            for rank in range(ranks.data):
                if elements := ranks.length(unit, place.slot, rank):
                    sent.add(place.data, rank, elements)
                    if ranks.sends(rank, place.data):
                        sent.add(rank, place.data, elements)
    return sent.operations(), 1


def _among_tensor_ranks(
    found: Sequence[Place], ranks: int, width: int, on_nodes: Sequence[int]
) -> RepeatedRanks:
    sent = _Exchange(on_nodes, width)
    for place in found:
        for rank in range(ranks):
            elements = size(place.held(ranks, rank))
            sent.add(place.tensor, rank, elements)
            if place.slot.is_split:
                sent.add(rank, place.tensor, elements)
    return sent.operations(), 1


class _Exchange:
    """The bytes that each rank of a group sends to others of it."""

    def __init__(self, on_nodes: Sequence[int], width: int) -> None:
        self._node_of = [node for node, count in enumerate(on_nodes) for _ in range(count)]
        self._width = width
        self._sent = [[0, 0] for _ in self._node_of]  # inside, between

    def add(self, source: int, target: int, elements: int) -> None:
        if source != target:
            between = self._node_of[source] != self._node_of[target]
            self._sent[source][between] += elements * self._width

    def operations(self) -> list[Operations]:
        return [{"all_to_all": Sent(*of_rank)} for of_rank in self._sent]
