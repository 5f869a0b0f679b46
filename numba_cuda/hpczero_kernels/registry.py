"""Which implementation carries out an operation: the first of its table that fits the device, the precision and the shape.

    torch   PyTorch's own operations; every other implementation is held against it
    numba   kernels for CPUs, where they were measured faster
    cuda    kernels for NVIDIA's GPUs, by the package numba-cuda; imported when the first of them is chosen, and nowhere else

The choice depends on nothing but these, so that it is the same on ranks of one kind; it is logged once ("hpczero_kernels", INFO), and `force`d by
name where somebody wants to know whether a kernel is to blame.
"""

import logging
from dataclasses import dataclass
from functools import lru_cache
from importlib import util

import torch
from numba.core import config

SIMULATED = bool(config.ENABLE_CUDASIM)  # NUMBA_ENABLE_CUDASIM=1, for tests: CUDA kernels run in Python, on the tensors of this computer
_LOG = logging.getLogger("hpczero_kernels")
_FLOATS = frozenset({torch.float32, torch.bfloat16, torch.float16})
TORCH, NUMBA, CUDA = "torch", "numba", "cuda"


@dataclass(frozen=True)
class Implementation:
    name: str
    device: str = ""  # any
    dtypes: frozenset[torch.dtype] = frozenset()  # any


@dataclass(frozen=True)
class Choice:
    operation: str
    device: str
    dtype: torch.dtype
    implementation: str


_TORCH = Implementation(TORCH)
_CUDA = Implementation(CUDA, "cpu" if SIMULATED else "cuda", _FLOATS)
_NUMBA = Implementation(NUMBA, "cpu", _FLOATS)

# the best first
TABLE: dict[str, tuple[Implementation, ...]] = {
    "adamw": (_CUDA, _NUMBA, _TORCH),
    "sum": (_CUDA, _NUMBA, _TORCH),
    "norm": (_CUDA, _TORCH),
    "gelu": (_CUDA, _TORCH),
    "swiglu": (_CUDA, _TORCH),
    "dropout": (_CUDA, _NUMBA, _TORCH),
    "cross_entropy": (_CUDA, _TORCH),
    "rotary": (_CUDA, _TORCH),
}

_forced: dict[str, str] = {}
_chosen: dict[tuple[str, str, torch.dtype], str] = {}


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
            operation, name = "*", entry
        if operation != "*" and operation not in TABLE:
            raise ValueError(f"there is no operation {operation}; there are {', '.join(TABLE)}")
        having = [key for key, entries in TABLE.items() if operation in ("*", key) and any(each.name == name for each in entries)]
        if not having:
            names = [each.name for each in TABLE[operation]] if operation != "*" else [TORCH, NUMBA, CUDA]
            raise ValueError(f"there is no implementation {name} of {operation}; there are {', '.join(names)}")
        found |= dict.fromkeys(having, name)
    _forced.clear()
    _forced.update(found)
    _decide.cache_clear()


def choices() -> list[Choice]:
    """Those made so far, in order."""
    return [Choice(*key, name) for key, name in _chosen.items()]


def missing(implementation: str) -> str:
    """Why an implementation cannot be had here; "": it can."""
    if implementation == CUDA and not SIMULATED and util.find_spec("numba_cuda.numba") is None:
        return "the package numba-cuda is not installed"
    return ""


@torch.compiler.assume_constant_result
def _choose(operation: str, device: str, dtype: torch.dtype, fits: bool) -> str:
    return _decide(operation, device, dtype, fits)


@lru_cache(maxsize=1024)
def _decide(operation: str, device: str, dtype: torch.dtype, fits: bool) -> str:
    able = [each for each in TABLE[operation] if each.device in ("", device) and (not each.dtypes or dtype in each.dtypes)]
    able = [each for each in able if fits or each.name == TORCH]
    lacking = {each.name: missing(each.name) for each in able}
    there = [each.name for each in able if not lacking[each.name]]
    forced = _forced.get(operation)
    name = forced if forced in there else there[0]
    why = ", ".join(reason for reason in lacking.values() if reason)
    _chosen[operation, device, dtype] = name
    _LOG.info("%s on %s in %s: %s%s", operation, device, str(dtype).removeprefix("torch."), name, f" ({why})" if why else "")
    return name
