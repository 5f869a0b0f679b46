"""Common parts of the CPU kernels: elements of any precision as fp32, threads, names of kernels.

A stretch is an fp32 array of a few hundred elements that stays in a core's nearest cache; kernels
load flat tensors of any precision into it and store them from it. Kernels reach tensors by
address, so that a tensor's precision and the number of tensors are arguments and not types: every
kernel is compiled once.

numba has neither bf16 nor fp16: both are handled as bits, by integer arithmetic that gives the same
result on every CPU. Rounding is to nearest, ties to even; infinities and NaN stay as they are.
Shifts of a uint32 would promote it to uint64, hence the many uint32(...).

The functions are written out, not made by a function. numba gives two closures of one name the same
symbol in the caches of two kernels; a process that loads both caches would run one closure in
place of the other.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from functools import cache
from types import TracebackType
from typing import Self

import torch
from llvmlite import ir
from numba import float32, njit, types, uint16, uint32, uint64
from numba.extending import intrinsic

from hpczero_kernels.sources import named_by_sources

FP32, BF16, FP16 = 0, 1, 2
STRETCH = 256  # elements: the end of a stretch and the reading of the next overlap
CODES = {torch.float32: FP32, torch.bfloat16: BF16, torch.float16: FP16}

# Indices of the scalars of an AdamW step (`adamw.AdamWScalars`), for its kernels on any device.
GRADIENT_SCALE, BETA1, ONE_MINUS_BETA1, BETA2, ONE_MINUS_BETA2 = range(5)
EPS, LR, STEP_SIZE, MOMENT1_SCALE, MOMENT2_SCALE, SKIP = range(5, 11)

inner = njit(error_model="numpy", nogil=True)  # compiled into the kernels that call it


def kernel(signature: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorate a kernel for CPUs: for arguments of these types it is compiled at once, or read from
    the folder in which numba keeps it.
    """

    def compile_now(function: Callable[..., None]) -> Callable[..., None]:
        options = njit(signature, nogil=True, cache=True, error_model="numpy")
        return options(named_by_sources(function))

    return compile_now


def address_of(tensor: torch.Tensor) -> int:
    assert tensor.is_contiguous(), tensor.stride()
    assert tensor.device.type == "cpu", tensor.device
    return tensor.data_ptr()


@intrinsic
def bits_as(context, value, to):
    """Return the bits of a value as another type of the same size."""

    def generate(context, builder, signature, arguments):
        return builder.bitcast(arguments[0], context.get_value_type(signature.return_type))

    return to.instance_type(value, to), generate


@intrinsic
def pointer(context, address, to):
    """Return an address as a pointer to a type."""

    def generate(context, builder, signature, arguments):
        return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

    return types.CPointer(to.instance_type)(types.uint64, to), generate


@intrinsic
def address_in(context, place):
    """Return a pointer as an address; the inverse of `pointer`."""

    def generate(context, builder, signature, arguments):
        return builder.ptrtoint(arguments[0], context.get_value_type(types.uint64))

    return types.uint64(place), generate


@intrinsic
def from_element(context, place, index):
    """Return the pointer that is so many elements behind a pointer."""

    def generate(context, builder, signature, arguments):
        return builder.gep(arguments[0], [arguments[1]])

    return place(place, types.uint64), generate


@intrinsic(prefer_literal=True)
def scratch(context, size, to):
    """Return a pointer to so many elements (a constant) on the stack of the calling kernel.

    Functions take it in place of an array. A kernel's arrays are counted each time that a function
    gets one and is not compiled into it, which costs as much as a hundred elements.
    """

    def generate(context, builder, signature, arguments):
        element = context.get_value_type(to.instance_type)
        with builder.goto_entry_block():
            room = builder.alloca(ir.ArrayType(element, size.literal_value))
            room.align = 64
        return builder.bitcast(room, element.as_pointer())

    if isinstance(size, types.IntegerLiteral):
        return types.CPointer(to.instance_type)(size, to), generate
    return None


