"""Kernels as operators of torch (`torch.ops.hpczero`), so that `torch.compile` takes them as they are.

Each has a schema, an implementation for CPUs (the reference, in torch), one for CUDA (the kernel, imported when it is first called) and a fake one,
which gives shapes alone. Gradients are the business of a `torch.autograd.Function` around an operator and the operator of its backward: that costs a
tenth of what autograd formulas registered with an operator cost.
"""

import importlib
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from hpczero_kernels.dispatch import SIMULATED

_LIBRARY = torch.library.Library("hpczero", "DEF")


def operator(schema: str, reference: Callable[..., Any], kernel: str, fake: Callable[..., Any]) -> Callable[..., Any]:
    """`kernel`: "module:function" of hpczero_kernels.cuda."""
    name = schema.partition("(")[0]
    _LIBRARY.define(schema)
    _LIBRARY.impl(name, _when_called(kernel) if SIMULATED else reference, "CPU")
    _LIBRARY.impl(name, _when_called(kernel), "CUDA")
    torch.library.register_fake(f"hpczero::{name}", fake, lib=_LIBRARY)
    made: Callable[..., Any] = getattr(torch.ops.hpczero, name).default
    return made


def _when_called(kernel: str) -> Callable[..., Any]:
    @cache
    def found() -> Callable[..., Any]:
        module, _, function = kernel.partition(":")
        made: Callable[..., Any] = getattr(importlib.import_module(f"hpczero_kernels.cuda.{module}"), function)
        return made

    return lambda *arguments: found()(*arguments)


def wide(tensor: torch.Tensor) -> torch.Tensor:
    """Half precision in fp32."""
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor


def is_like(x: torch.Tensor, other: torch.Tensor | None) -> bool:
    """Whether a kernel may take it (None: nothing) element by element beside x. PyTorch's operations would stretch and convert."""
    return other is None or (other.shape == x.shape and other.dtype == x.dtype and other.device == x.device)


def is_of_columns(x: torch.Tensor, other: torch.Tensor | None) -> bool:
    """The same for one that has an element for each column of x."""
    return other is None or (other.shape == x.shape[-1:] and other.dtype == x.dtype and other.device == x.device)


def empty(like: torch.Tensor) -> torch.Tensor:
    """Of this shape and type, contiguous as what the kernels give."""
    return torch.empty_like(like, memory_format=torch.contiguous_format)
