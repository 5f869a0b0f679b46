"""Position of every element of the model (pure), for the engine, checkpoints and the planner.

A *unit* is what is gathered, reduced and stepped together: the parameters of one layer, one after
the other in a flat buffer, each beginning at a multiple of 64 elements. The buffer is cut into
`shards` equal shards, padded so that each is a multiple of 64 elements; data rank r owns shard r.
Of a parameter that tensor parallelism cuts, the buffer has this tensor rank's part.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import prod

from hpczero.model.shapes import Layer, Parameter

ALIGNMENT = 64

Slices = tuple[slice, ...]


@dataclass(frozen=True)
class ParameterSlot:
    """A parameter in its unit, at elements offset .. stop - 1 of the buffer.

    `held`: the rectangle of the logical tensor, in its shape `divided`, that this tensor rank
    holds. `is_split` is False where each of them holds all.
    """

    parameter: Parameter
    held: Slices
    offset: int
    is_split: bool

    @cached_property
    def shape(self) -> tuple[int, ...]:
        lengths = tuple(part.stop - part.start for part in self.held)
        if len(lengths) == len(self.parameter.shape):
            return lengths
        dim = self.parameter.split
        assert dim is not None
        return (*lengths[:dim], lengths[dim] * lengths[dim + 1], *lengths[dim + 2 :])

    @property
    def stop(self) -> int:
        return self.offset + prod(self.shape)

    def logical(self, start: int, stop: int) -> Iterator[slice]:
        """Yield where elements start .. stop - 1 of this rank's part lie in the logical parameter.

        Both are flattened; the spans come in order.
        """
        return spans_of_part(self.parameter.divided, self.held, start, stop)

    def rectangles(self, start: int, stop: int) -> Iterator[Slices]:
        """Yield the rectangles of the logical tensor at elements start .. stop - 1 of the buffer.

        All these elements are of this parameter; the rectangles come in their order.
        """
        lengths = tuple(part.stop - part.start for part in self.held)
        for inner in rectangles(lengths, start - self.offset, stop - self.offset):
            box = tuple(
                slice(base.start + part.start, base.start + part.stop)
                for base, part in zip(self.held, inner, strict=True)
            )
            if len(box) == len(self.parameter.shape):
                yield box
            else:
                yield from undivided(self.parameter, box)


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

    def spans(self, start: int, stop: int) -> Iterator[tuple[ParameterSlot, slice]]:
        """Yield the parameters in elements start .. stop - 1 of the buffer, each with its own."""
        for slot in self.slots:
            first, last = max(start, slot.offset), min(stop, slot.stop)
            if first < last:
                yield slot, slice(first, last)

    def held_by_all(self, start: int, stop: int) -> list[slice]:
        """Return the parts of elements start .. stop - 1 that all tensor ranks hold.

        With one tensor rank these are all parameters.
        """
        return [part for slot, part in self.spans(start, stop) if not slot.is_split]


def unit_layout(
    layer: Layer, shards: int = 1, tensor_ranks: int = 1, tensor_rank: int = 0
) -> UnitLayout:
    slots = []
    offset = 0
    for parameter in layer.parameters:
        held = tensor_part(parameter, tensor_ranks, tensor_rank)
        is_split = parameter.cut(tensor_ranks)[0] is not None
        slot = ParameterSlot(parameter, held, offset, is_split)
        slots.append(slot)
        offset = -(-slot.stop // ALIGNMENT) * ALIGNMENT
    shard_size = -(-offset // (shards * ALIGNMENT)) * ALIGNMENT
    return UnitLayout(layer.name, tuple(slots), shards, shard_size)


def tensor_part(parameter: Parameter, ranks: int, rank: int) -> Slices:
    """Return the rectangle of a parameter that a tensor rank holds: all, unless it is split.

    It is one of the shape `divided`, which is the parameter's own unless it has sections.
    """
    divided = parameter.divided
    held = [slice(0, length) for length in divided]
    dim, grain = parameter.cut(ranks)
    if dim is not None:
        dim += len(divided) - len(parameter.shape)
        held[dim] = shard_range(divided[dim], grain, ranks, rank)
    return tuple(held)


def undivided(parameter: Parameter, box: Slices) -> Iterator[Slices]:
    """Yield a rectangle of a parameter's `divided` shape as rectangles of its own shape.

    They come in the order of the rectangle's elements.
    """
    dim = parameter.split
    assert dim is not None
    length = parameter.divided[dim + 1]
    outer, sections, inside, inner = box[:dim], box[dim], box[dim + 1], box[dim + 2 :]
    if sections.stop - sections.start <= 1 or inside.stop - inside.start == length:
        first = sections.start * length + inside.start
        stop = max(first, (sections.stop - 1) * length + inside.stop)
        yield (*outer, slice(first, stop), *inner)
        return
    for row in product(*(range(part.start, part.stop) for part in outer)):
        for section in range(sections.start, sections.stop):
            first = section * length
            part = slice(first + inside.start, first + inside.stop)
            yield (*(slice(index, index + 1) for index in row), part, *inner)


def shard_range(length: int, grain: int, ranks: int, rank: int) -> slice:
    """Return the rank's range of `length` elements, dealt out in grains.

    A head's columns are one grain and stay together. The first ranks may get one grain more.
    """
    grains, more = divmod(-(-length // grain), ranks)
    first = rank * grains + min(rank, more)
    last = first + grains + (rank < more)
    return slice(min(first * grain, length), min(last * grain, length))


def storing_replicas(sizes: Sequence[int], replicas: int) -> list[int]:
    """Return which replica stores each unit, given the sizes of their shards; each as much."""
    loads = [0] * replicas
    storing = []
    for size in sizes:
        storing.append(loads.index(min(loads)))
        loads[storing[-1]] += size
    return storing


def spans_of_part(shape: tuple[int, ...], part: Slices, start: int, stop: int) -> Iterator[slice]:
    """Yield where elements start .. stop - 1 of a rectangle `part` lie in the flattened tensor.

    The elements are numbered in the memory order of a copy of the rectangle. The spans are as few
    as possible; together they are as long as stop - start.
    """
    lengths = [cut.stop - cut.start for cut in part]
    inner = len(shape)  # dimensions from here on are whole: contiguous in both
    while inner and lengths[inner - 1] == shape[inner - 1]:
        inner -= 1
    dim = max(inner - 1, 0)  # the last one that is cut: its run of elements is contiguous too
    run = prod(lengths[dim:])
    base = part[dim].start * prod(shape[dim + 1 :]) if shape else 0
    while start < stop:
        row, offset = divmod(start, run)
        count = min(run - offset, stop - start)
        logical_row, stride = 0, 1
        for outer in reversed(range(dim)):
            row, index = divmod(row, lengths[outer])
            logical_row += (part[outer].start + index) * stride
            stride *= shape[outer]
        first = logical_row * prod(shape[dim:]) + base + offset
        yield slice(first, first + count)
        start += count


def rectangles(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Slices]:
    """Yield elements start .. stop - 1 of a tensor, in memory order, as rectangles.

    There are at most 2 x dimensions - 1 of them.
    """
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
    if start < first_row * row:
        yield from _in_row(shape, first_row - 1, row - (first_row * row - start), row)
    if first_row < last_row:
        yield (slice(first_row, last_row), *(slice(0, length) for length in shape[1:]))
    if last_row * row < stop:
        yield from _in_row(shape, last_row, 0, stop - last_row * row)


def _in_row(shape: tuple[int, ...], row: int, start: int, stop: int) -> Iterator[Slices]:
    for inner in rectangles(shape[1:], start, stop):
        yield (slice(row, row + 1), *inner)


class Gaps:
    """First-fit allocation over elements 0 .. size - 1; parts begin at multiples of 64 elements."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._taken: dict[int, int] = {}  # first element -> number of elements

    def take(self, elements: int) -> int | None:
        """Return the first element of a part of so many; None if no gap is large enough."""
        length = -(-elements // ALIGNMENT) * ALIGNMENT
        end = 0
        for first in [*sorted(self._taken), self.size]:
            if first - end >= length:
                self._taken[end] = length
                return end
            end = first + self._taken.get(first, 0)
        return None

    def give_back(self, first: int) -> None:
        del self._taken[first]
