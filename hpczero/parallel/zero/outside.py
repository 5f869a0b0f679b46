"""Find what is done to the module from outside, before a step is computed from it.

A write to a parameter is counted by PyTorch, whoever writes, and the engine's own writes are not:
so a changed count is somebody else's write, which the master weights would never know. What was put in
the place of a parameter, or added, the engine does not train. Nobody counts writes to raw memory (numpy,
`untyped_storage()`).
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import wraps
from itertools import chain
from operator import attrgetter
from typing import Any, ParamSpec, TypeVar

import torch
from torch import nn
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.hooks import RemovableHandle

from hpczero.errors import HpczeroError
from hpczero.parallel.zero.parameters import OwnedParameter, Owner
from hpczero.parallel.zero.unit import Unit

_COUNT = attrgetter("_version")
_WAY_OUT = (
    "write inside `with engine.gathered([parameter], modify=True)`, or call"
    " engine.load_state_dict, on all ranks"
)


class Outside:
    """`look` finds what has been done since `note`. Without units there is nothing to be found."""

    def __init__(self, module: nn.Module, units: Sequence[Unit]) -> None:
        self.owner = Owner()
        self._module, self._units = module, units
        self._parameters = [own for unit in units for own in unit.parameters]
        self._names = [place.parameter.name for unit in units for place in unit.layout.slots]
        for unit in units:
            unit.belongs_to(self.owner)
        self._modules = list(module.modules())
        self._hooks: list[RemovableHandle] = [
            part.register_load_state_dict_pre_hook(_refuse_to_load) for part in self._modules
        ]
        self._known = set(module.parameters())
        self._structure = self._now()
        self._addresses = self._places()
        self._counts = self._writes()
        self._looked = False  # since the last note

    def note(self) -> None:
        """Take the parameters' present values for the engine's own; earlier graphs are out of date."""
        with torch._C.DisableTorchFunctionSubclass():
            torch.autograd.graph.increment_version(self._parameters)
        self._counts = self._writes()
        self._looked = False

    def look_once(self) -> None:
        if not self._looked:
            self.look()
            self._looked = True

    def look(self) -> None:
        counts = self._writes()
        name = self._written(counts) if counts != self._counts else None
        if name is not None:
            what = f"{name} was written to from outside, which its master weights do not see"
            raise HpczeroError(f"{what}, and which is done once by every rank: {_WAY_OUT}")
        if self._places() != self._addresses:
            what = "the memory of the parameters has moved (share_memory()?)"
            raise HpczeroError(f"{what}: {_WAY_OUT}")
        if self._now() != self._structure:
            self._look_at_structure()

    @contextmanager
    def lent(self, units: Collection[Unit]) -> Iterator[None]:
        """Inside, these units' parameters may be written."""
        parameters = [own for unit in units for own in unit.parameters]
        self.owner.lent.update(parameters)
        try:
            yield
        finally:
            self.owner.lent.difference_update(parameters)

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _writes(self) -> list[int]:
        with torch._C.DisableTorchFunctionSubclass():
            return list(map(_COUNT, self._parameters))

    def _written(self, counts: list[int]) -> str | None:
        """The first parameter that was written to where it must not be."""
        parameters = zip(self._names, self._parameters, counts, self._counts, strict=True)
        for name, own, now, before in parameters:
            if now != before and own not in self.owner.lent:
                return name
        return None

    def _places(self) -> list[int]:
        return [unit.weights.data_ptr() for unit in self._units]

    def _now(self) -> list[int]:
        """Which objects are where, without a walk over the module."""
        held = chain.from_iterable(part._parameters.values() for part in self._modules)
        inside = chain.from_iterable(part._modules.values() for part in self._modules)
        return list(map(id, chain(held, inside)))

    def _look_at_structure(self) -> None:
        names = {own: name for name, own in self._module.named_parameters()}
        trained = zip(self._names, self._parameters, strict=True)
        gone = [name for name, own in trained if own not in names]
        floating = [(name, own) for own, name in names.items() if own.is_floating_point()]
        new = [name for name, own in floating if own not in self._known]
        if gone or new:
            what = (
                f"{gone[0]} is no longer in the module"
                if gone
                else f"{new[0]} is new in the module"
            )
            more = f"; {new[0]} is new" if gone and new else ""
            raise HpczeroError(
                f"{what}{more}: hpczero trains the parameters that the module had in"
                " hpczero.initialize. Change the module before; give a parameter other values inside"
                " `with engine.gathered([parameter], modify=True)`"
            )
        self._modules = list(self._module.modules())
        self._structure = self._now()


def _refuse_to_load(module: nn.Module, *_: Any) -> None:
    """Stand before a `load_state_dict` that would write to this module's parameters."""
    for own in module._parameters.values():
        if isinstance(own, OwnedParameter) and own.owner and own not in own.owner.lent:
            raise HpczeroError(
                f"load_state_dict of the module would write {own.known_as} on this rank alone, and not"
                " its master weights: call engine.load_state_dict(state) on all ranks, or load inside"
                " `with engine.gathered(engine.module.parameters(), modify=True)`"
            )


# Tensor operations of hpczero's own in the middle of other people's.
_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def undisturbed(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Inside the function no dispatch mode sees tensor operations (selective checkpointing would note
    them, and miss them when it computes again), and no transform (torch.func) changes them.
    """

    @wraps(function)
    def alone(*arguments: _Arguments.args, **named: _Arguments.kwargs) -> _Result:
        transforms = torch._C._are_functorch_transforms_active()
        modes = torch._C._len_torch_dispatch_stack()
        if not transforms and not modes:
            return function(*arguments, **named)
        with ExitStack() as stack:
            if transforms:
                stack.enter_context(temporarily_clear_interpreter_stack())
            if modes:
                stack.enter_context(_disable_current_modes())
            return function(*arguments, **named)

    return alone
