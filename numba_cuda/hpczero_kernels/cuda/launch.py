"""Kernels of one signature: compiled (or loaded from numba's cache) when they are first launched, and launched on torch's current stream.

A launch takes addresses and numbers, never tensors: no conversion, no reference, nothing that waits for the device. Whoever launches sees to it that
the tensors are contiguous and live until then; torch's allocator keeps memory in the order of the stream. Before a CUDA graph is captured
each kernel has to have been launched once.
"""

import importlib
import pkgutil
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import torch
from numba import cuda, types

import hpczero_kernels.cuda
from hpczero_kernels.registry import SIMULATED

if not SIMULATED:
    if getattr(cuda, "implementation", "") != "NVIDIA":
        raise ImportError(f"numba.cuda is numba's own ({cuda.__file__}): the package numba-cuda is missing, or shadowed on the path")
    from numba.cuda import dispatcher

    dispatcher.config.CUDA_LOW_OCCUPANCY_WARNINGS = 0  # a small tensor is no mistake

THREADS = 256  # of a block, unless the kernel has a reason
ADDRESS, COUNT, WORD, CODE, NUMBER = types.CPointer(types.uint8), types.uint64, types.uint32, types.int32, types.float32
Size = tuple[int, int]


class Kernel:
    """`registers`: at most so many for each thread."""

    def __init__(self, function: Callable[..., None], signature: tuple[Any, ...], registers: int | None) -> None:
        self.function, self.signature, self.registers = function, signature, registers
        self.name = f"{function.__module__.rpartition('.')[2]}.{function.__name__}"
        self._compiled: Any = None

    def launch(self, grid: Size, threads: int, *arguments: int | float) -> None:
        """`grid`: blocks along x and y; a grid without a block does nothing."""
        if not (grid[0] and grid[1]):
            return
        compiled = self._compiled or self.compile()
        if SIMULATED:
            compiled[grid, threads](*arguments)
        else:
            compiled[grid, threads, _stream(torch.cuda.current_stream().cuda_stream)](*arguments)

    def compile(self) -> Any:
        """For the current device; fills numba's cache."""
        if SIMULATED:
            self._compiled = cuda.jit(self.function)
        else:
            options = {"max_registers": self.registers} if self.registers else {}
            self._compiled = cuda.jit(types.void(*self.signature), cache=True, **options)(self.function)
        return self._compiled

    def ptx(self, capability: tuple[int, int]) -> str:
        """What it is compiled to for a device of this compute capability; none needs to be here."""
        text, _ = cuda.compile(self.function, types.void(*self.signature), cc=capability, device=False, abi="numba", output="ptx")
        return str(text)


def kernel(*signature: Any, registers: int | None = None) -> Callable[[Callable[..., None]], Kernel]:
    def decorate(function: Callable[..., None]) -> Kernel:
        return Kernel(function, signature, registers)

    return decorate


def all_kernels() -> Iterator[Kernel]:
    """Of all modules of this package."""
    for module in pkgutil.iter_modules(hpczero_kernels.cuda.__path__):
        for value in vars(importlib.import_module(f"hpczero_kernels.cuda.{module.name}")).values():
            if isinstance(value, Kernel):
                yield value


def aligned(*tensors: torch.Tensor | None) -> int:
    """Whether 128-bit accesses fit the first elements of all of them."""
    return int(all(tensor is None or tensor.data_ptr() % 16 == 0 for tensor in tensors))


def rows_aligned(columns: int, *tensors: torch.Tensor | None) -> int:
    """Whether they fit the first elements of all rows."""
    return int(columns % 8 == 0 and bool(aligned(*tensors)))


def address_of(tensor: torch.Tensor | None) -> int:
    """0: there is none."""
    return 0 if tensor is None else tensor.data_ptr()


def blocks(count: int, each: int) -> int:
    return -(-count // each)


@lru_cache(maxsize=64)
def _stream(pointer: int) -> Any:
    return cuda.external_stream(pointer)
