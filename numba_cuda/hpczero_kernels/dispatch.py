"""Choice of an operation's implementation, and kernels as operators of torch.

The choice is the first entry of the operation's table that takes the device and the precision and
is available. It depends on these alone, so that it is the same on ranks of one kind. Each choice is
logged once ("hpczero_kernels", INFO); `force` takes another one by name, to find out whether a
kernel is at fault.
"""

import importlib
import logging
from collections.abc import Callable
from dataclasses import replace
from functools import cache, lru_cache
from itertools import chain
from typing import Any

import torch
from numba.core import config

from hpczero_kernels.table import (
    CUDA,
    FLEX,
    FLOATS,
    MIN_CAPABILITY,
    NUMBA,
    TABLE,
    TORCH,
    Implementation,
)

__all__ = [
    "CUDA",
    "FLEX",
    "NUMBA",
    "SIMULATED",
    "TORCH",
    "choices",
    "choose",
    "force",
    "kernel_operations",
    "on_gpus",
]

# NUMBA_ENABLE_CUDASIM=1, for tests: CUDA kernels run in Python, on the CPU's tensors.
SIMULATED = bool(vars(config).get("ENABLE_CUDASIM"))
_LOG = logging.getLogger("hpczero_kernels")

_forced: dict[str, str] = {}
_chosen: dict[str, str] = {}


def choose(operation: str, tensor: torch.Tensor, fits: bool = True) -> str:
    """Return the implementation's name for this tensor; `fits`: kernels can take its shape."""
    return _choose(operation, tensor.device.type, tensor.dtype, fits)


def force(text: str) -> None:
    """Choose implementations by name: "norm=torch,adamw=torch", or "torch" for all operations.

    A name holds wherever that implementation takes the device; "" undoes all. Raise ValueError if
    there is no such operation or implementation.
    """
    forced: dict[str, str] = {}
    for entry in filter(None, (entry.strip() for entry in text.split(","))):
        operation, separator, name = entry.partition("=")
        if not separator:
            operation = ""
            name = entry
        if operation and operation not in TABLE:
            raise ValueError(f"there is no operation {operation}; there are {', '.join(TABLE)}")
        names = {
            key: [implementation.name for implementation in implementations]
            for key, implementations in TABLE.items()
            if operation in ("", key)
        }
        operations = [key for key in names if name in names[key]]
        if not operations:
            known = ", ".join(dict.fromkeys(chain(*names.values())))
            what = operation or "any operation"
            raise ValueError(f"there is no implementation {name} of {what}; there are {known}")
        forced |= dict.fromkeys(operations, name)
    _forced.clear()
    _forced.update(forced)
    _decide.cache_clear()


def on_gpus() -> bool:
    """Return True if a kernel carries out any operation on this process's GPU."""
    return any(
        _best(operation, "cuda", dtype)[0] == CUDA for operation in TABLE for dtype in FLOATS
    )


def kernel_operations(device: str, dtype: torch.dtype) -> frozenset[str]:
    """Return the operations in this precision that kernels carry out on this process's device."""
    name = str(dtype).removeprefix("torch.")
    return frozenset(key for key in TABLE if _best(key, device, name)[0] != TORCH)


def choices() -> dict[str, str]:
    """Return the choices made so far: "norm on cpu in bfloat16" -> "torch"."""
    return dict(sorted(_chosen.items()))


def _choose(operation: str, device: str, dtype: torch.dtype, fits: bool) -> str:
    return _decide(operation, device, str(dtype).removeprefix("torch."), fits)


# torch.compiler.assume_constant_result does the same, but imports the compiler: a second of every
# start. A test compares them.
_choose._dynamo_marked_constant = True  # type: ignore[attr-defined]


@lru_cache(maxsize=1024)
def _decide(operation: str, device: str, dtype: str, fits: bool) -> str:
    name, why = _best(operation, device, dtype, fits)
    what = f"{operation} on {device} in {dtype}"
    _chosen[what] = name
    _LOG.info("%s: %s%s", what, name, f" ({why})" if why else "")
    return name


