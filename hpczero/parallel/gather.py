"""Parameters that are whole only while they are used (stage 3 of ZeRO).

A unit's weights are gathered from all ranks into a region of constant size before a layer that uses them runs, and are let go after it. Autograd
saves views of parameters for backward; what is saved of the region is kept as (unit, offset, shape, stride) instead, and gathered again when
backward asks for it, so that the memory under it can serve other units meanwhile. Released parameters read as NaN, and using one in a
computation is an error that names it.

The order of collectives follows the program: every rank runs the same layers, so gathers start in one order on all of them. The order of a
pass (a forward and its backward) is remembered, and in the next one the unit that comes next is gathered ahead.

Layers run inside others. A unit that is in use around other layers has a place of its own; the rest take turns. Where the program has more
units in use at once than there is room for, a place is made for one and kept.

A layer that runs during backward is being recomputed (torch.utils.checkpoint): its saved views are kept by others than us, so its units stay
whole until their gradients are there. What is used outside of the layer that holds it stays whole until the end of the forward.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from torch.utils._pytree import tree_map
from torch.utils.hooks import RemovableHandle

from hpczero.comm.group import Work
from hpczero.errors import HpczeroError
from hpczero.memory.region import Region
from hpczero.model.shapes import Layer
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

    def __init__(self, units: Sequence[Unit], memory: torch.Tensor, start: Callable[[Unit, torch.Tensor], Work]) -> None:
        self._regions, self._start = [Region(memory)], start
        self._own_place: dict[Unit, torch.Tensor] = {}  # of units that others are used inside
        self._kept: set[Unit] = set()  # in use beyond their layers
        self._pass = ""  # which is going on: "forward" or "backward"
        self._hooks: list[RemovableHandle] = []
        self._whole: dict[Unit, torch.Tensor] = {}  # least recently used first
        self._arriving: dict[Unit, Work] = {}
        self._in_use: dict[Unit, int] = {}
        self._expected: list[Unit] = []  # the order of the last pass
        self._seen: list[Unit] = []  # of this one
        for unit in units:
            self._let_go_of_values(unit)
            for parameter in unit.parameters:
                assert isinstance(parameter, ShardedParameter)
                parameter.fetch = partial(self._fetch, unit, parameter)

    def hook(self, module: nn.Module, units: Sequence[Unit]) -> None:
        """Before the module runs its units are whole, afterwards they may go."""
        self._hooks.append(module.register_forward_pre_hook(lambda *_: self.use(units), prepend=True))
        self._hooks.append(module.register_forward_hook(partial(self._after, units), always_call=True))

    def _after(self, units: Sequence[Unit], module: nn.Module, arguments: object, out: object) -> object:
        """What the module gives may be a view of its weights, and outlives them here: then it is copied."""
        out = tree_map(partial(self._outside, module), out)
        self.done(units)
        return out

    def _outside(self, module: nn.Module, leaf: object) -> object:
        if isinstance(leaf, torch.Tensor):
            return leaf.clone() if self._lies_here(leaf) else leaf
        inside = vars(leaf).items() if hasattr(leaf, "__dict__") else ()
        if names := [name for name, value in inside if isinstance(value, torch.Tensor) and self._lies_here(value)]:
            what = f"{type(module).__name__} gives a view of its weights as {names[0]} of a {type(leaf).__name__}"
            raise HpczeroError(f"{what}: these weights are gone when it is read (zero.stage = 3); give a copy (.clone())")
        return leaf

    def _lies_here(self, tensor: torch.Tensor) -> bool:
        return any(region.offset_of(tensor) is not None for region in self._regions)

    def keep_place(self, unit: Unit) -> None:
        """The unit is in use around others."""
        place = self._regions[0].take(unit.layout.size)
        assert place is not None
        self._own_place[unit] = place

    @contextmanager
    def forward(self) -> Iterator[None]:
        self._expected, self._seen = max(self._expected, self._seen, key=len), []
        with self._going_on("forward"), torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
            yield

    def backward(self) -> AbstractContextManager[None]:
        return self._going_on("backward")

    @contextmanager
    def _going_on(self, which: str) -> Iterator[None]:
        self._pass = which
        try:
            yield
        finally:
            self._pass = ""
            for unit in list(self._kept):
                self._keep_no_longer(unit)

    def use(self, units: Sequence[Unit]) -> None:
        for unit in units:
            self._in_use[unit] = self._in_use.get(unit, 0) + 1
            if self._pass == "backward":
                self._keep(unit)
        for unit in units:
            self.whole(unit)

    def _keep(self, unit: Unit) -> None:
        if unit not in self._kept:
            self._kept.add(unit)
            self._in_use[unit] = self._in_use.get(unit, 0) + 1

    def _keep_no_longer(self, unit: Unit) -> None:
        self._kept.discard(unit)
        self.done([unit])

    def _fetch(self, unit: Unit, parameter: ShardedParameter) -> None:
        """A parameter is used outside of the layer that holds it."""
        if not self._pass:
            raise HpczeroError(
                f"parameter {parameter.released_as} is used outside of the model's forward, where its values are not gathered (zero.stage = 3): "
                "read it with engine.gathered(...), or take zero.stage = 2"
            )
        self._keep(unit)
        self.whole(unit)

    def done(self, units: Sequence[Unit]) -> None:
        for unit in units:
            self._in_use[unit] -= 1
            if not self._in_use[unit]:
                del self._in_use[unit]
                self._let_go_of_values(unit)

    def show(self, unit: Unit, whole: torch.Tensor) -> None:
        """The parameters have the values of `whole`, until `done`."""
        self._in_use[unit] = self._in_use.get(unit, 0) + 1
        self._show_values(unit, whole)

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
        if unit in self._kept and all(parameter.requires_grad for parameter in unit.parameters):  # else its values may still be needed
            self._keep_no_longer(unit)

    def changed(self, unit: Unit) -> None:
        """Its values are new."""
        if unit in self._whole:
            self._evict(unit)

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _begin(self, unit: Unit) -> None:
        buffer = self._room_for(unit)
        if buffer is None:
            self._regions.append(Region(unit.weights.new_empty(unit.layout.size)))
            buffer = self._room_for(unit)
            assert buffer is not None
        self._whole[unit] = buffer
        self._arriving[unit] = self._start(unit, buffer)

    def _room_for(self, unit: Unit, spare: Unit | None = None) -> torch.Tensor | None:
        """The unit's own place, or one in the regions, if need be of units that are not in use, the one used longest ago first."""
        place = self._own_place.get(unit)
        if place is None:
            place = self._free_place(unit)
        for other in list(self._whole):
            if place is None and other not in self._in_use and other is not spare and other not in self._own_place:
                self._evict(other)
                place = self._free_place(unit)
        return place

    def _free_place(self, unit: Unit) -> torch.Tensor | None:
        return next((place for region in self._regions if (place := region.take(unit.layout.size)) is not None), None)

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
        buffer = self._whole.pop(unit)
        if unit not in self._own_place:
            self._region_of(buffer).give_back(buffer)

    def _region_of(self, part: torch.Tensor) -> Region:
        return next(region for region in self._regions if region.offset_of(part) is not None)

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
        for region in self._regions:
            start = region.offset_of(tensor)
            if start is not None:
                unit, first = self._unit_at(region, start)
                return Saved(unit, start - first, tuple(tensor.shape), tensor.stride())
        return tensor

    def _unit_at(self, region: Region, element: int) -> tuple[Unit, int]:
        """The unit that this element of the region belongs to, and where it begins there."""
        for unit, buffer in self._whole.items():
            first = region.offset_of(buffer)
            if first is not None and first <= element < first + buffer.numel():
                return unit, first
        raise AssertionError("autograd saves a part of the region that belongs to no unit")

    def _unpack(self, saved: torch.Tensor | Saved) -> torch.Tensor:
        if isinstance(saved, torch.Tensor):
            return saved
        whole = self.whole(saved.unit)
        return whole.as_strided(saved.shape, saved.stride, whole.storage_offset() + saved.offset)


def used_around_others(layers: Sequence[tuple[nn.Module, Layer]]) -> set[str]:
    """Names of the layers whose parameters are in use while other layers run."""
    parts = {part for part, _ in layers}
    used = {name for part, layer in layers if any(inner in parts for inner in part.modules() if inner is not part) for name in layer.names}
    return {layer.name for _, layer in layers if any(parameter.name in used for parameter in layer.parameters)}
