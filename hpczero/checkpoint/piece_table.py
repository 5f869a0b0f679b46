"""The piece table: where every element of every tensor lies in a checkpoint (pure).

Each rank stores its shard of the model, piece after piece, without gaps, in datasets of its own:
one for each slot (weights, moments), all in the same order. A piece is a rectangle of a logical
tensor, in memory order, at an offset in the rank's datasets.

Legend: [n, D]: n pieces; D dimensions of the tensor that has the most, further ones of a tensor
that has fewer are 0 .. 1.
"""

from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import numpy as np

from hpczero.parallel.layout import Slices, UnitLayout, storing_replicas

Array = np.ndarray[Any, Any]

_TOO_MANY = 1 << 60  # elements: what 64 bits count stays exact below that


@dataclass(frozen=True)
class RankShard:
    """The units that a rank has, of which it stores shard `shard`.

    What every tensor rank has whole is stored by the first one. What several stages have is stored
    by the first of those, and replicas share the units: `stored_elsewhere` names this rank's units
    that another stage, or another replica, stores.
    """

    units: Sequence[UnitLayout]
    shard: int
    tensor_rank: int = 0
    stored_elsewhere: Container[str] = ()


@dataclass(frozen=True)
class Span:
    """The elements of a parameter that a rank stores without a gap.

    They are elements `inside` of the unit's buffer, at `offset` in the rank's datasets, and these
    rectangles of the tensor.
    """

    unit: int
    name: str
    inside: slice
    offset: int
    rectangles: tuple[Slices, ...]


def stored_by_others(units: Sequence[UnitLayout], replicas: int, replica: int) -> set[str]:
    """Return the units, by name, that other replicas store; each stores about as much."""
    storing = storing_replicas([unit.shard_size for unit in units], replicas)
    return {unit.name for unit, by in zip(units, storing, strict=True) if by != replica}


def stored_spans(holding: RankShard) -> Iterator[Span]:
    """Yield all that a rank stores, in the order of its datasets."""
    offset = 0
    for number, layout in enumerate(holding.units):
        if layout.name in holding.stored_elsewhere:
            continue
        shard = layout.shard(holding.shard)
        for slot, inside in layout.spans(shard.start, shard.stop):
            if not slot.is_split and holding.tensor_rank:
                continue
            boxes = tuple(slot.rectangles(inside.start, inside.stop))
            yield Span(number, slot.parameter.name, inside, offset, boxes)
            offset += inside.stop - inside.start


@dataclass(frozen=True)
class Tensor:
    name: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True)
class PieceOverlap:
    """A part of a piece that is in a wanted rectangle.

    `of_piece` and `of_wanted` are the same elements of the tensor, seen from the piece and from the
    rectangle.
    """

    rank: int
    offset: int
    shape: tuple[int, ...]
    of_piece: Slices
    of_wanted: Slices


