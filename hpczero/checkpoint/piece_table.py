"""The piece table: where every element of every tensor lies in a checkpoint (pure).

Each rank stores what it owns of the model, piece after piece, without gaps, in datasets of its own: one for each slot (weights, moments), all in the
same order. A piece is a rectangle of a logical tensor, in memory order, at an offset in the rank's datasets.

Legend: [n, D]: n pieces; D dimensions of the tensor that has the most, further ones of a tensor that has fewer are 0 .. 1.
"""

from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import numpy as np

from hpczero.parallel.layout import Slices, UnitLayout

Array = np.ndarray[Any, Any]

_TOO_MANY = 1 << 60  # elements: what 64 bits count stays exact below that


@dataclass(frozen=True)
class RankShard:
    """The units that a rank has, of which it owns shard `shard`. What is whole on every tensor rank belongs to the first one, and what several
    stages have (`copies`: units by name) to the first of those.
    """

    units: Sequence[UnitLayout]
    shard: int
    tensor_rank: int = 0
    copies: Container[str] = ()


@dataclass(frozen=True)
class Span:
    """What a rank stores without a gap of a parameter: elements `inside` of the unit's buffer, at `offset` in the rank's datasets, as rectangles."""

    unit: int
    name: str
    inside: slice
    offset: int
    rectangles: tuple[Slices, ...]


def stored(holding: RankShard) -> Iterator[Span]:
    """All that a rank stores, in the order of its datasets."""
    offset = 0
    for number, layout in enumerate(holding.units):
        if layout.name in holding.copies:
            continue
        own = layout.shard(holding.shard)
        for place, part in layout.stretches(own.start, own.stop):
            if place.parameter.split is None and holding.tensor_rank:
                continue
            yield Span(
                number,
                place.parameter.name,
                part,
                offset,
                tuple(place.rectangles(part.start, part.stop)),
            )
            offset += part.stop - part.start


@dataclass(frozen=True)
class Tensor:
    name: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True)
