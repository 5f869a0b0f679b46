"""Eight neighbouring elements of a tensor of any precision: as they lie in memory (words), and as fp32 numbers.

Words and numbers are the caller's local arrays of eight: the loops over them are unrolled, and they end in registers (the tests look at that).
A precision is an argument, not a type (`precision.CODES`): every kernel has one signature, so that caches cannot mix up two of them, and all
threads take the same way. Words are fetched before anything is computed, so that a thread's accesses are under way together.
"""

from numba import float32, uint32, uint64

from hpczero_kernels.cpu import BF16, FP32
from hpczero_kernels.cuda.intrinsics import (
    WARP,
    bits_of,
    from_fp16x2,
    inner,
    load2,
    load4,
    load16,
    number_of,
    store2,
    store4,
    store16,
    to_bf16x2,
    to_fp16x2,
)  # fmt: skip
from hpczero_kernels.cuda.launch import THREADS, Size, blocks
from hpczero_kernels.cuda.target import cuda

EIGHT = 8


@inner
def fetch(words, address, precision, index, left, aligned):
    """words become those of elements index .. index + 7, zeros from the `left`-th on. `aligned`: 128-bit accesses fit (element 0 and index do)."""
    size = uint64(4) if precision == FP32 else uint64(2)
    if aligned and left >= uint64(EIGHT):
        words[0], words[1], words[2], words[3] = load16(address, index * size)
        if precision == FP32:
            words[4], words[5], words[6], words[7] = load16(address, index * size + uint64(16))
    elif precision == FP32:
        for i in range(EIGHT):
            words[i] = load4(address, (index + uint64(i)) * size) if uint64(i) < left else uint32(0)
    else:
        for i in range(EIGHT // 2):
            low = (
                load2(address, (index + uint64(2 * i)) * size)
                if uint64(2 * i) < left
                else uint32(0)
            )
            high = (
                load2(address, (index + uint64(2 * i + 1)) * size)
                if uint64(2 * i + 1) < left
                else uint32(0)
            )
            words[i] = uint32(low | uint32(high << uint32(16)))


@inner
def put(words, address, precision, index, left, aligned):
    """As fetch, into memory."""
    size = uint64(4) if precision == FP32 else uint64(2)
    if aligned and left >= uint64(EIGHT):
        store16(address, index * size, (words[0], words[1], words[2], words[3]))
        if precision == FP32:
            store16(address, index * size + uint64(16), (words[4], words[5], words[6], words[7]))
    elif precision == FP32:
        for i in range(EIGHT):
            if uint64(i) < left:
                store4(address, (index + uint64(i)) * size, words[i])
    else:
        for i in range(EIGHT):
            if uint64(i) < left:
                store2(
                    address,
                    (index + uint64(i)) * size,
                    uint32(words[i // 2] >> uint32(16 * (i % 2))),
                )


@inner
def widen(numbers, words, precision):
    """numbers become those that words stand for."""
    if precision == FP32:
        for i in range(EIGHT):
            numbers[i] = number_of(words[i])
    elif precision == BF16:
        for i in range(EIGHT // 2):
            numbers[2 * i], numbers[2 * i + 1] = _low(words[i]), _high(words[i])
    else:
        for i in range(EIGHT // 2):
            numbers[2 * i], numbers[2 * i + 1] = from_fp16x2(words[i])


@inner
def narrow(words, numbers, precision):
    """words become those of numbers, rounded to nearest, ties to even."""
    if precision == FP32:
        for i in range(EIGHT):
            words[i] = bits_of(numbers[i])
    elif precision == BF16:
        for i in range(EIGHT // 2):
            words[i] = to_bf16x2(numbers[2 * i], numbers[2 * i + 1])
    else:
        for i in range(EIGHT // 2):
            words[i] = to_fp16x2(numbers[2 * i], numbers[2 * i + 1])


@inner
def element(address, precision, index):
    """One element as a number."""
    if precision == FP32:
        return number_of(load4(address, index * uint64(4)))
    half = load2(address, index * uint64(2))
    return _low(half) if precision == BF16 else from_fp16x2(half)[0]


@inner
def put_element(address, precision, index, number):
    if precision == FP32:
        store4(address, index * uint64(4), bits_of(number))
    else:
        nothing = float32(0.0)
        store2(
            address,
            index * uint64(2),
            to_bf16x2(number, nothing) if precision == BF16 else to_fp16x2(number, nothing),
        )


@inner
def whole_number(address, index):
    """One element of an int64 tensor, as uint64: negative ones are large."""
    low, high = load4(address, index * uint64(8)), load4(address, index * uint64(8) + uint64(4))
    return uint64(low) | uint64(high) << uint64(32)


@inner
def _low(word):
    return number_of(uint32(word << uint32(16)))


@inner
def _high(word):
    return number_of(uint32(word & uint32(0xFFFF0000)))


# How operations on each column alone are laid out: a block of threads has a tile of columns, and takes every so many-th row of them.
#
# A thread has eight neighbouring columns, so that what belongs to a column (a bias, the sum that is its gradient) stays in its registers.
_ROWS = 4  # of a block, where nothing is summed over rows
_MOST = 65535  # blocks along y
_BLOCKS = (
    528  # where something is: four for each multiprocessor of the largest GPUs, the same everywhere
)


@inner
def own_column():
    """The first of a thread's eight columns."""
    return (uint64(cuda.blockIdx.x) * uint64(cuda.blockDim.x) + uint64(cuda.threadIdx.x)) * uint64(
        EIGHT
    )


def threads_for(columns: int) -> int:
    return min(THREADS, WARP * blocks(max(1, columns), WARP * EIGHT))


def grid_over(rows: int, columns: int) -> Size:
    return blocks(columns, threads_for(columns) * EIGHT), min(_MOST, blocks(rows, _ROWS))


def grid_with_sums(rows: int, columns: int) -> Size:
    across = blocks(columns, threads_for(columns) * EIGHT)
    return across, min(rows, blocks(_BLOCKS, max(1, across)))