@inner
def from_bf16(bits):
    return bits_as(uint32(uint32(bits) << uint32(16)), float32)


@inner
def to_bf16(value):
    bits = bits_as(value, uint32)
    rounded = uint32(
        uint32(bits + uint32(0x7FFF) + uint32(uint32(bits >> uint32(16)) & uint32(1))) >> uint32(16)
    )
    return uint16(rounded if value == value else uint32(0x7FC0))


@inner
def from_fp16(bits):
    """Move the fields to their places in an fp32.

    A product with 2^112 rebiases the exponent and makes subnormal values normal.
    """
    magnitude = uint32(uint32(bits & uint16(0x7FFF)) << uint32(13))
    value = bits_as(bits_as(magnitude, float32) * float32(2.0**112), uint32)
    special = uint32(0x7F800000) if magnitude >= uint32(0x7C00 << 13) else uint32(0)
    return bits_as(
        uint32(value | special | uint32(uint32(bits & uint16(0x8000)) << uint32(16))), float32
    )


@inner
def to_fp16(value):
    """Round to fp16.

    Below the smallest normal fp16, adding 1/2 makes the addition round at the last bit of a
    subnormal one.
    """
    bits = bits_as(value, uint32)
    magnitude = uint32(bits & uint32(0x7FFFFFFF))
    odd = uint32(uint32(magnitude >> uint32(13)) & uint32(1))
    normal = uint32(uint32(magnitude - uint32(112 << 23) + uint32(0xFFF) + odd) >> uint32(13))
    subnormal = uint32(
        bits_as(bits_as(magnitude, float32) + float32(0.5), uint32) - uint32(126 << 23)
    )
    finite = normal if magnitude >= uint32(113 << 23) else subnormal
    special = uint32(0x7C00) if value == value else uint32(0x7E00)
    rounded = finite if magnitude < uint32(143 << 23) else special
    return uint16(rounded | uint32(uint32(bits >> uint32(16)) & uint32(0x8000)))


@inner
def load(stretch, size, address, precision, start):
    """Set stretch[:size] to the elements of the tensor from `start` on."""
    singles = pointer(address + uint64(4) * start, float32)
    halves = pointer(address + uint64(2) * start, uint16)
    if precision == FP32:
        for i in range(size):
            stretch[i] = singles[i]
    elif precision == BF16:
        for i in range(size):
            stretch[i] = from_bf16(halves[i])
    else:
        for i in range(size):
            stretch[i] = from_fp16(halves[i])


@inner
def load_sum(stretch, size, one, other, precision, start):
    """Set stretch[:size] to the sums of two tensors' elements from `start` on."""
    singles = pointer(one + uint64(4) * start, float32)
    other_singles = pointer(other + uint64(4) * start, float32)
    halves = pointer(one + uint64(2) * start, uint16)
    other_halves = pointer(other + uint64(2) * start, uint16)
    if precision == FP32:
        for i in range(size):
            stretch[i] = singles[i] + other_singles[i]
    elif precision == BF16:
        for i in range(size):
            stretch[i] = from_bf16(halves[i]) + from_bf16(other_halves[i])
    else:
        for i in range(size):
            stretch[i] = from_fp16(halves[i]) + from_fp16(other_halves[i])


@inner
def add(stretch, size, address, precision, start):
    """Add the elements of the tensor from `start` on to stretch[:size]."""
    singles = pointer(address + uint64(4) * start, float32)
    halves = pointer(address + uint64(2) * start, uint16)
    if precision == FP32:
        for i in range(size):
            stretch[i] += singles[i]
    elif precision == BF16:
        for i in range(size):
            stretch[i] += from_bf16(halves[i])
    else:
        for i in range(size):
            stretch[i] += from_fp16(halves[i])


