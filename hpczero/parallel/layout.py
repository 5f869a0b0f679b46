"""Where every element of the model lies (pure): the one source for the engine, checkpoints and the planner.

A *unit* is what is gathered, reduced and stepped together: the parameters of one layer, one after the other in a flat buffer, each
beginning at a multiple of 64 elements. The buffer is cut into `shards` equal shards, padded so that each is a multiple of 64 elements; data
rank r owns shard r.
A parameter that tensor parallelism cuts lies in the buffer as this tensor rank's part of it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from hpczero.model.shapes import Layer, Parameter

ALIGNMENT = 64

Slices = tuple[slice, ...]


@dataclass(frozen=True)
class ParameterSlot:
    """A parameter in its unit: `held` is the rectangle of the logical tensor that this tensor rank holds, at elements offset .. stop - 1."""

    parameter: Parameter
    held: Slices
    offset: int

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(part.stop - part.start for part in self.held)

    @property
    def stop(self) -> int:
        return self.offset + prod(self.shape)

    def logical(self, start: int, stop: int) -> Iterator[slice]:
        """Where elements start .. stop - 1 of this rank's part, flattened, lie in the flattened logical parameter: stretches, in order."""
        return stretches_of_part(self.parameter.shape, self.held, start, stop)

    def rectangles(self, start: int, stop: int) -> Iterator[Slices]:
        """Elements start .. stop - 1 of the unit's buffer, all of this parameter, as rectangles of the logical tensor, in that order."""
        for inner in rectangles(self.shape, start - self.offset, stop - self.offset):
            yield tuple(
                slice(base.start + part.start, base.start + part.stop)
                for base, part in zip(self.held, inner, strict=True)
            )


@dataclass(frozen=True)
class UnitLayout:
    name: str
    slots: tuple[ParameterSlot, ...]
    shards: int
    shard_size: int

    @property
    def size(self) -> int:
        return self.shards * self.shard_size

    def shard(self, index: int) -> slice:
        return slice(index * self.shard_size, (index + 1) * self.shard_size)

    def stretches(self, start: int, stop: int) -> Iterator[tuple[ParameterSlot, slice]]:
        """The parameters that lie in elements start .. stop - 1 of the buffer, each with the elements of the buffer that are its own there."""
        for place in self.slots:
            first, last = max(start, place.offset), min(stop, place.stop)
            if first < last:
                yield place, slice(first, last)


def unit_layout(
    layer: Layer, shards: int = 1, tensor_ranks: int = 1, tensor_rank: int = 0
) -> UnitLayout:
    places, offset = [], 0
    for parameter in layer.parameters:
        places.append(
            ParameterSlot(parameter, tensor_part(parameter, tensor_ranks, tensor_rank), offset)
        )
        offset += -(-prod(places[-1].shape) // ALIGNMENT) * ALIGNMENT
    shard_size = -(-offset // (shards * ALIGNMENT)) * ALIGNMENT
    return UnitLayout(layer.name, tuple(places), shards, shard_size)


def tensor_part(parameter: Parameter, ranks: int, rank: int) -> Slices:
    """The rectangle of a parameter that one of the tensor ranks holds: all of it, unless it is split."""
    whole = [slice(0, length) for length in parameter.shape]
    if parameter.split is not None:
        whole[parameter.split] = shard_range(
            parameter.shape[parameter.split], parameter.grain, ranks, rank
        )
    return tuple(whole)


def shard_range(length: int, grain: int, ranks: int, rank: int) -> slice:
    """Rank's part of `length` elements dealt out in grains (a head's columns stay together); the first ranks may get one grain more."""
    grains, more = divmod(-(-length // grain), ranks)
    first = rank * grains + min(rank, more)
    last = first + grains + (rank < more)
    return slice(min(first * grain, length), min(last * grain, length))


def stretches_of_part(
    shape: tuple[int, ...], part: Slices, start: int, stop: int
) -> Iterator[slice]:
    """Elements start .. stop - 1 of a rectangle `part` of a tensor, in memory order of a copy of it: where they lie in the flattened tensor.

    As few stretches as possible; together they are as long as stop - start.
    """
    lengths = [cut.stop - cut.start for cut in part]
    inner = len(
        shape
    )  # dimensions from here on are whole, so that their elements lie together in both
    while inner and lengths[inner - 1] == shape[inner - 1]:
        inner -= 1
    dim = max(inner - 1, 0)  # the last one that is cut: its run of elements lies together too
    run, base = prod(lengths[dim:]), part[dim].start * prod(shape[dim + 1 :]) if shape else 0
    while start < stop:
        row, offset = divmod(start, run)
        count = min(run - offset, stop - start)
        row_of_whole, stride = 0, 1
        for outer in reversed(range(dim)):
            row, index = divmod(row, lengths[outer])
            row_of_whole += (part[outer].start + index) * stride
            stride *= shape[outer]
        first = row_of_whole * prod(shape[dim:]) + base + offset
        yield slice(first, first + count)
        start += count


def rectangles(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Slices]:
    """Elements start .. stop - 1 of a tensor in memory order, as rectangles in that order (at most 2 x dimensions - 1 of them)."""
    if start >= stop:
        return
    if len(shape) <= 1:
        yield (slice(start, stop),) if shape else ()
        return
    row = prod(shape[1:])
    first_row, last_row = -(-start // row), stop // row  # rows first_row .. last_row - 1 are whole
    if first_row > last_row:  # all inside one row
        yield from _in_row(shape, start // row, start % row, stop - start // row * row)
        return
    yield from (
        _in_row(shape, first_row - 1, row - (first_row * row - start), row)
        if start < first_row * row
        else ()
    )
    if first_row < last_row:
        yield (slice(first_row, last_row), *(slice(0, length) for length in shape[1:]))
    yield from _in_row(shape, last_row, 0, stop - last_row * row) if last_row * row < stop else ()


def _in_row(shape: tuple[int, ...], row: int, start: int, stop: int) -> Iterator[Slices]:
    for inner in rectangles(shape[1:], start, stop):
        yield (slice(row, row + 1), *inner)


# Where parts lie in a space of constant size, as they come and go (pure).
_ALIGNMENT = 64


class Gaps:
    """First fit over elements 0 .. size - 1; parts begin at multiples of 64 elements."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._taken: dict[int, int] = {}  # first element -> number of elements

    def take(self, elements: int) -> int | None:
        """The first element of a part of so many, or None where no gap is large enough."""
        length = -(-elements // _ALIGNMENT) * _ALIGNMENT
        end = 0
        for first in [*sorted(self._taken), self.size]:
            if first - end >= length:
                self._taken[end] = length
                return end
            end = first + self._taken.get(first, 0)
        return None

    def give_back(self, first: int) -> None:
        del self._taken[first]
