"""Tensor operations of hpczero's own in the middle of other people's."""

from collections.abc import Callable
from contextlib import ExitStack
from functools import wraps
from typing import ParamSpec, TypeVar

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.utils._python_dispatch import _disable_current_modes

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
