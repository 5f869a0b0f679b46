"""CUDA kernels of one signature, launched on torch's current stream.

A kernel is compiled, or loaded from numba's cache, when it is first launched. A launch takes
addresses and numbers, never tensors: no conversion, no reference, no wait for the device. The
caller ensures that the tensors are contiguous and live until then; torch's allocator reuses memory
in the order of the stream. Launch each kernel once before capturing a CUDA graph.
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
from hpczero_kernels.cuda.target import cuda
from hpczero_kernels.dispatch import SIMULATED
from hpczero_kernels.sources import named_by_sources

if not SIMULATED:
    from cuda.core import LaunchConfig, Stream, launch

THREADS = 256  # of a block, unless the kernel has a reason
ADDRESS = types.CPointer(types.uint8)
COUNT = types.uint64
WORD = types.uint32
CODE = types.int32
NUMBER = types.float32
Size = tuple[int, int]
_ARGUMENTS: dict[Any, Any] = {
    ADDRESS: int,
    COUNT: c_uint64,
    WORD: c_uint32,
    CODE: c_int32,
    NUMBER: c_float,
}


class Kernel:
    """CUDA kernel with its signature; `registers` limits the registers of a thread."""

    def __init__(
        self, function: Callable[..., None], signature: tuple[Any, ...], registers: int | None
    ) -> None:
        self.function = function
        self.signature = signature
        self.registers = registers
        self.name = f"{function.__module__.rpartition('.')[2]}.{function.__name__}"
        self._converts = tuple(_ARGUMENTS[kind] for kind in signature)
        self._loaded: Any = None
        self._device = -1

    def launch(self, grid: Size, threads: int, *arguments: int | float) -> None:
        """Launch `grid` blocks (along x and y); a grid without a block does nothing."""
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
                f"{self.name} was loaded for GPU {self._device} and is asked for on"
                f" {stream.device_index}: a process has one GPU"
            )
        converted = [
            convert(argument) for convert, argument in zip(self._converts, arguments, strict=True)
        ]
        launch(_STREAMS.of(stream.cuda_stream), _shape(grid, threads), self._loaded, *converted)

    def compile(self) -> Any:
        """Compile for the current device; this fills numba's cache."""
        if SIMULATED:
            return cuda.jit(self.function)
        options = {"max_registers": self.registers} if self.registers else {}
        # Without LTO, which numba uses or not by the packages installed: the PTX that the tests
        # check is the code that runs.
        decorate = cuda.jit(types.void(*self.signature), cache=True, lto=False, **options)
        return decorate(named_by_sources(self.function))

    def _load(self) -> None:
        """Load the kernel as an object of cuda.core.

        numba's own launch converts each argument by asking for its type: 10 to 20 microseconds,
        most of a launch.
        """
        (compiled,) = self.compile().overloads.values()
        self._loaded = compiled._codelibrary.get_cufunc().kernel
        self._device = torch.cuda.current_device()

    def ptx(self, capability: tuple[int, int]) -> str:
        """Return the kernel's PTX for a device of this compute capability; no device is needed."""
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
    """Yield the kernels of all modules of this package."""
    for info in pkgutil.iter_modules(hpczero_kernels.cuda.__path__):
        module = importlib.import_module(f"hpczero_kernels.cuda.{info.name}")
        for value in vars(module).values():
            if isinstance(value, Kernel):
                yield value


def aligned(*tensors: torch.Tensor | None) -> int:
    """Return 1 if 128-bit accesses fit the first elements of all tensors, else 0."""
    return int(all(tensor is None or tensor.data_ptr() % 16 == 0 for tensor in tensors))


def rows_aligned(columns: int, *tensors: torch.Tensor | None) -> int:
    """Return 1 if 128-bit accesses fit the first elements of all rows, else 0."""
    return int(columns % 8 == 0 and bool(aligned(*tensors)))


def address_of(tensor: torch.Tensor | None) -> int:
    """Return the tensor's address, 0 without a tensor."""
    return 0 if tensor is None else tensor.data_ptr()


def contiguous(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.contiguous()


def blocks(count: int, size: int) -> int:
    return -(-count // size)


class Streams(threading.local):
    """torch's streams as a launch takes them, made anew in every thread.

    Making one makes the device's context current in the thread, which a launch on the default
    stream needs. In a thread of autograd a kernel of ours may be the first to call CUDA: torch sets
    a device there only if it is not the first device.
    """

    def __init__(self, make: Callable[[int], Any]) -> None:
        self._make = make
        self._made = dict[int, Any]()

    def of(self, pointer: int) -> Any:
        if pointer not in self._made:
            self._made[pointer] = self._make(pointer)
        return self._made[pointer]


def _stream(pointer: int) -> Any:
    cuda.current_context()  # makes it current in this thread
    return Stream.from_handle(pointer)


_STREAMS = Streams(_stream)


@lru_cache(maxsize=1024)
def _shape(grid: Size, threads: int) -> Any:
    return LaunchConfig(grid=(*grid, 1), block=(threads, 1, 1))
