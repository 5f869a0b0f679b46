"""One unit's states on this rank: flat buffers, and the gradients that arrive in them."""

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from hpczero.model import shapes
from hpczero.parallel.layout import ParameterSlot, UnitLayout
from hpczero.parallel.states import SLOTS, Sharded
from hpczero.parallel.zero.buffers import Arena
from hpczero.parallel.zero.parameters import (
    OwnedParameter,
    Owner,
    ShardedParameter,
    give_values,
    gradient_left,
    leave_gradient,
)
from hpczero_kernels.adamw import AdamWBuffers
from hpczero_kernels.reduce import BLOCK

Fill = Callable[
    [shapes.Parameter, int, torch.Tensor], None
]  # writes the flattened logical parameter's elements from the given one on
Dtypes = tuple[torch.dtype, torch.dtype]  # of the weights, and of what gradients gather in
_NARROWED = (
    1 << 15
)  # elements that are turned into half precision at a time: they stay in a core's cache
_NARROWED_BY_A_DEVICE = 1 << 24  # which would have hardly begun with fewer when they are done


_TAKEN = "_hpczero_engine_has_it"  # an attribute of parameters


@dataclass(frozen=True)
class SteppedSpan:
    """A stretch of a unit's own elements that is stepped in one go."""

    state: AdamWBuffers
    decays: bool
    name: str  # of the parameter