def _best(operation: str, device: str, dtype: str, fits: bool = True) -> tuple[str, str]:
    """Return an implementation's name, and the reasons why others are not available."""
    candidates = [
        implementation
        for implementation in map(_in_simulation, TABLE[operation])
        if implementation.takes(device, dtype) and (fits or implementation.name == TORCH)
    ]
    reasons = {candidate.name: _missing(candidate) for candidate in candidates}
    available = [name for name, reason in reasons.items() if not reason]
    forced = _forced.get(operation)
    name = forced if forced in available else available[0]
    return name, "; ".join(filter(None, reasons.values()))


def _missing(implementation: Implementation) -> str:
    """Return the reason why it is not available on this process's device, "" if it is."""
    if SIMULATED:
        return ""
    if implementation.name in (CUDA, FLEX) and torch.cuda.is_available():
        if torch.version.cuda is None:
            return "the kernels are for NVIDIA's GPUs"
        if torch.cuda.get_device_capability() < MIN_CAPABILITY:
            least = ".".join(map(str, MIN_CAPABILITY))
            return f"the kernels need a GPU of compute capability {least}"
    return implementation.missing_reason()


def _in_simulation(implementation: Implementation) -> Implementation:
    if SIMULATED and implementation.name == CUDA:
        return replace(implementation, device="cpu")
    return implementation


# Kernels as operators of torch (`torch.ops.hpczero`), which `torch.compile` takes as they are.
#
# Each has a schema, an implementation for CPUs (the reference, in torch, or numba's), one for CUDA
# (the kernel, imported when first called) and a fake one, which gives shapes alone. A
# `torch.autograd.Function` around an operator and the operator of its backward gives gradients: it
# costs a tenth of autograd formulas registered with an operator.
_LIBRARY = torch.library.Library("hpczero", "DEF")


def operator(
    schema: str,
    reference: Callable[..., Any],
    kernel: str,
    fake: Callable[..., Any],
    on_cpu: Callable[..., Any] | None = None,
) -> Callable[..., Any]:
    """Define an operator and return it; `kernel` is "module:function" of hpczero_kernels.cuda.

    `on_cpu` is a faster twin of the reference, for all that the reference takes.
    """
    name = schema.partition("(")[0]
    _LIBRARY.define(schema)
    _LIBRARY.impl(name, _when_called(kernel) if SIMULATED else on_cpu or reference, "CPU")
    _LIBRARY.impl(name, _when_called(kernel), "CUDA")
    torch.library.register_fake(f"hpczero::{name}", fake, lib=_LIBRARY)
    return getattr(torch.ops.hpczero, name).default


def _when_called(kernel: str) -> Callable[..., Any]:
    """Return a function that imports the kernel when first called."""

    @cache
    def imported() -> Callable[..., Any]:
        module, _, function = kernel.partition(":")
        return getattr(importlib.import_module(f"hpczero_kernels.cuda.{module}"), function)

    return lambda *arguments: imported()(*arguments)


def upcast_half(tensor: torch.Tensor) -> torch.Tensor:
    """Return half precision as fp32, and other tensors unchanged."""
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor


def is_like(x: torch.Tensor, other: torch.Tensor | None) -> bool:
    """Return True if a kernel may read `other` (None: nothing) element by element beside x.

    PyTorch's operations would broadcast and convert it.
    """
    return other is None or (
        other.shape == x.shape and other.dtype == x.dtype and other.device == x.device
    )


def is_per_column(x: torch.Tensor, other: torch.Tensor | None) -> bool:
    """Return True if a kernel may read `other` (None: nothing) as one element per column of x."""
    return other is None or (
        other.shape == x.shape[-1:] and other.dtype == x.dtype and other.device == x.device
    )


def empty_contiguous(like: torch.Tensor) -> torch.Tensor:
    """Return an empty contiguous tensor of this shape and type, as the kernels return them."""
    return torch.empty_like(like, memory_format=torch.contiguous_format)