@inner
def store(stretch, size, address, precision, start):
    """Set the elements of the tensor from `start` on to stretch[:size], rounded."""
    singles = pointer(address + uint64(4) * start, float32)
    halves = pointer(address + uint64(2) * start, uint16)
    if precision == FP32:
        for i in range(size):
            singles[i] = stretch[i]
    elif precision == BF16:
        for i in range(size):
            halves[i] = to_bf16(stretch[i])
    else:
        for i in range(size):
            halves[i] = to_fp16(stretch[i])


@njit(error_model="numpy", nogil=True, fastmath={"reassoc", "contract"})
def store_and_square(stretch, size, address, precision, start):
    """Store as `store` does, and return the sum of squares of the stored elements.

    The compiler chooses the order, so that it can vectorise the sum; all calls have the same order.
    """
    singles = pointer(address + uint64(4) * start, float32)
    halves = pointer(address + uint64(2) * start, uint16)
    squares = float32(0.0)
    if precision == FP32:
        for i in range(size):
            singles[i] = stretch[i]
            squares += stretch[i] * stretch[i]
    elif precision == BF16:
        for i in range(size):
            bits = to_bf16(stretch[i])
            value = from_bf16(bits)
            halves[i] = bits
            squares += value * value
    else:
        for i in range(size):
            bits = to_fp16(stretch[i])
            value = from_fp16(bits)
            halves[i] = bits
            squares += value * value
    return squares


# Threads of one rank. Ranges are cut at multiples of BLOCK, so that the cut cannot change a result.
BLOCK = 4096  # elements: the range of one sum of squares, and the unit in which ranges are cut
_WORTH_A_THREAD = 16  # blocks: some 10 microseconds of work; handing it to a thread costs as much


def slices_of(
    count: int, most: int, block: int = BLOCK, least: int = _WORTH_A_THREAD
) -> list[tuple[int, int]]:
    """Cut range(count) into at most `most` (start, stop) of nearly equal length.

    They begin at multiples of `block`; there are fewer where one would have less than `least`
    blocks.
    """
    blocks = -(-count // block)
    parts = max(1, min(most, blocks // least))
    edges = [blocks * part // parts * block for part in range(parts)]
    return list(zip(edges, [*edges[1:], count], strict=True))


class Pool:
    """Pool of `threads` threads, the calling one included, for kernels that release the GIL."""

    def __init__(self, threads: int) -> None:
        assert threads >= 1, threads
        self.threads = threads
        self._others = ThreadPoolExecutor(threads - 1, "hpczero-kernel") if threads > 1 else None

    def run(
        self,
        kernel: Callable[[int, int], None],
        count: int,
        block: int = BLOCK,
        least: int = _WORTH_A_THREAD,
    ) -> None:
        """Call kernel(start, stop) for the slices that `slices_of` makes of range(count).

        An exception of a slice is raised here, after all slices have ended.
        """
        if self._others is None:
            kernel(0, count)
            return
        first, *others = slices_of(count, self.threads, block, least)
        futures = [self._others.submit(kernel, *bounds) for bounds in others]
        try:
            kernel(*first)
        finally:
            wait(futures)
        for future in futures:
            future.result()

    def run_rows(
        self, kernel: Callable[[int, int], None], rows: int, columns: int, block: int = 1
    ) -> None:
        """Call kernel(start, stop) for slices of so many rows, cut at multiples of `block`."""
        worth = _WORTH_A_THREAD * BLOCK // max(1, block * columns)
        self.run(kernel, rows, block, max(1, worth))

    def close(self) -> None:
        """End the threads; a pool of one has none to end."""
        if self._others:
            self._others.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


INLINE = Pool(1)  # the calling thread alone


def pool_of_torch() -> Pool:
    """Return a pool of as many threads as PyTorch's operations have, for models' operations."""
    return _pool(torch.get_num_threads())


@cache
def _pool(threads: int) -> Pool:
    return Pool(threads)
