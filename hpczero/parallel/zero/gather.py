"""Parameters that are whole only while they are used (stage 3 of ZeRO).

A unit's weights are gathered from all ranks into a region of constant size before a layer that uses
them runs, and released after it. Autograd saves views of parameters for backward. A saved view of
the region is kept as (unit, offset, shape, stride) instead, and gathered again when backward asks
for it: so the memory under it can serve other units meanwhile. Released parameters read as NaN. A
computation that uses one gathers it inside a pass, and is an error that names it outside.

Not all views of these values come by autograd's hooks: there are a module's own hooks, views kept
in `ctx`, graphs of a backward (create_graph). So each time a unit is gathered its memory has a
storage of its own, whose users are counted (`buffers.Loans`). Memory that is still seen when the
unit is released serves no other unit, and keeps its values: that costs memory, not correctness. Nor
does it decide what is gathered: one rank may have kept what others have not.
When a step gives the unit new values, what is still seen of the old ones becomes NaN.

The order of collectives follows the program: every rank runs the same layers, so gathers start in
one order on all of them. The order of a pass (a forward and its backward) is remembered, and in the
next one the unit that comes next is gathered ahead.

Layers run inside others. A unit that is in use around other layers has memory reserved; the others
take turns. If more units are in use at once than there is memory for, it grows, and stays so.

A layer that runs during backward is being recomputed (torch.utils.checkpoint): its saved views are
kept by others than us, so its units stay gathered until their gradients are there. What is used
outside of the layer that holds it stays gathered until the end of the forward.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from torch.utils.hooks import RemovableHandle

from hpczero.comm.group import Work
from hpczero.errors import HpczeroError
from hpczero.model.shapes import Layer
from hpczero.parallel.zero.buffers import Loan, Loans
from hpczero.parallel.zero.outside import explain_missing_hooks, undisturbed, without_view
from hpczero.parallel.zero.parameters import ShardedParameter, give_values
from hpczero.parallel.zero.unit import Unit

_KEPT = (
    "something outside of hpczero still had views of weights that had been released (hooks for"
    " saved tensors, a tensor kept in ctx or in a list, a graph that is differentiated again)"
)


@dataclass(frozen=True)
class Saved:
    """A view of a gathered unit, as autograd keeps it."""

    unit: Unit
    version: int  # of the unit's values
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


class Gatherer:
    """The units that are gathered now, and the hooks that gather and release them."""

    def __init__(
        self, units: Sequence[Unit], memory: Tensor, start: Callable[[Unit, Tensor], Work]
    ) -> None:
        """`start(unit, buffer)` starts the gather of a unit's weights into the buffer."""
        self.loans = Loans(memory)
        self._start = start
        self._reserved: dict[Unit, Tensor] = {}  # memory of `_around`, while it is free
        self._around: set[Unit] = set()  # units that are in use while other layers run
        self._kept: set[Unit] = set()  # in use beyond their layers
        self._pass = ""  # the present one: "forward" or "backward"
        self._opened_by: nn.Module | None = None  # a call of which, by itself, began the pass
        self._depth = 0  # its calls that have not returned
        self._opened = ExitStack()
        self._hooks: list[RemovableHandle] = []
        self._gathered: dict[Unit, Loan] = {}  # least recently used first
        self._unit_at: dict[int, Unit] = {}  # address of a storage -> the unit gathered there
        self._arriving: dict[Unit, Work] = {}
        self._in_use: dict[Unit, int] = {}
        self._expected: list[Unit] = []  # the order of the last pass
        self._seen: list[Unit] = []  # the order of this one
        self._version = dict.fromkeys(units, 0)  # of their values
        self._outlived: dict[Loan, Unit] = {}  # given back while somebody still saw them
        self._outdated: dict[int, Unit] = {}  # address of a storage with old values -> unit
        self._warned = False
        for unit in units:
            self._release_values(unit)
            for parameter in unit.parameters:
                assert isinstance(parameter, ShardedParameter)
                parameter.fetch = partial(self._fetch, unit, parameter)

    def hook(self, module: nn.Module, units: Sequence[Unit]) -> None:
        """Gather these units before the module runs, and release them after it."""
        before = partial(self.acquire, units)
        after = partial(self._after, units)
        self._hooks.append(module.register_forward_pre_hook(before, prepend=True))
        self._hooks.append(module.register_forward_hook(after, always_call=True))

    def hook_outer_calls(self, module: nn.Module, layers: Set[nn.Module]) -> None:
        """Make calls of the module, or of a part with layers, forwards. `hook` comes before.

        These are calls by themselves, not through the engine.
        """
        for part in module.modules():
            if not layers.isdisjoint(part.modules()):
                self._hooks.append(part.register_forward_pre_hook(self._enter, prepend=True))
                self._hooks.append(part.register_forward_hook(self._leave, always_call=True))

    def _enter(self, module: nn.Module, *_: object) -> None:
        if self._opened_by is module:
            self._depth += 1
        elif not self._pass:
            self._opened_by = module
            self._depth = 1
            self._opened.enter_context(self.forward())

    def _leave(self, module: nn.Module, *_: object) -> None:
        if self._opened_by is module:
            self._depth -= 1
            if not self._depth:
                self._opened_by = None
                self._opened.close()

    def _after(
        self, units: Sequence[Unit], module: nn.Module, arguments: object, out: object
    ) -> object:
        """Release the units; copy outputs that are views of them."""
        out = tree_map(partial(without_view, self._unit_under, module), out)
        self.release(units)
        return out

    def _unit_under(self, tensor: Tensor) -> Unit | None:
        """Return the gathered unit whose values the tensor shows."""
        return _unit_in(self._unit_at, tensor)

    def reserve(self, unit: Unit) -> None:
        """Reserve memory for a unit that is in use around others."""
        memory = self.loans.regions[0].take(unit.layout.size)
        assert memory is not None
        self._reserved[unit] = memory
        self._around.add(unit)

    @contextmanager
    def forward(self) -> Iterator[None]:
        self._expected = max(self._expected, self._seen, key=len)
        self._seen = []
        with (
            self._in_pass("forward"),
            torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack),
            explain_missing_hooks(),
        ):
            yield

    def backward(self) -> AbstractContextManager[None]:
        return self._in_pass("backward")

    @contextmanager
    def _in_pass(self, direction: str) -> Iterator[None]:
        self._pass = direction
        try:
            yield
        finally:
            self._pass = ""
            for unit in list(self._kept):
                self._keep_no_longer(unit)

    @undisturbed
    def acquire(self, units: Sequence[Unit], *_: object) -> None:
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
        self.release([unit])

    @undisturbed
    def _fetch(self, unit: Unit, parameter: ShardedParameter) -> None:
        """Gather a parameter that is used outside of the layer that holds it."""
        if not self._pass:
            raise HpczeroError(
                f"parameter {parameter.released_as} is used outside of the model's forward, where"
                " its values are not gathered (zero.stage = 3): read it with"
                " engine.gathered(...), or take zero.stage = 2"
            )
        self._keep(unit)
        self.ensure_gathered(unit)

    @undisturbed
    def release(self, units: Sequence[Unit]) -> None:
        for unit in units:
            self._in_use[unit] -= 1
            if not self._in_use[unit]:
                del self._in_use[unit]
                self._release_values(unit)

    def show(self, unit: Unit, whole: Tensor) -> None:
        """Give the parameters the values of `whole`, until `release`."""
        self._in_use[unit] = self._in_use.get(unit, 0) + 1
        self._show_values(unit, whole)

    def ensure_gathered(self, unit: Unit) -> Tensor:
        """Return the unit's weights, gathered if they are not there."""
        if unit not in self._gathered:
            self._gather(unit)
        if unit in self._arriving:
            self._arriving.pop(unit).wait()
        loan = self._gathered[unit] = self._gathered.pop(unit)
        if unit in self._in_use:
            self._show_values(unit, loan.tensor)
        if not self._seen or self._seen[-1] is not unit:
            self._seen.append(unit)
            self._gather_ahead(unit)
        return loan.tensor

    def forget(self, unit: Unit) -> None:
        """Keep the unit no longer, as backward has all its gradients."""
        # The values of a frozen parameter may still be needed.
        if unit in self._kept and all(parameter.requires_grad for parameter in unit.parameters):
            self._keep_no_longer(unit)

    def changed(self, unit: Unit) -> None:
        """Drop the unit's old values."""
        self._version[unit] += 1
        if unit in self._gathered:
            self._evict(unit)
        self._spoil(unit)

    def _spoil(self, unit: Unit) -> None:
        """Fill with NaN what is still seen of the unit: it cannot follow the new values."""
        outlived = self._outlived.items()
        self._outlived = {loan: owner for loan, owner in outlived if self.loans.sees(loan)}
        for loan, owner in self._outlived.items():
            if owner is unit:
                loan.fill_with(unit.nan)
                self._outdated[loan.storage.data_ptr()] = unit

    def forget_all(self) -> None:
        """Begin anew, so that ranks that have gathered other units gather alike from now on."""
        for unit in list(self._gathered):
            self._evict(unit)
        self._expected = []
        self._seen = []

    def close(self) -> None:
        for work in self._arriving.values():
            work.wait()
        for hook in self._hooks:
            hook.remove()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse: the module's hooks lead here when it is copied or pickled."""
        name = next(iter(self._version)).layout.slots[0].parameter.name
        raise HpczeroError(
            f"the module is copied or pickled, but {name} and its other parameters are in parts on"
            " many ranks (zero.stage = 3): take engine.full_state_dict(), or zero.stage = 2"
        )

    def _gather(self, unit: Unit) -> None:
        loan = self._memory_for(unit)
        if loan is None:
            self.loans.grow(unit.weights.new_empty(unit.layout.size))
            loan = self._memory_for(unit)
            assert loan is not None
        self._gather_into(loan, unit)

    def _gather_into(self, loan: Loan, unit: Unit) -> None:
        if self.loans.instead and not self._warned:
            self._warned = True
            name = unit.layout.slots[0].parameter.name
            more = f"zero.stage = 3 takes more memory: when {name} was gathered, {_KEPT}"
            warnings.warn(more, stacklevel=2)
        address = loan.storage.data_ptr()
        self._gathered[unit] = loan
        self._unit_at[address] = unit
        self._outdated.pop(address, None)
        self._arriving[unit] = self._start(unit, loan.memory)

    def _memory_for(self, unit: Unit, spare: Unit | None = None) -> Loan | None:
        """Return free memory, if need be of units that are not in use, the oldest use first."""
        loan = self._free_memory(unit)
        for other in list(self._gathered):
            if loan is not None:
                break
            if other not in self._in_use and other is not spare and other not in self._around:
                self._evict(other)
                loan = self._free_memory(unit)
        return loan

    def _free_memory(self, unit: Unit) -> Loan | None:
        memory = self._reserved.pop(unit, None)
        if memory is None:
            return self.loans.take(unit.layout.size)
        return self.loans.lend_part(memory, lambda: self._reserved.update({unit: memory}))

    def _gather_ahead(self, unit: Unit) -> None:
        count = len(self._seen)
        if self._expected[count - 1 : count] != [unit]:
            return
        for coming in self._expected[count : count + 1]:
            loan = None if coming in self._gathered else self._memory_for(coming, spare=unit)
            if loan is not None:
                self._gather_into(loan, coming)

    def _evict(self, unit: Unit) -> None:
        if unit in self._arriving:
            self._arriving.pop(unit).wait()
        self._release_values(unit)
        loan = self._gathered.pop(unit)
        del self._unit_at[loan.storage.data_ptr()]
        self.loans.give_back(loan)
        if self.loans.sees(loan):
            self._outlived[loan] = unit

    def _show_values(self, unit: Unit, buffer: Tensor) -> None:
        for slot, parameter in zip(unit.layout.slots, unit.parameters, strict=True):
            assert isinstance(parameter, ShardedParameter)
            if parameter.released_as:
                give_values(parameter, unit.part(buffer, slot))
                parameter.released_as = None

    def _release_values(self, unit: Unit) -> None:
        for slot, parameter in zip(unit.layout.slots, unit.parameters, strict=True):
            assert isinstance(parameter, ShardedParameter)
            give_values(parameter, unit.nan.expand(slot.shape))
            parameter.released_as = slot.parameter.name

    def pack(self, tensor: Tensor) -> Tensor | Saved:
        unit = self._unit_under(tensor)
        if unit is None and self._outdated:
            self._refuse_outdated(tensor)
        if unit is None or tensor.dtype != unit.weights.dtype:
            return tensor.detach() if isinstance(tensor, ShardedParameter) else tensor
        first = int(tensor.storage_offset())
        return Saved(unit, self._version[unit], first, tuple(tensor.shape), tensor.stride())

    def _refuse_outdated(self, tensor: Tensor) -> None:
        unit = _unit_in(self._outdated, tensor)
        if unit is not None:
            name = unit.layout.slots[0].parameter.name
            raise HpczeroError(
                f"a view of the layer with {name} was made before the last step, or change, of its"
                " parameters, and does not follow them (zero.stage = 3): make it anew in every"
                " forward, or take zero.stage = 2"
            )

    @undisturbed
    def unpack(self, saved: Tensor | Saved) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        if saved.version != self._version[saved.unit]:
            name = saved.unit.layout.slots[0].parameter.name
            raise HpczeroError(
                "this backward is of a forward before the last step, or change, of the parameters"
                f" of the layer with {name}: its gradients would be of other values; run the"
                " forward again"
            )
        return self.ensure_gathered(saved.unit).as_strided(saved.shape, saved.stride, saved.offset)


def _unit_in(unit_at: Mapping[int, Unit], tensor: Tensor) -> Unit | None:
    try:
        address = tensor.untyped_storage().data_ptr()
    except RuntimeError:  # it has no memory: inside transforms, sparse, zeros of forward mode
        return None
    return unit_at.get(address)


def used_around_others(layers: Sequence[tuple[nn.Module, Layer]]) -> set[str]:
    """Return the names of layers whose parameters are in use while other layers run."""
    modules = {module for module, _ in layers}
    names = {
        name
        for module, layer in layers
        if any(inner in modules for inner in module.modules() if inner is not module)
        for name in layer.names
    }
    return {
        layer.name
        for _, layer in layers
        if any(parameter.name in names for parameter in layer.parameters)
    }
