"""Which implementation carries out an operation: the first in its table that takes the device and the precision, and is there.

The choice depends on these alone, so that it is the same on ranks of one kind; it is logged once ("hpczero_kernels", INFO), and `force`d by name
where somebody wants to know whether a kernel is to blame.
"""

import importlib
import logging
from collections.abc import Callable
from dataclasses import replace
from functools import cache, lru_cache
from typing import Any

import torch
from numba.core import config

from hpczero_kernels.table import CUDA, FLOATS, NUMBA, OLDEST, TABLE, TORCH, Implementation

__all__ = [
    "CUDA",
    "NUMBA",
    "SIMULATED",
    "TORCH",
    "choices",
    "choose",
    "force",
    "of_gpus",
    "on_gpus",
]

SIMULATED = bool(
    vars(config).get("ENABLE_CUDASIM")
)  # NUMBA_ENABLE_CUDASIM=1, for tests: CUDA kernels run in Python, on the tensors of this computer
_LOG = logging.getLogger("hpczero_kernels")

_forced: dict[str, str] = {}
_chosen: dict[str, str] = {}


def choose(operation: str, tensor: torch.Tensor, fits: bool = True) -> str:
    """The name of the implementation for this tensor; `fits`: whether kernels can have its shape."""
    return _choose(operation, tensor.device.type, tensor.dtype, fits)


def force(text: str) -> None:
    """As in "norm=torch,adamw=torch", or "torch" for all operations, wherever the implementation's device is theirs; "" undoes it. ValueError
    where there is no such operation or implementation.
    """
    found: dict[str, str] = {}
    for entry in filter(None, (part.strip() for part in text.split(","))):
        operation, separator, name = entry.partition("=")
        if not separator:
            operation, name = "", entry
        if operation and operation not in TABLE:
            raise ValueError(f"there is no operation {operation}; there are {', '.join(TABLE)}")
        having = [
            key
            for key, entries in TABLE.items()
            if operation in ("", key) and any(each.name == name for each in entries)
        ]
        if not having:
            names = dict.fromkeys(
                each.name
                for key, entries in TABLE.items()
                if operation in ("", key)
                for each in entries
            )
            raise ValueError(
                f"there is no implementation {name} of {operation or 'any operation'}; there are {', '.join(names)}"
            )
        found |= dict.fromkeys(having, name)
    _forced.clear()
    _forced.update(found)
    _decide.cache_clear()


def on_gpus() -> bool:
    """Whether any operation on this process's GPU is a kernel's."""
    return any(
        _best(operation, "cuda", dtype)[0] == CUDA for operation in TABLE for dtype in FLOATS
    )


def of_gpus(dtype: torch.dtype) -> frozenset[str]:
    """Return the operations in this precision that kernels carry out on this process's GPU."""
    name = str(dtype).removeprefix("torch.")
    return frozenset(key for key in TABLE if _best(key, "cuda", name)[0] == CUDA)


def choices() -> dict[str, str]:
    """Those made so far: "norm on cpu in bfloat16" -> "torch"."""
    return dict(sorted(_chosen.items()))


def _choose(operation: str, device: str, dtype: torch.dtype, fits: bool) -> str:
    return _decide(operation, device, str(dtype).removeprefix("torch."), fits)


# As torch.compiler.assume_constant_result does, which imports the compiler for it: a second of every start. A test compares.
_choose._dynamo_marked_constant = True  # type: ignore[attr-defined]


@lru_cache(maxsize=1024)
def _decide(operation: str, device: str, dtype: str, fits: bool) -> str:
    name, why = _best(operation, device, dtype, fits)
    what = f"{operation} on {device} in {dtype}"
    _chosen[what] = name
    _LOG.info("%s: %s%s", what, name, f" ({why})" if why else "")
    return name


def _best(operation: str, device: str, dtype: str, fits: bool = True) -> tuple[str, str]:
    """The name of an implementation, and what others lack."""
    able = [
        each
        for each in map(_in_simulation, TABLE[operation])
        if each.takes(device, dtype) and (fits or each.name == TORCH)
    ]
    lacking = {each.name: _lacking(each) for each in able}
    there = [name for name, reason in lacking.items() if not reason]
    forced = _forced.get(operation)
    return forced if forced in there else there[0], "; ".join(filter(None, lacking.values()))


def _lacking(implementation: Implementation) -> str:
    if SIMULATED:
        return ""
    if implementation.name == CUDA and torch.cuda.is_available():
        if torch.version.cuda is None:
            return "the kernels are for NVIDIA's GPUs"
        if torch.cuda.get_device_capability() < OLDEST:
            return f"the kernels need a GPU of compute capability {OLDEST[0]}.{OLDEST[1]}"
    return implementation.missing()


def _in_simulation(implementation: Implementation) -> Implementation:
    return (
        replace(implementation, device="cpu")
        if SIMULATED and implementation.name == CUDA
        else implementation
    )


# Kernels as operators of torch (`torch.ops.hpczero`), so that `torch.compile` takes them as they are.
#
# Each has a schema, an implementation for CPUs (the reference, in torch), one for CUDA (the kernel, imported when it is first called) and a fake one,
# which gives shapes alone. Gradients are the business of a `torch.autograd.Function` around an operator and the operator of its backward: that
# costs a tenth of what autograd formulas registered with an operator cost.
_LIBRARY = torch.library.Library("hpczero", "DEF")


def operator(
    schema: str, reference: Callable[..., Any], kernel: str, fake: Callable[..., Any]
) -> Callable[..., Any]:
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
        made: Callable[..., Any] = getattr(
            importlib.import_module(f"hpczero_kernels.cuda.{module}"), function
        )
        return made

    return lambda *arguments: found()(*arguments)


def wide(tensor: torch.Tensor) -> torch.Tensor:
    """Half precision in fp32."""
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor


def is_like(x: torch.Tensor, other: torch.Tensor | None) -> bool:
    """Whether a kernel may take it (None: nothing) element by element beside x. PyTorch's operations would stretch and convert."""
    return other is None or (
        other.shape == x.shape and other.dtype == x.dtype and other.device == x.device
    )


def is_of_columns(x: torch.Tensor, other: torch.Tensor | None) -> bool:
    """The same for one that has an element for each column of x."""
    return other is None or (
        other.shape == x.shape[-1:] and other.dtype == x.dtype and other.device == x.device
    )


def empty(like: torch.Tensor) -> torch.Tensor:
    """Of this shape and type, contiguous as what the kernels give."""
    return torch.empty_like(like, memory_format=torch.contiguous_format)
