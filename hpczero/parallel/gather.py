"""Parameters that are whole only while they are used (stage 3 of ZeRO).

A unit's weights are gathered from all ranks into a region of constant size before a layer that uses them runs, and are let go after it. Autograd
saves views of parameters for backward; what is saved of the region is kept as (unit, offset, shape, stride) instead, and gathered again when
backward asks for it, so that the memory under it can serve other units meanwhile. Released parameters read as NaN, and using one in a
computation is an error that names it.

The order of collectives follows the program: every rank runs the same layers, so gathers start in one order on all of them. The order of a
pass (a forward and its backward) is remembered, and in the next one the unit that comes next is gathered ahead.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import nn

from hpczero.comm.group import Work
from hpczero.memory.region import Region
from hpczero.parallel.unit import ShardedParameter, Unit


@dataclass(frozen=True)
class Saved:
    """What autograd keeps of a gathered unit."""

    unit: Unit
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


class Gatherer:
    """Which units are whole now, in the order of their last use."""

    def __init__(self, units: Sequence[Unit], region: Region, start: Callable[[Unit, torch.Tensor], Work]) -> None:
        self._region, self._start = region, start
        self._whole: dict[Unit, torch.Tensor] = {}  # least recently used first
        self._arriving: dict[Unit, Work] = {}
        self._in_use: dict[Unit, int] = {}
        self._expected: list[Unit] = []  # the order of the last pass
        self._seen: list[Unit] = []  # of this one
        for unit in units:
            self._let_go_of_values(unit)

    def hook(self, module: nn.Module, units: Sequence[Unit]) -> None:
        """Before the module runs its units are whole, afterwards they may go."""
        module.register_forward_pre_hook(lambda *_: self.use(units))
        module.register_forward_hook(lambda *_: self.done(units), always_call=True)

    def begin_pass(self) -> None:
        self._expected, self._seen = max(self._expected, self._seen, key=len), []

    def use(self, units: Sequence[Unit]) -> None:
        for unit in units:
            self._in_use[unit] = self._in_use.get(unit, 0) + 1
        for unit in units:
            self.whole(unit)

    def done(self, units: Sequence[Unit]) -> None:
        for unit in units:
            self._in_use[unit] -= 1
            if not self._in_use[unit]:
                del self._in_use[unit]
                self._let_go_of_values(unit)

    def whole(self, unit: Unit) -> torch.Tensor:
        """The unit's weights, gathered if they are not there."""
        if unit not in self._whole:
            self._begin(unit)
        if unit in self._arriving:
            self._arriving.pop(unit).wait()
        buffer = self._whole[unit] = self._whole.pop(unit)
        if unit in self._in_use:
            self._show_values(unit, buffer)
        if not self._seen or self._seen[-1] is not unit:
            self._seen.append(unit)
            self._gather_ahead(unit)
        return buffer

    def forget(self, unit: Unit) -> None:
        """Its gradients are there: backward does not need it any more."""
        if unit in self._whole and unit not in self._in_use:
            self._evict(unit)

    def forget_all(self) -> None:
        """The values are about to change."""
        for unit in list(self._whole):
            self._evict(unit)

    def saving(self) -> AbstractContextManager[None]:
        return torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    def _begin(self, unit: Unit) -> None:
        buffer = self._room_for(unit)
        assert buffer is not None, f"no room for {unit.layout.name} beside the units in use"
        self._whole[unit] = buffer
        self._arriving[unit] = self._start(unit, buffer)

    def _room_for(self, unit: Unit, spare: Unit | None = None) -> torch.Tensor | None:
        """A place in the region, if need be of units that are not in use, the one used longest ago first."""
        place = self._region.take(unit.layout.size)
        for other in list(self._whole):
            if place is None and other not in self._in_use and other is not spare:
                self._evict(other)
                place = self._region.take(unit.layout.size)
        return place

    def _gather_ahead(self, unit: Unit) -> None:
        place = len(self._seen)
        if self._expected[place - 1 : place] != [unit]:
            return
        for coming in self._expected[place : place + 1]:
            buffer = None if coming in self._whole else self._room_for(coming, spare=unit)
            if buffer is not None:
                self._whole[coming] = buffer
                self._arriving[coming] = self._start(coming, buffer)

    def _evict(self, unit: Unit) -> None:
        if unit in self._arriving:
            self._arriving.pop(unit).wait()
        self._let_go_of_values(unit)
        self._region.give_back(self._whole.pop(unit))

    def _show_values(self, unit: Unit, buffer: torch.Tensor) -> None:
        for place, parameter in zip(unit.layout.places, unit.parameters, strict=True):
            assert isinstance(parameter, ShardedParameter)
            if parameter.released_as:
                parameter.data = unit.part(buffer, place)
                parameter.released_as = None

    def _let_go_of_values(self, unit: Unit) -> None:
        for place, parameter in zip(unit.layout.places, unit.parameters, strict=True):
            assert isinstance(parameter, ShardedParameter)
            parameter.data = unit.nothing.expand(place.shape)
            parameter.released_as = place.parameter.name

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor | Saved:
        start = self._region.offset_of(tensor)
        if start is None:
            return tensor
        for unit, buffer in self._whole.items():
            first = self._region.offset_of(buffer)
            assert first is not None
            if first <= start < first + buffer.numel():
                return Saved(unit, start - first, tuple(tensor.shape), tensor.stride())
        raise AssertionError("autograd saves a part of the region that belongs to no unit")

    def _unpack(self, saved: torch.Tensor | Saved) -> torch.Tensor:
        if isinstance(saved, torch.Tensor):
            return saved
        whole = self.whole(saved.unit)
        return whole.as_strided(saved.shape, saved.stride, whole.storage_offset() + saved.offset)