class Part:
    """What is asked for of a piece: `of_piece` and `of_wanted` are the same elements of the tensor, seen from the piece and from the rectangle
    that was asked about.
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
        """Of what each of the ranks holds."""
        number = {tensor.name: index for index, tensor in enumerate(tensors)}
        dims = max((len(tensor.shape) for tensor in tensors), default=0)
        rows: list[tuple[int, ...]] = []
        for rank in range(ranks):
            for stretch in stored(holding_of(rank)):
                offset = stretch.offset
                for box in stretch.rectangles:
                    padded = box + (slice(0, 1),) * (dims - len(box))
                    rows.append(
                        (
                            number[stretch.name],
                            rank,
                            offset,
                            *(cut.start for cut in padded),
                            *(cut.stop for cut in padded),
                        )
                    )
                    offset += prod(cut.stop - cut.start for cut in box)
        found = np.array(rows, np.uint64).reshape(len(rows), 3 + 2 * dims)
        found = found[np.argsort(found[:, 0], kind="stable")]
        return cls(
            tuple(tensors),
            found[:, 0],
            found[:, 1],
            found[:, 2],
            found[:, 3 : 3 + dims],
            found[:, 3 + dims :],
        )

    @cached_property
    def number(self) -> dict[str, int]:
        """Of a tensor, by name."""
        return {tensor.name: number for number, tensor in enumerate(self.tensors)}

    @cached_property
    def sizes(self) -> Array:
        """[n] elements of each piece."""
        return np.prod(self.stop - self.start, axis=1, dtype=np.uint64)

    def elements(self, ranks: int) -> list[int]:
        """What each rank stores of a slot."""
        found = np.zeros(ranks, np.uint64)
        np.add.at(found, self.rank.astype(np.int64), self.sizes)
        return [int(count) for count in found]

    @cached_property
    def _first(self) -> Array:
        return np.searchsorted(self.tensor, np.arange(len(self.tensors) + 1))

    def pieces(self, tensor: int) -> range:
        return range(int(self._first[tensor]), int(self._first[tensor + 1]))

    def box(self, piece: int) -> Slices:
        dims = len(self.tensors[int(self.tensor[piece])].shape)
        return tuple(
            slice(int(a), int(b))
            for a, b in zip(self.start[piece, :dims], self.stop[piece, :dims], strict=True)
        )

    def parts(self, tensor: int, wanted: Slices) -> Iterator[Part]:
        """What pieces have of a rectangle of a tensor, by rank and offset."""
        found = self.pieces(tensor)
        dims = len(wanted)
        first = np.maximum(
            self.start[found.start : found.stop, :dims],
            np.array([cut.start for cut in wanted], np.uint64),
        )
        last = np.minimum(
            self.stop[found.start : found.stop, :dims],
            np.array([cut.stop for cut in wanted], np.uint64),
        )
        for index in np.flatnonzero((first < last).all(axis=1)):
            piece = found.start + int(index)
            whole = self.box(piece)
            cuts = [slice(int(a), int(b)) for a, b in zip(first[index], last[index], strict=True)]
            yield Part(
                int(self.rank[piece]),
                int(self.offset[piece]),
                tuple(cut.stop - cut.start for cut in whole),
                _seen_from(cuts, whole),
                _seen_from(cuts, wanted),
            )

    def problem(self, elements_of_rank: Sequence[int]) -> str:
        """Why this cannot be the table of a checkpoint whose ranks have so many elements; empty if it can: then every element of every tensor, and
        every element of every rank, is in one piece.
        """
        if (
            any(tensor.size >= _TOO_MANY for tensor in self.tensors)
            or sum(elements_of_rank) >= _TOO_MANY
        ):
            return f"it has tensors of {_TOO_MANY} elements and more"
        shapes = np.array(
            [
                tensor.shape + (1,) * (self.stop.shape[1] - len(tensor.shape))
                for tensor in self.tensors
            ],
            np.uint64,
        )
        if len(self.rank) and int(self.rank.max()) >= len(elements_of_rank):
            return f"it has pieces of rank {int(self.rank.max())}, and there are {len(elements_of_rank)} ranks"
        outside = (self.start >= self.stop).any(axis=1) | (
            len(self.rank) > 0 and (self.stop > shapes[self.tensor.astype(np.int64)]).any(axis=1)
        )
        if outside.any():
            tensor = self.tensors[int(self.tensor[np.flatnonzero(outside)[0]])]
            return f"pieces of {tensor.name} lie outside of its shape {list(tensor.shape)}"
        return self._stored_twice(elements_of_rank) or self._not_whole()

    def _stored_twice(self, elements_of_rank: Sequence[int]) -> str:
        """The pieces of each rank follow each other."""
        order = np.lexsort((self.offset, self.rank))
        rank, offset, end = (
            self.rank[order],
            self.offset[order],
            self.offset[order] + self.sizes[order],
        )
        is_first, is_last = np.diff(rank, prepend=-1) != 0, np.diff(rank, append=-1) != 0
        ends = np.zeros(len(elements_of_rank), np.uint64)
        ends[rank[is_last].astype(np.int64)] = end[is_last]
        wrong = np.where(is_first, offset != 0, offset != np.roll(end, 1))
        if wrong.any():
            return f"the pieces of rank {int(rank[np.flatnonzero(wrong)[0]])} do not follow each other in its data"
        if (ends != np.array(elements_of_rank, np.uint64)).any():
            return "its pieces are not all of the ranks' data"
        return ""

    def _not_whole(self) -> str:
        """The pieces of a tensor cover it once. Each coordinate of a dimension gets a random measure, a rectangle the product of its sides': what is
        covered twice or not at all would have to make up for each other in 64 random bits.
        """
        random = np.random.default_rng()
        measured = np.ones(len(self.tensor), np.uint64)
        whole = np.ones(len(self.tensors), np.uint64)
        for dim in range(self.stop.shape[1]):
            factor, shift = random.integers(0, 1 << 63, 2, np.uint64) * np.uint64(2) + np.uint64(1)
            measured *= _mixed(self.stop[:, dim] * factor + shift) - _mixed(
                self.start[:, dim] * factor + shift
            )
            lengths = np.array(
                [tensor.shape[dim] if dim < len(tensor.shape) else 1 for tensor in self.tensors],
                np.uint64,
            )
            whole *= _mixed(lengths * factor + shift) - _mixed(np.zeros_like(lengths) + shift)
        found = np.zeros(len(self.tensors), np.uint64)
        np.add.at(found, self.tensor.astype(np.int64), measured)
        for index in np.flatnonzero(found != whole):
            if self.tensors[index].size or len(self.pieces(int(index))):
                return f"the pieces of {self.tensors[index].name} are not all of it, or have parts of it twice"
        return ""


def _mixed(values: Array) -> Array:
    """A random-looking number of 64 bits for each (the finalizer of SplitMix64)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def _seen_from(cuts: Sequence[slice], base: Slices) -> Slices:
    return tuple(
        slice(cut.start - whole.start, cut.stop - whole.start)
        for cut, whole in zip(cuts, base, strict=True)
    )