class Unit:
    """`take_moments` is to follow. `own` are the elements that this rank steps: its shard, or all of them where optimizer states are not sharded.

    The gradient of a backward pass gathers in `buffer`: the unit's own one, or a slot lent for the time from the first gradient to the end
    of the sum; `wire` is what is sent of it, in the weights' precision. `summed` is the gradient over all ranks for the shard, `squares` its
    sums of squares in blocks.
    """

    moment1: torch.Tensor
    moment2: torch.Tensor

    def __init__(
        self,
        layout: UnitLayout,
        rank: int,
        sharded: Sharded,
        dtypes: Dtypes,
        arena: Arena,
        written: slice,
    ) -> None:
        """`written`: the elements whose weights this rank writes after a step. The parameters made here are the module's, but for `take_over`. All
        of it lies where the arena does.
        """
        dtype, gradient_dtype = dtypes
        self.layout, self.sharded = layout, sharded
        self.shard = layout.shard(rank)
        self.owned = self.shard if sharded.optimizer else slice(0, layout.size)
        self.written = written
        count = self.owned.stop - self.owned.start
        self._first = (
            self.owned.start if sharded.parameters else 0
        )  # of the elements that `weights` holds
        self.weights = arena.take("weights", count if sharded.parameters else layout.size, dtype)
        self._separate = arena.sizes["master"] > 0
        self.master = (
            arena.take("master", count, torch.float32)
            if self._separate
            else self._weights_at(self.owned)
        )
        self.nothing = self.weights.new_full(
            (), float("nan")
        )  # what a parameter's values are while they are away
        self.parameters = [self._parameter(place) for place in layout.slots]
        held = arena.take(
            "gradients", layout.shard_size if sharded.gradients else layout.size, gradient_dtype
        )
        self.buffer: torch.Tensor | None = None if sharded.gradients else held
        self._views: dict[
            int, list[torch.Tensor]
        ] = {}  # address of a buffer -> the parameters' parts of it
        self.send_buffer = held if gradient_dtype == dtype else held.view(dtype)[: held.numel()]
        self.reduced_shard = held if sharded.gradients else self.send_buffer[self.shard]
        self.squares = self.weights.new_zeros(-(-layout.shard_size // BLOCK), dtype=torch.float32)
        self.arrived: set[int] = set()  # which parameters' gradients are in the buffer
        self.present: set[int] = set()  # which have had a gradient in this step
        self.missing = 0  # how many are still to come in this backward
        self._gaps = _gaps(layout)
        self._stepped: dict[frozenset[int], list[SteppedSpan]] = {}  # of the last step

    def _parameter(self, place: ParameterSlot) -> OwnedParameter:
        """It counts the writes to itself alone: `.data` has a count of its own."""
        if self.sharded.parameters:
            return ShardedParameter(self.nothing.expand(place.shape))
        return OwnedParameter(self.part(self.weights, place).data)

    def belongs_to(self, owner: Owner) -> None:
        for place, parameter in zip(self.layout.slots, self.parameters, strict=True):
            parameter.known_as, parameter.owner = place.parameter.name, owner

    def _weights_at(self, elements: slice) -> torch.Tensor:
        return self.weights[elements.start - self._first : elements.stop - self._first]

    def part(self, buffer: torch.Tensor, place: ParameterSlot) -> torch.Tensor:
        return buffer[place.offset : place.stop].view(place.shape)

    @property
    def gradient_to_step(self) -> torch.Tensor:
        """The summed gradient of the own elements."""
        return self.reduced_shard if self.sharded.optimizer else self.send_buffer

    def take_over(self, module_parameters: Mapping[str, nn.Parameter]) -> None:
        """The module's own parameters get their memory here, and stay the objects they are; one on meta, which cannot, is replaced."""
        for index, (place, made) in enumerate(zip(self.layout.slots, self.parameters, strict=True)):
            parameter = module_parameters[place.parameter.name]
            if parameter.is_meta:
                made.requires_grad_(parameter.requires_grad)
            else:
                give_values(parameter, made.detach())
                leave_gradient(parameter, None)
                parameter.__class__ = type(made)
                assert isinstance(parameter, OwnedParameter)
                self.parameters[index] = parameter
        for own in self.parameters:
            setattr(own, _TAKEN, True)

    def give_up(self) -> None:
        """Another engine may have the parameters from now on."""
        for own in self.parameters:
            setattr(own, _TAKEN, False)

    def stepped(self, absent: frozenset[int]) -> list[SteppedSpan]:
        """The own elements without those of the `absent` parameters."""
        if absent not in self._stepped:
            names = frozenset(self.layout.slots[index].parameter.name for index in absent)
            self._stepped = {absent: list(self._stretches(names))}
        return self._stepped[absent]

    def _stretches(self, left_out: Container[str]) -> Iterator[SteppedSpan]:
        first, written = self.owned.start, self.written
        for begin, end in (
            (first, written.start),
            (written.start, written.stop),
            (written.stop, self.owned.stop),
        ):
            for place, part in self.layout.stretches(begin, end):
                if place.parameter.name not in left_out:
                    weights = (
                        self._weights_at(part)
                        if self._separate and begin == written.start
                        else None
                    )
                    own = slice(part.start - first, part.stop - first)
                    state = AdamWBuffers(
                        self.master[own],
                        self.moment1[own],
                        self.moment2[own],
                        self.gradient_to_step[own],
                        weights,
                    )
                    yield SteppedSpan(state, place.parameter.decays, place.parameter.name)

    def fill_owned(self, fill: Fill) -> None:
        """The own elements get these values of the parameters that lie there."""
        self.master.zero_()
        for place, part in self.layout.stretches(self.owned.start, self.owned.stop):
            start = part.start - self.owned.start
            for logical in place.logical(part.start - place.offset, part.stop - place.offset):
                count = logical.stop - logical.start
                out = self.master[start : start + count]
                values = out.cpu()  # the same, but on another device
                fill(place.parameter, logical.start, values)
                out.copy_(values)
                start += count
        self.weights_from_master()

    def weights_from_master(self) -> None:
        """Of the elements whose weights this rank writes."""
        if self._separate:
            self._weights_at(self.written).copy_(
                self.master[
                    self.written.start - self.owned.start : self.written.stop - self.owned.start
                ]
            )

    def changes(self, whole: torch.Tensor) -> torch.Tensor:
        """Which of the own elements differ in `whole`, a changed copy of the weights, to the bit."""
        bits = torch.int32 if whole.dtype == torch.float32 else torch.int16
        return self._weights_at(self.owned).view(bits) != whole[self.owned].view(bits)

    def take_changes(self, whole: torch.Tensor, changed: torch.Tensor) -> None:
        """Of what was not changed the master weights keep their precision."""
        torch.where(changed, whole[self.owned].float(), self.master, out=self.master)
        if self._separate:
            self._weights_at(self.written).copy_(whole[self.written])

    def squares_held_by_all(self) -> torch.Tensor:
        """Of the summed gradient's squares in the shard, those of parameters that every tensor rank holds whole."""
        total = self.squares.new_zeros((), dtype=torch.float64)
        for place, part in self.layout.stretches(self.shard.start, self.shard.stop):
            if place.parameter.split is None:
                total += (
                    self.reduced_shard[part.start - self.shard.start : part.stop - self.shard.start]
                    .double()
                    .square()
                    .sum()
                )
        return total

    def gradient_of(self, index: int) -> torch.Tensor:
        """Where the parameter's gradient lies in the buffer."""
        assert self.buffer is not None
        views = self._views.get(self.buffer.data_ptr())
        if views is None:
            views = self._views[self.buffer.data_ptr()] = [
                self.part(self.buffer, place) for place in self.layout.slots
            ]
        return views[index]

    def add_gradient(self, index: int, gradient: torch.Tensor) -> None:
        is_sparse = gradient.is_sparse
        if index not in self.arrived:
            self.arrived.add(index)
            if not is_sparse:
                self.gradient_of(index).copy_(gradient)
                return
            self.gradient_of(index).zero_()
        if not is_sparse or gradient._nnz():
            self.gradient_of(index).add_(gradient)

    def drop_gradients(self) -> None:
        self.arrived.clear()
        self.present.clear()
        for parameter in self.parameters:
            leave_gradient(parameter, None)

    def complete(self) -> None:
        """Makes the gradient ready to be sent: parameters without one, and the padding, count as zero."""
        assert self.buffer is not None
        for index, parameter in enumerate(self.parameters):
            waiting = gradient_left(parameter)
            if waiting is not None:  # it came when there was no buffer
                self.add_gradient(index, waiting)
                leave_gradient(parameter, None)
        for index in range(len(self.parameters)):
            if index not in self.arrived:
                self.gradient_of(index).zero_()
        for gap in self._gaps:
            self.buffer[gap].zero_()
        self.present |= self.arrived
        self.arrived.clear()
        if self.buffer.dtype != self.send_buffer.dtype:
            _narrow(self.buffer, self.send_buffer)


def taken(parameter: torch.Tensor) -> bool:
    """Return True for a parameter of an engine that is not closed."""
    return getattr(parameter, _TAKEN, False)


def _gaps(layout: UnitLayout) -> list[slice]:
    starts = [place.offset for place in layout.slots[1:]] + [layout.size]
    return [
        slice(place.stop, start)
        for place, start in zip(layout.slots, starts, strict=True)
        if place.stop < start
    ]


def _narrow(wide: torch.Tensor, narrow: torch.Tensor) -> None:
    """fp32 to half precision in the same memory: `narrow` is the lower half of it, and is written behind what is read."""
    length = _NARROWED if wide.device.type == "cpu" else _NARROWED_BY_A_DEVICE
    for start in range(0, wide.numel(), length):
        part = slice(start, start + length)
        narrow[part] = wide[part].to(narrow.dtype)


def take_moments(units: Sequence[Unit], arena: Arena) -> None:
    """First moments of all units, then the second ones: what a checkpoint copies lies in few long stretches."""
    for unit in units:
        unit.moment1 = arena.take(
            "moments", unit.owned.stop - unit.owned.start, torch.float32
        ).zero_()
    for unit in units:
        unit.moment2 = arena.take(
            "moments", unit.owned.stop - unit.owned.start, torch.float32
        ).zero_()


def take_slots(units: Sequence[Unit], arena: Arena) -> list[torch.Tensor]:
    """Take the slots that units gather gradients in, in turns; none if gradients are not sharded."""
    count = SLOTS if units[0].sharded.gradients else 0
    largest, dtype = max(unit.layout.size for unit in units), units[0].weights.dtype
    return [arena.take("gradient slots", largest, dtype) for _ in range(count)]
