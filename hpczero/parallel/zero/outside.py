"""Guards of an engine's module: changes by others are found, and their modes kept out.

PyTorch counts every write to a parameter, whoever writes. The engine knows the counts after its own
writes, so a changed count is somebody else's write, which the master weights would never know. A
parameter that was replaced or added would not be trained. Nobody counts writes to raw memory
(numpy, `untyped_storage()`).
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

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


class ModuleGuard:
    """`check` refuses changes since the last `accept`. Without units there are none to be found."""

    def __init__(self, module: nn.Module, units: Sequence[Unit]) -> None:
        self.owner = Owner()
        self._module = module
        self._units = units
        self._parameters = [parameter for unit in units for parameter in unit.parameters]
        self._names = [slot.parameter.name for unit in units for slot in unit.layout.slots]
        for unit in units:
            unit.set_owner(self.owner)
        self._modules = list(module.modules())
        self._hooks: list[RemovableHandle] = [
            part.register_load_state_dict_pre_hook(_refuse_to_load) for part in self._modules
        ]
        self._known = set(module.parameters())
        self._structure = self._object_ids()
        self._addresses = self._weights_addresses()
        self._counts = self._write_counts()
        self._looked = False  # since the last `accept`

    def accept(self) -> None:
        """Accept the parameters' present values; graphs of earlier values are out of date."""
        with torch._C.DisableTorchFunctionSubclass():
            torch.autograd.graph.increment_version(self._parameters)
        self._counts = self._write_counts()
        self._looked = False

    def check_once(self) -> None:
        """Look for changes, unless that has been done since the last `accept`."""
        if not self._looked:
            self.check()
            self._looked = True

    def check(self) -> None:
        """Raise HpczeroError if somebody else has changed values, memory or structure."""
        counts = self._write_counts()
        name = self._first_written(counts) if counts != self._counts else None
        if name is not None:
            what = f"{name} was written to from outside, which its master weights do not see"
            raise HpczeroError(f"{what}, and which is done once by every rank: {_WAY_OUT}")
        if self._weights_addresses() != self._addresses:
            what = "the memory of the parameters has moved (share_memory()?)"
            raise HpczeroError(f"{what}: {_WAY_OUT}")
        if self._object_ids() != self._structure:
            self._look_at_structure()

    @contextmanager
    def lent(self, units: Collection[Unit]) -> Iterator[None]:
        """Let others write to these units' parameters inside."""
        parameters = [parameter for unit in units for parameter in unit.parameters]
        self.owner.lent.update(parameters)
        try:
            yield
        finally:
            self.owner.lent.difference_update(parameters)

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _write_counts(self) -> list[int]:
        with torch._C.DisableTorchFunctionSubclass():
            return list(map(_COUNT, self._parameters))

    def _first_written(self, counts: list[int]) -> str | None:
        """Return the first parameter that was written to while it was not lent."""
        parameters = zip(self._names, self._parameters, counts, self._counts, strict=True)
        for name, parameter, now, before in parameters:
            if now != before and parameter not in self.owner.lent:
                return name
        return None

    def _weights_addresses(self) -> list[int]:
        return [unit.weights.data_ptr() for unit in self._units]

    def _object_ids(self) -> list[int]:
        """Return the ids of all parameters and modules in their places, without a walk."""
        held = chain.from_iterable(part._parameters.values() for part in self._modules)
        inside = chain.from_iterable(part._modules.values() for part in self._modules)
        return list(map(id, chain(held, inside)))

    def _look_at_structure(self) -> None:
        names = {parameter: name for name, parameter in self._module.named_parameters()}
        trained = zip(self._names, self._parameters, strict=True)
        gone = [name for name, parameter in trained if parameter not in names]
        new = [
            name
            for parameter, name in names.items()
            if parameter.is_floating_point() and parameter not in self._known
        ]
        if gone or new:
            changes = [f"{gone[0]} is no longer in the module"] if gone else []
            changes += [f"{new[0]} is new in the module"] if new else []
            raise HpczeroError(
                f"{'; '.join(changes)}: hpczero trains the parameters that the module had in"
                " hpczero.initialize. Change the module before; give a parameter other values"
                " inside `with engine.gathered([parameter], modify=True)`"
            )
        self._modules = list(self._module.modules())
        self._structure = self._object_ids()


def _refuse_to_load(module: nn.Module, *_: Any) -> None:
    """Stand before a `load_state_dict` that would write to this module's parameters."""
    for parameter in module._parameters.values():
        if not isinstance(parameter, OwnedParameter) or not parameter.owner:
            continue
        if parameter not in parameter.owner.lent:
            raise HpczeroError(
                f"load_state_dict of the module would write {parameter.known_as} on this rank"
                " alone, and not its master weights: call engine.load_state_dict(state) on all"
                " ranks, or load inside `with engine.gathered(engine.module.parameters(),"
                " modify=True)`"
            )


def undisturbed(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Hide the function's tensor operations from dispatch modes and torch.func's transforms.

    Selective checkpointing, a mode, would record them, and miss them when it recomputes.
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


def without_view(
    unit_under: Callable[[torch.Tensor], Unit | None], module: nn.Module, leaf: object
) -> object:
    """Copy an output of the module that is a view of gathered weights; refuse one in an object."""
    if isinstance(leaf, torch.Tensor):
        return leaf.clone() if unit_under(leaf) else leaf
    attributes = vars(leaf).items() if hasattr(leaf, "__dict__") else ()
    for name, value in attributes:
        if isinstance(value, torch.Tensor) and unit_under(value):
            what = f"a view of its weights as {name} of a {type(leaf).__name__}"
            raise HpczeroError(
                f"{type(module).__name__} gives {what}: these weights are gone when it is read"
                " (zero.stage = 3); give a copy (.clone())"
            )
    return leaf


@contextmanager
def explain_missing_hooks() -> Iterator[None]:
    """Name the way out where torch.func's gradients refuse the hooks that stage 3 needs."""
    try:
        yield
    except RuntimeError as problem:
        if "saved tensor hooks" not in str(problem):
            raise
        raise HpczeroError(
            "zero.stage = 3 sees by hooks which weights autograd saves, and something in this"
            f" forward does without them ({problem}): use torch.autograd.grad in its place, or take"
            " zero.stage = 2 (or zero.node_shared = true, with all ranks on one node)"
        ) from problem
