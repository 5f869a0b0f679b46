"""Parameters that are whole only while they are used (stage 3 of ZeRO).

A unit's weights are gathered from all ranks into a region of constant size before a layer that uses them runs, and are let go after it. Autograd
saves views of parameters for backward; what is saved of the region is kept as (unit, offset, shape, stride) instead, and gathered again when
backward asks for it, so that the memory under it can serve other units meanwhile. Released parameters read as NaN, and using one in a
computation is an error that names it.

Not all that sees these values comes by autograd's hooks: a module's own hooks, a view kept in `ctx`, a graph
of a backward (create_graph). So each time a unit is gathered its memory has a storage of its own, whose users
are counted (`memory.loans`): memory that somebody still sees when the unit goes serves nobody else before it is let
go, and keeps the values that it had. That takes memory, not right numbers. When a step gives the unit new
values, what is still seen of the old ones becomes NaN: a view that is used after it would be wrong.

The order of collectives follows the program: every rank runs the same layers, so gathers start in one order on all of them. The order of a
pass (a forward and its backward) is remembered, and in the next one the unit that comes next is gathered ahead.

Layers run inside others. A unit that is in use around other layers has a place of its own; the rest take turns. Where the program has more
units in use at once than there is room for, a place is made for one and kept.

A layer that runs during backward is being recomputed (torch.utils.checkpoint): its saved views are kept by others than us, so its units stay
whole until their gradients are there. What is used outside of the layer that holds it stays whole until the end of the forward.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map
from torch.utils.hooks import RemovableHandle

from hpczero.comm.group import Work
from hpczero.errors import HpczeroError
from hpczero.model.shapes import Layer
from hpczero.parallel.zero.buffers import Loan, Loans
from hpczero.parallel.zero.outside import undisturbed
from hpczero.parallel.zero.parameters import ShardedParameter, give_values
from hpczero.parallel.zero.unit import Unit


@dataclass(frozen=True)
class Saved:
    """What autograd keeps of a gathered unit."""

    unit: Unit
    version: int  # of the unit's values
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


class Gatherer:
    """Which units are whole now, in the order of their last use."""

    def __init__(
        self,
        units: Sequence[Unit],
        memory: torch.Tensor,
        start: Callable[[Unit, torch.Tensor], Work],
    ) -> None:
        self.loans, self._start = Loans(memory), start
        self._own_place: dict[
            Unit, torch.Tensor
        ] = {}  # of units that others are used inside, while it is free
        self._with_own_place: set[Unit] = set()
        self._kept: set[Unit] = set()  # in use beyond their layers
        self._pass = ""  # which is going on: "forward" or "backward"
        self._opened: _Opened | None = None  # the call of a module by itself that began it
        self._hooks: list[RemovableHandle] = []
        self._whole: dict[Unit, Loan] = {}  # least recently used first
        self._under: dict[int, Unit] = {}  # address of a storage -> the unit that is whole there
        self._arriving: dict[Unit, Work] = {}
        self._in_use: dict[Unit, int] = {}
        self._expected: list[Unit] = []  # the order of the last pass
        self._seen: list[Unit] = []  # of this one
        self._version = dict.fromkeys(units, 0)  # of their values
        self._outlived: dict[Loan, Unit] = {}  # given back while somebody still saw them
        self._outdated: dict[int, Unit] = {}  # by the address of such a storage
        self._warned = False
        for unit in units:
            self._release_values(unit)
            for parameter in unit.parameters:
                assert isinstance(parameter, ShardedParameter)
                parameter.fetch = partial(self._fetch, unit, parameter)

    def hook(self, module: nn.Module, units: Sequence[Unit]) -> None:
        """Before the module runs its units are whole, afterwards they may go."""
        self._hooks.append(
            module.register_forward_pre_hook(partial(self._before, units), prepend=True)
        )
        self._hooks.append(
            module.register_forward_hook(partial(self._after, units), always_call=True)
        )

    def hook_calls(self, module: nn.Module, layers: Set[nn.Module]) -> None:
        """A call of the module, or of a part with some of the layers, by itself and not through the
        engine, is a forward too. `hook` comes before.
        """
        for part in module.modules():
            if not layers.isdisjoint(part.modules()):
                self._hooks.append(part.register_forward_pre_hook(self._enter, prepend=True))
                self._hooks.append(part.register_forward_hook(self._leave, always_call=True))

    def _enter(self, module: nn.Module, *_: object) -> None:
        if self._opened and self._opened.module is module:
            self._opened.depth += 1
        elif not self._pass:
            self._opened = _Opened(module, 1, ExitStack())
            self._opened.stack.enter_context(self.forward())

    def _leave(self, module: nn.Module, *_: object) -> None:
        opened = self._opened
        if opened and opened.module is module:
            opened.depth -= 1
            if not opened.depth:
                self._opened = None
                opened.stack.close()

    def _before(self, units: Sequence[Unit], *_: object) -> None:
        self.use(units)

    def _after(
        self, units: Sequence[Unit], module: nn.Module, arguments: object, out: object
    ) -> object:
        """What the module gives may be a view of its weights, and outlives them here: then it is copied."""
        out = tree_map(partial(self._outside, module), out)
        self.done(units)
        return out

    def _outside(self, module: nn.Module, leaf: object) -> object:
        if isinstance(leaf, torch.Tensor):
            return leaf.clone() if self._unit_under(leaf) else leaf
        inside = vars(leaf).items() if hasattr(leaf, "__dict__") else ()
        if names := [
            name
            for name, value in inside
            if isinstance(value, torch.Tensor) and self._unit_under(value)
        ]:
            what = f"{type(module).__name__} gives a view of its weights as {names[0]} of a {type(leaf).__name__}"
            raise HpczeroError(
                f"{what}: these weights are gone when it is read (zero.stage = 3); give a copy (.clone())"
            )
        return leaf

    def _unit_under(self, tensor: torch.Tensor) -> Unit | None:
        """The unit whose values the tensor shows."""
        return self._unit_in(self._under, tensor)

    @staticmethod
    def _unit_in(unit_at: Mapping[int, Unit], tensor: torch.Tensor) -> Unit | None:
        try:
            address = tensor.untyped_storage().data_ptr()
        except RuntimeError:  # it has no memory: inside transforms, sparse, zeros of forward mode
            return None
        return unit_at.get(address)

    def keep_place(self, unit: Unit) -> None:
        """The unit is in use around others."""
        place = self.loans.regions[0].take(unit.layout.size)
        assert place is not None
        self._own_place[unit] = place
        self._with_own_place.add(unit)

    @contextmanager
    def forward(self) -> Iterator[None]:
        self._expected, self._seen = max(self._expected, self._seen, key=len), []
        with (
            self._going_on("forward"),
            torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack),
            _way_out_without_hooks(),
        ):
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

    @undisturbed
    def use(self, units: Sequence[Unit]) -> None:
        for unit in units:
            self._in_use[unit] = self._in_use.get(unit, 0) + 1
            if self._pass == "backward":
                self._keep(unit)
        for unit in units:
            self.ensure_gathered(unit)

    def _keep(self, unit: Unit) -> None:
        if unit not in self._kept:
            self._kept.add(unit)
            self._in_use[unit] = self._in_use.get(unit, 0) + 1

    def _keep_no_longer(self, unit: Unit) -> None:
        self._kept.discard(unit)
        self.done([unit])

    @undisturbed
    def _fetch(self, unit: Unit, parameter: ShardedParameter) -> None:
        """A parameter is used outside of the layer that holds it."""
        if not self._pass:
            raise HpczeroError(
                f"parameter {parameter.released_as} is used outside of the model's forward, where its values are not gathered (zero.stage = 3): "
                "read it with engine.gathered(...), or take zero.stage = 2"
            )
        self._keep(unit)
        self.ensure_gathered(unit)

    @undisturbed
    def done(self, units: Sequence[Unit]) -> None:
        for unit in units:
            self._in_use[unit] -= 1
            if not self._in_use[unit]:
                del self._in_use[unit]
                self._release_values(unit)

    def show(self, unit: Unit, whole: torch.Tensor) -> None:
        """The parameters have the values of `whole`, until `done`."""
        self._in_use[unit] = self._in_use.get(unit, 0) + 1
        self._show_values(unit, whole)

    def ensure_gathered(self, unit: Unit) -> torch.Tensor:
        """The unit's weights, gathered if they are not there."""
        if unit not in self._whole:
            self._begin(unit)
        if unit in self._arriving:
            self._arriving.pop(unit).wait()
        loan = self._whole[unit] = self._whole.pop(unit)
        if unit in self._in_use:
            self._show_values(unit, loan.tensor)
        if not self._seen or self._seen[-1] is not unit:
            self._seen.append(unit)
            self._gather_ahead(unit)
        return loan.tensor

    def forget(self, unit: Unit) -> None:
        """Its gradients are there: backward does not need it any more."""
        if unit in self._kept and all(
            parameter.requires_grad for parameter in unit.parameters
        ):  # else its values may still be needed
            self._keep_no_longer(unit)

    def changed(self, unit: Unit) -> None:
        """Its values are new."""
        self._version[unit] += 1
        if unit in self._whole:
            self._evict(unit)
        self._spoil(unit)

    def _spoil(self, unit: Unit) -> None:
        """Fill with NaN what is still seen of the unit: it cannot follow the new values."""
        seen = [(loan, own) for loan, own in self._outlived.items() if self.loans.sees(loan)]
        self._outlived = dict(seen)
        for loan, own in self._outlived.items():
            if own is unit:
                loan.fill_with(unit.nothing)
                self._outdated[loan.storage.data_ptr()] = unit

    def forget_all(self) -> None:
        """Begin anew, so that the ranks gather alike whatever each of them has whole now."""
        for unit in list(self._whole):
            self._evict(unit)
        self._expected, self._seen = [], []

    def close(self) -> None:
        for work in self._arriving.values():
            work.wait()
        for hook in self._hooks:
            hook.remove()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """The module's hooks lead here when it is copied or pickled."""
        name = next(iter(self._version)).layout.slots[0].parameter.name
        raise HpczeroError(
            f"the module is copied or pickled, but {name} and its other parameters are in parts on many ranks"
            " (zero.stage = 3): take engine.full_state_dict(), or zero.stage = 2"
        )

    def _begin(self, unit: Unit) -> None:
        loan = self._room_for(unit)
        if loan is None:
            if self.loans.still_seen and not self._warned:
                self._warned = True
                name = unit.layout.slots[0].parameter.name
                warnings.warn(
                    f"zero.stage = 3 takes more memory: when {name} was gathered, {_KEPT}",
                    stacklevel=2,
                )
            self.loans.grow(unit.weights.new_empty(unit.layout.size))
            loan = self._room_for(unit)
            assert loan is not None
        self._gather_into(loan, unit)

    def _gather_into(self, loan: Loan, unit: Unit) -> None:
        self._whole[unit] = loan
        self._under[loan.storage.data_ptr()] = unit
        self._outdated.pop(loan.storage.data_ptr(), None)
        self._arriving[unit] = self._start(unit, loan.tensor)

    def _room_for(self, unit: Unit, spare: Unit | None = None) -> Loan | None:
        """The unit's own place, or one in the regions, if need be of units that are not in use, the one used longest ago first."""
        loan = self._free_place(unit)
        for other in list(self._whole):
            if (
                loan is None
                and other not in self._in_use
                and other is not spare
                and other not in self._with_own_place
            ):
                self._evict(other)
                loan = self._free_place(unit)
        return loan

    def _free_place(self, unit: Unit) -> Loan | None:
        own = self._own_place.pop(unit, None)
        if own is None:
            return self.loans.take(unit.layout.size)
        return self.loans.lend(own, lambda: self._own_place.update({unit: own}))

    def _gather_ahead(self, unit: Unit) -> None:
        place = len(self._seen)
        if self._expected[place - 1 : place] != [unit]:
            return
        for coming in self._expected[place : place + 1]:
            loan = None if coming in self._whole else self._room_for(coming, spare=unit)
            if loan is not None:
                self._gather_into(loan, coming)

    def _evict(self, unit: Unit) -> None:
        if unit in self._arriving:
            self._arriving.pop(unit).wait()
        self._release_values(unit)
        loan = self._whole.pop(unit)
        del self._under[loan.storage.data_ptr()]
        self.loans.give_back(loan)
        if self.loans.sees(loan):
            self._outlived[loan] = unit

    def _show_values(self, unit: Unit, buffer: torch.Tensor) -> None:
        for place, parameter in zip(unit.layout.slots, unit.parameters, strict=True):
            assert isinstance(parameter, ShardedParameter)
            if parameter.released_as:
                give_values(parameter, unit.part(buffer, place))
                parameter.released_as = None

    def _release_values(self, unit: Unit) -> None:
        for place, parameter in zip(unit.layout.slots, unit.parameters, strict=True):
            assert isinstance(parameter, ShardedParameter)
            give_values(parameter, unit.nothing.expand(place.shape))
            parameter.released_as = place.parameter.name

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor | Saved:
        unit = self._unit_under(tensor)
        if unit is None and self._outdated:
            self._refuse_outdated(tensor)
        if unit is None or tensor.dtype != unit.weights.dtype:
            return tensor.detach() if isinstance(tensor, ShardedParameter) else tensor
        first = int(tensor.storage_offset())
        return Saved(unit, self._version[unit], first, tuple(tensor.shape), tensor.stride())

    def _refuse_outdated(self, tensor: torch.Tensor) -> None:
        unit = self._unit_in(self._outdated, tensor)
        if unit is not None:
            name = unit.layout.slots[0].parameter.name
            raise HpczeroError(
                f"a view of the layer with {name} was made before the last step, or change, of its"
                " parameters, and does not follow them (zero.stage = 3): make it anew in every forward,"
                " or take zero.stage = 2"
            )

    @undisturbed
    def _unpack(self, saved: torch.Tensor | Saved) -> torch.Tensor:
        if isinstance(saved, torch.Tensor):
            return saved
        if saved.version != self._version[saved.unit]:
            name = saved.unit.layout.slots[0].parameter.name
            raise HpczeroError(
                f"this backward is of a forward before the last step, or change, of the parameters of the layer with {name}:"
                " its gradients would be of other values; run the forward again"
            )
        return self.ensure_gathered(saved.unit).as_strided(saved.shape, saved.stride, saved.offset)


