"""Kernels of one signature: compiled (or loaded from numba's cache) when they are first launched, and launched on torch's current stream.

A launch takes addresses and numbers, never tensors: no conversion, no reference, nothing that waits for the device. Whoever launches sees to it that
the tensors are contiguous and live until then; torch's allocator keeps memory in the order of the stream. Before a CUDA graph is captured
each kernel has to have been launched once.
"""

import importlib
import pkgutil
import threading
from collections.abc import Callable, Iterator
from ctypes import c_float, c_int32, c_uint32, c_uint64
from functools import lru_cache
from typing import Any

import torch
from numba import types

import hpczero_kernels.cuda
from hpczero_kernels.cpu import named_by_sources
from hpczero_kernels.cuda.target import cuda
from hpczero_kernels.dispatch import SIMULATED

if not SIMULATED:
    from cuda.core import LaunchConfig, Stream, launch

THREADS = 256  # of a block, unless the kernel has a reason
ADDRESS, COUNT, WORD, CODE, NUMBER = (
    types.CPointer(types.uint8),
    types.uint64,
    types.uint32,
    types.int32,
    types.float32,
)
Size = tuple[int, int]
_ARGUMENTS: dict[Any, Any] = {
    ADDRESS: int,
    COUNT: c_uint64,
    WORD: c_uint32,
    CODE: c_int32,
    NUMBER: c_float,
}


class Kernel:
    """`registers`: at most so many for each thread."""

    def __init__(
        self, function: Callable[..., None], signature: tuple[Any, ...], registers: int | None
    ) -> None:
        self.function, self.signature, self.registers = function, signature, registers
        self.name = f"{function.__module__.rpartition('.')[2]}.{function.__name__}"
        self._converts = tuple(_ARGUMENTS[kind] for kind in signature)
        self._loaded: Any = None
        self._device = -1

    def launch(self, grid: Size, threads: int, *arguments: int | float) -> None:
        """`grid`: blocks along x and y; a grid without a block does nothing."""
        if not (grid[0] and grid[1]):
            return
        if SIMULATED:
            self.compile()[grid, threads](*arguments)
            return
        if self._loaded is None:
            self._load()
        stream = torch.cuda.current_stream()
        if stream.device_index != self._device:
            raise RuntimeError(
                f"{self.name} was loaded for GPU {self._device} and is asked for on {stream.device_index}: a process has one GPU"
            )
        converted = [
            convert(argument) for convert, argument in zip(self._converts, arguments, strict=True)
        ]
        launch(_STREAMS.of(stream.cuda_stream), _shape(grid, threads), self._loaded, *converted)

    def compile(self) -> Any:
        """For the current device; fills numba's cache."""
        if SIMULATED:
            return cuda.jit(self.function)
        options = {"max_registers": self.registers} if self.registers else {}
        # not by LTO, which would be taken or not by what is installed: what runs is the PTX that the tests look at
        return cuda.jit(types.void(*self.signature), cache=True, lto=False, **options)(
            named_by_sources(self.function)
        )

    def _load(self) -> None:
        """numba's own launch converts each argument by asking for its type: 10 to 20 microseconds, most of a launch. What it ends in is called
        directly.
        """
        (compiled,) = self.compile().overloads.values()
        self._loaded, self._device = (
            compiled._codelibrary.get_cufunc().kernel,
            torch.cuda.current_device(),
        )

    def ptx(self, capability: tuple[int, int]) -> str:
        """What it is compiled to for a device of this compute capability; none needs to be here."""
        text, _ = cuda.compile(
            self.function,
            types.void(*self.signature),
            cc=capability,
            device=False,
            abi="numba",
            output="ptx",
        )
        return str(text)


def kernel(
    *signature: Any, registers: int | None = None
) -> Callable[[Callable[..., None]], Kernel]:
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


def contiguous(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.contiguous()


def blocks(count: int, each: int) -> int:
    return -(-count // each)


class Streams(threading.local):
    """torch's, as a launch takes them, made anew in every thread: making one makes the device's context the thread's. A launch on the default stream
    needs that, and in a thread of autograd a kernel of ours may be the first to call CUDA: torch sets a device there only if it is not the first.
    """

    def __init__(self, make: Callable[[int], Any]) -> None:
        self._make, self._made = make, dict[int, Any]()

    def of(self, pointer: int) -> Any:
        if pointer not in self._made:
            self._made[pointer] = self._make(pointer)
        return self._made[pointer]


def _stream(pointer: int) -> Any:
    cuda.current_context()  # is the thread's from now on
    return Stream.from_handle(pointer)


_STREAMS = Streams(_stream)


@lru_cache(maxsize=1024)
def _shape(grid: Size, threads: int) -> Any:
    return LaunchConfig(grid=(*grid, 1), block=(threads, 1, 1))