@dataclass(frozen=True)
class Table:
    """The pieces of all tensors, those of a tensor one after the other."""

    tensors: tuple[Tensor, ...]
    tensor: Array  # [n] which
    rank: Array  # [n] whose datasets
    offset: Array  # [n] elements
    start: Array  # [n, D]
    stop: Array  # [n, D]

    @classmethod
    def of(
        cls, tensors: Sequence[Tensor], ranks: int, holding_of: Callable[[int], RankShard]
    ) -> "Table":
        """Make the table of what each of the ranks holds."""
        number = {tensor.name: index for index, tensor in enumerate(tensors)}
        dims = max((len(tensor.shape) for tensor in tensors), default=0)
        rows: list[tuple[int, ...]] = []
        for rank in range(ranks):
            for span in stored_spans(holding_of(rank)):
                offset = span.offset
                for box in span.rectangles:
                    padded = box + (slice(0, 1),) * (dims - len(box))
                    starts = (cut.start for cut in padded)
                    stops = (cut.stop for cut in padded)
                    rows.append((number[span.name], rank, offset, *starts, *stops))
                    offset += prod(cut.stop - cut.start for cut in box)
        table = np.array(rows, np.uint64).reshape(len(rows), 3 + 2 * dims)
        table = table[np.argsort(table[:, 0], kind="stable")]
        tensor = table[:, 0]
        rank_of = table[:, 1]
        offset_of = table[:, 2]
        start, stop = table[:, 3 : 3 + dims], table[:, 3 + dims :]
        return cls(tuple(tensors), tensor, rank_of, offset_of, start, stop)

    @cached_property
    def number(self) -> dict[str, int]:
        """Tensor name -> its number."""
        return {tensor.name: number for number, tensor in enumerate(self.tensors)}

    @cached_property
    def sizes(self) -> Array:
        """[n] elements of each piece."""
        return np.prod(self.stop - self.start, axis=1, dtype=np.uint64)

    def elements(self, ranks: int) -> list[int]:
        """Return the elements that each rank stores of a slot."""
        counts = np.zeros(ranks, np.uint64)
        np.add.at(counts, self.rank.astype(np.int64), self.sizes)
        return [int(count) for count in counts]

    @cached_property
    def _first(self) -> Array:
        return np.searchsorted(self.tensor, np.arange(len(self.tensors) + 1))

    def pieces(self, tensor: int) -> range:
        return range(int(self._first[tensor]), int(self._first[tensor + 1]))

    def box(self, piece: int) -> Slices:
        dims = len(self.tensors[int(self.tensor[piece])].shape)
        return _slices(self.start[piece, :dims], self.stop[piece, :dims])

    def overlaps(self, tensor: int, wanted: Slices) -> Iterator[PieceOverlap]:
        """Yield the parts of pieces that make up a rectangle of a tensor."""
        pieces = self.pieces(tensor)
        dims = len(wanted)
        rows = slice(pieces.start, pieces.stop)
        begin = np.array([cut.start for cut in wanted], np.uint64)
        end = np.array([cut.stop for cut in wanted], np.uint64)
        first = np.maximum(self.start[rows, :dims], begin)
        last = np.minimum(self.stop[rows, :dims], end)
        for index in np.flatnonzero((first < last).all(axis=1)):
            piece = pieces.start + int(index)
            box = self.box(piece)
            common = _slices(first[index], last[index])
            yield PieceOverlap(
                int(self.rank[piece]),
                int(self.offset[piece]),
                tuple(cut.stop - cut.start for cut in box),
                _seen_from(common, box),
                _seen_from(common, wanted),
            )

    def problem(self, elements_of_rank: Sequence[int]) -> str:
        """Return why this cannot be the table of a checkpoint whose ranks have so many elements.

        Empty if it can: then every element of every tensor, and every element of every rank, is in
        one piece.
        """
        is_large = any(tensor.size >= _TOO_MANY for tensor in self.tensors)
        if is_large or sum(elements_of_rank) >= _TOO_MANY:
            return f"it has tensors of {_TOO_MANY} elements and more"
        dims = self.stop.shape[1]
        ranks = len(elements_of_rank)
        shapes = [tensor.shape + (1,) * (dims - len(tensor.shape)) for tensor in self.tensors]
        if len(self.rank) and int(self.rank.max()) >= ranks:
            return f"it has pieces of rank {int(self.rank.max())}, and there are {ranks} ranks"
        outside = (self.start >= self.stop).any(axis=1)
        if len(self.rank):
            limits = np.array(shapes, np.uint64)[self.tensor.astype(np.int64)]
            outside |= (self.stop > limits).any(axis=1)
        if outside.any():
            tensor = self.tensors[int(self.tensor[np.flatnonzero(outside)[0]])]
            return f"pieces of {tensor.name} lie outside of its shape {list(tensor.shape)}"
        return self._rank_problem(elements_of_rank) or self._tensor_problem()

    def _rank_problem(self, elements_of_rank: Sequence[int]) -> str:
        """Refuse pieces of a rank that do not follow each other to the end of its data."""
        order = np.lexsort((self.offset, self.rank))
        rank = self.rank[order]
        offset = self.offset[order]
        end = offset + self.sizes[order]
        is_first = np.diff(rank, prepend=-1) != 0
        is_last = np.diff(rank, append=-1) != 0
        ends = np.zeros(len(elements_of_rank), np.uint64)
        ends[rank[is_last].astype(np.int64)] = end[is_last]
        wrong = np.where(is_first, offset != 0, offset != np.roll(end, 1))
        if wrong.any():
            first = int(rank[np.flatnonzero(wrong)[0]])
            return f"the pieces of rank {first} do not follow each other in its data"
        if (ends != np.array(elements_of_rank, np.uint64)).any():
            return "its pieces are not all of the ranks' data"
        return ""

    def _tensor_problem(self) -> str:
        """Refuse pieces that do not cover their tensor once.

        Each coordinate of a dimension gets a random measure, a rectangle the product of its sides':
        what is covered twice or not at all would have to make up for each other in 64 random bits.
        """
        random = np.random.default_rng()
        measured = np.ones(len(self.tensor), np.uint64)
        expected = np.ones(len(self.tensors), np.uint64)
        for dim in range(self.stop.shape[1]):
            factor, shift = random.integers(0, 1 << 63, 2, np.uint64) * np.uint64(2) + np.uint64(1)
            stops = _mixed(self.stop[:, dim] * factor + shift)
            measured *= stops - _mixed(self.start[:, dim] * factor + shift)
            lengths = np.array(
                [tensor.shape[dim] if dim < len(tensor.shape) else 1 for tensor in self.tensors],
                np.uint64,
            )
            ends = _mixed(lengths * factor + shift)
            expected *= ends - _mixed(np.zeros_like(lengths) + shift)
        covered = np.zeros(len(self.tensors), np.uint64)
        np.add.at(covered, self.tensor.astype(np.int64), measured)
        for index in np.flatnonzero(covered != expected):
            tensor = self.tensors[index]
            if tensor.size or len(self.pieces(int(index))):
                return f"the pieces of {tensor.name} are not all of it, or have parts of it twice"
        return ""


def _mixed(values: Array) -> Array:
    """Return a random-looking number of 64 bits for each (the finalizer of SplitMix64)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def _slices(starts: Array, stops: Array) -> Slices:
    return tuple(slice(int(a), int(b)) for a, b in zip(starts, stops, strict=True))


def _seen_from(cuts: Slices, base: Slices) -> Slices:
    return tuple(
        slice(cut.start - outer.start, cut.stop - outer.start)
        for cut, outer in zip(cuts, base, strict=True)
    )