_KEPT = (
    "something outside of hpczero still had views of weights that had been let go (hooks for saved tensors, a"
    " tensor kept in ctx or in a list, a graph that is differentiated again)"
)


@dataclass
class _Opened:
    """A module that was called by itself; `depth`: calls of it that go on."""

    module: nn.Module
    depth: int
    stack: ExitStack


@contextmanager
def _way_out_without_hooks() -> Iterator[None]:
    """Say the way out where torch.func's gradients refuse the hooks that stage 3 needs."""
    try:
        yield
    except RuntimeError as problem:
        if "saved tensor hooks" not in str(problem):
            raise
        raise HpczeroError(
            "zero.stage = 3 sees by hooks which weights autograd saves, and something in this forward does without"
            f" them ({problem}): use torch.autograd.grad in its place, or take zero.stage = 2 (or"
            " zero.node_shared = true, with all ranks on one node)"
        ) from problem


def used_around_others(layers: Sequence[tuple[nn.Module, Layer]]) -> set[str]:
    """Names of the layers whose parameters are in use while other layers run."""
    parts = {part for part, _ in layers}
    used = {
        name
        for part, layer in layers
        if any(inner in parts for inner in part.modules() if inner is not part)
        for name in layer.names
    }
    return {
        layer.name
        for _, layer in layers
        if any(parameter.name in used for parameter in layer.parameters)
    }
