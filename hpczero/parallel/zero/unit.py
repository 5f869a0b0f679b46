"""One unit's states on this rank: flat buffers, and the gradients that arrive in them."""

from collections.abc import Callable, Iterator, Mapping, Sequence

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
from hpczero_kernels.reduce import BLOCK

# fill(parameter, first, out) writes elements from `first` on of the flattened logical parameter.
Fill = Callable[[shapes.Parameter, int, torch.Tensor], None]
Dtypes = tuple[torch.dtype, torch.dtype]  # of the weights, and of the gradient buffer

# Elements that are turned into half precision at a time. On a CPU they stay in a core's cache;
# a device would be done with so few before the next ones are asked for.
_NARROWED = 1 << 15
_NARROWED_BY_A_DEVICE = 1 << 24

_TAKEN = "_hpczero_engine_has_it"  # an attribute of parameters


class Unit:
    """States of one unit.

    `owned`: the elements that this rank steps, which are its shard, or all of them where optimizer
    states are not sharded. `weights`, `master`: their values in the model's precision and in fp32,
    which may be the same memory (`has_separate_master`).

    The gradient of a backward pass gathers in `buffer`, which is sent as `send_buffer`, in the
    weights' precision. Without sharded gradients both are the unit's own memory. With them
    (stages 2 and 3) both are a gradient slot, lent from the first gradient to the end of the sum;
    before and after it `buffer` is None, and `send_buffer` is of no use.
    `reduced_shard` is the gradient over all ranks for the shard, `squares` its sums of squares in
    blocks.
    """

    def __init__(
        self,
        layout: UnitLayout,
        rank: int,
        sharded: Sharded,
        dtypes: Dtypes,
        arena: Arena,
        written: slice,
    ) -> None:
        """Take memory from the arena, and make parameters, which `take_over` may replace.

        `written`: the elements whose weights this rank writes after a step.
        """
        dtype, gradient_dtype = dtypes
        self.layout = layout
        self.sharded = sharded
        self.written = written
        self.shard = layout.shard(rank)
        self.owned = self.shard if sharded.optimizer else slice(0, layout.size)
        count = self.owned.stop - self.owned.start
        self._first = self.owned.start if sharded.parameters else 0  # element of weights[0]
        self.weights = arena.take("weights", count if sharded.parameters else layout.size, dtype)
        self.has_separate_master = arena.sizes["master"] > 0
        if self.has_separate_master:
            self.master = arena.take("master", count, torch.float32)
        else:
            self.master = self._weights_at(self.owned)
        self.nan = self.weights.new_full((), float("nan"))  # shown while values are away
        self.parameters = [self._parameter(slot) for slot in layout.slots]
        self._take_gradients(arena, gradient_dtype)
        self._views: dict[int, list[torch.Tensor]] = {}  # buffer's address -> parts of parameters
        self.arrived: set[int] = set()  # parameters whose gradients are in the buffer
        self.present: set[int] = set()  # parameters that have had a gradient in this step
        self.missing = 0  # number of gradients still to come in this backward
        starts = [slot.offset for slot in layout.slots[1:]] + [layout.size]
        gaps = zip(layout.slots, starts, strict=True)
        self._padding = [slice(slot.stop, start) for slot, start in gaps if slot.stop < start]

    def _parameter(self, slot: ParameterSlot) -> OwnedParameter:
        if self.sharded.parameters:
            return ShardedParameter(self.nan.expand(slot.shape))
        # .data has a count of its own: the parameter counts the writes to itself alone
        return OwnedParameter(self.part(self.weights, slot).data)

    def _take_gradients(self, arena: Arena, dtype: torch.dtype) -> None:
        layout = self.layout
        sharded = self.sharded
        size = layout.shard_size if sharded.gradients else layout.size
        memory = arena.take("gradients", size, dtype)
        self.buffer: torch.Tensor | None = None if sharded.gradients else memory
        self.send_buffer = memory
        if dtype != self.weights.dtype:
            self.send_buffer = memory.view(self.weights.dtype)[:size]
        self.reduced_shard = memory if sharded.gradients else self.send_buffer[self.shard]
        self.squares = self.weights.new_zeros(-(-layout.shard_size // BLOCK), dtype=torch.float32)

    def narrow_shard(self) -> torch.Tensor:
        """Return the summed shard in the weights' precision, in its own memory, to be sent."""
        shard = self.reduced_shard
        if shard.dtype == self.weights.dtype:
            return shard
        narrow = shard.view(self.weights.dtype)[: shard.numel()]
        _narrow(shard, narrow)
        return narrow

    def widen_shard(self) -> None:
        """Make the shard again what it was before `narrow_shard`, but for the rounding."""
        shard = self.reduced_shard
        if shard.dtype != self.weights.dtype:
            _widen(shard.view(self.weights.dtype)[: shard.numel()], shard)

    def set_owner(self, owner: Owner) -> None:
        for slot, parameter in zip(self.layout.slots, self.parameters, strict=True):
            parameter.known_as = slot.parameter.name
            parameter.owner = owner

    def _weights_at(self, elements: slice) -> torch.Tensor:
        return self.weights[elements.start - self._first : elements.stop - self._first]

    def part(self, buffer: torch.Tensor, slot: ParameterSlot) -> torch.Tensor:
        """Return the parameter's part of a buffer of the whole unit, in its shape."""
        return buffer[slot.offset : slot.stop].view(slot.shape)

    def show(self, whole: torch.Tensor) -> None:
        """Give the parameters the values of a buffer of the whole unit."""
        for slot, parameter in zip(self.layout.slots, self.parameters, strict=True):
            give_values(parameter, self.part(whole, slot))

    @property
    def gradient_to_step(self) -> torch.Tensor:
        """The summed gradient of the owned elements."""
        return self.reduced_shard if self.sharded.optimizer else self.send_buffer

    def take_over(self, module_parameters: Mapping[str, nn.Parameter]) -> None:
        """Give the module's own parameters their memory here; they stay the objects they are.

        A parameter on meta, which cannot get memory, is replaced.
        """
        for index, (slot, made) in enumerate(zip(self.layout.slots, self.parameters, strict=True)):
            parameter = module_parameters[slot.parameter.name]
            if parameter.is_meta:
                made.requires_grad_(parameter.requires_grad)
            else:
                give_values(parameter, made.detach())
                leave_gradient(parameter, None)
                parameter.__class__ = type(made)
                assert isinstance(parameter, OwnedParameter)
                self.parameters[index] = parameter
        for parameter in self.parameters:
            setattr(parameter, _TAKEN, True)

    def give_up(self) -> None:
        """Let another engine have the parameters from now on."""
        for parameter in self.parameters:
            setattr(parameter, _TAKEN, False)

    def owned_parts(self) -> Iterator[tuple[ParameterSlot, slice, torch.Tensor | None]]:
        """Yield the owned elements of each parameter, cut where those begin or end that it writes.

        With them come the weights that this rank writes after their step; None where it writes
        none, or where the master weights are the weights.
        """
        owned, written = self.owned, self.written
        for begin, end in (
            (owned.start, written.start),
            (written.start, written.stop),
            (written.stop, owned.stop),
        ):
            writes = self.has_separate_master and begin == written.start
            for slot, part in self.layout.spans(begin, end):
                yield slot, part, self._weights_at(part) if writes else None

    def fill_owned(self, fill: Fill) -> None:
        """Fill the owned elements of all parameters, and the weights that follow from them."""
        self.master.zero_()
        for slot, part in self.layout.spans(self.owned.start, self.owned.stop):
            start = part.start - self.owned.start
            for logical in slot.logical(part.start - slot.offset, part.stop - slot.offset):
                count = logical.stop - logical.start
                out = self.master[start : start + count]
                values = out.cpu()  # `out` itself, unless it is on a device
                fill(slot.parameter, logical.start, values)
                out.copy_(values)
                start += count
        self.weights_from_master()

    def weights_from_master(self) -> None:
        """Round the master weights to those weights that this rank writes."""
        if self.has_separate_master:
            first = self.owned.start
            written = self.written
            master = self.master[written.start - first : written.stop - first]
            self._weights_at(written).copy_(master)

    def changes(self, whole: torch.Tensor) -> torch.Tensor:
        """Return which owned elements differ, to the bit, in a changed copy of all weights."""
        bits = torch.int32 if whole.dtype == torch.float32 else torch.int16
        return self._weights_at(self.owned).view(bits) != whole[self.owned].view(bits)

    def take_changes(self, whole: torch.Tensor, changed: torch.Tensor) -> None:
        """Take changed elements from `whole`; the other master weights keep their precision."""
        there = self.master.device  # which may be another than that of the weights
        values = whole[self.owned].float().to(there)
        torch.where(changed.to(there), values, self.master, out=self.master)
        if self.has_separate_master:
            self._weights_at(self.written).copy_(whole[self.written])

    def squares_held_by_all(self) -> torch.Tensor:
        """Sum the squares of the shard's summed gradient over parameters that are not split.

        Every tensor rank holds these parameters whole.
        """
        total = self.squares.new_zeros((), dtype=torch.float64)
        first = self.shard.start
        for part in self.layout.held_by_all(first, self.shard.stop):
            gradient = self.reduced_shard[part.start - first : part.stop - first]
            total += gradient.double().square().sum()
        return total

    def gradient_of(self, index: int) -> torch.Tensor:
        """Return the parameter's part of the buffer."""
        assert self.buffer is not None
        views = self._views.get(self.buffer.data_ptr())
        if views is None:
            views = [self.part(self.buffer, slot) for slot in self.layout.slots]
            self._views[self.buffer.data_ptr()] = views
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
        """Make the gradient ready to be sent; absent gradients, and the padding, count as zero."""
        assert self.buffer is not None
        for index, parameter in enumerate(self.parameters):
            waiting = gradient_left(parameter)
            if waiting is not None:  # it came when there was no buffer
                self.add_gradient(index, waiting)
                leave_gradient(parameter, None)
        for index in range(len(self.parameters)):
            if index not in self.arrived:
                self.gradient_of(index).zero_()
        for padding in self._padding:
            self.buffer[padding].zero_()
        self.present |= self.arrived
        self.arrived.clear()
        if self.buffer.dtype != self.send_buffer.dtype:
            _narrow(self.buffer, self.send_buffer)


def taken(parameter: torch.Tensor) -> bool:
    """Return True for a parameter of an engine that is not closed."""
    return getattr(parameter, _TAKEN, False)


def _narrow(wide: torch.Tensor, narrow: torch.Tensor) -> None:
    """Round fp32 to half precision in the same memory.

    `narrow` is the lower half of it: it is written behind the elements that are read.
    """
    length = _NARROWED if wide.device.type == "cpu" else _NARROWED_BY_A_DEVICE
    for start in range(0, wide.numel(), length):
        part = slice(start, start + length)
        narrow[part] = wide[part].to(narrow.dtype)


def _widen(narrow: torch.Tensor, wide: torch.Tensor) -> None:
    """Undo `_narrow`, the last elements first: they are written where none is to be read."""
    length = _NARROWED if wide.device.type == "cpu" else _NARROWED_BY_A_DEVICE
    for start in reversed(range(0, wide.numel(), length)):
        part = slice(start, start + length)
        wide[part] = narrow[part].float()


def take_gradient_slots(units: Sequence[Unit], arena: Arena) -> list[torch.Tensor]:
    """Take the slots that units gather gradients in, in turns; none unless these are sharded."""
    if not units[0].sharded.gradients:
        return []
    largest = max(unit.layout.size for unit in units)
    dtype = units[0].weights.dtype
    return [arena.take("gradient slots", largest, dtype) for _ in range(SLOTS)]
