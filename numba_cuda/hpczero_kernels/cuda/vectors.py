"""Vectors of eight neighbouring elements of any precision: words as in memory, or fp32 numbers.

Words and numbers are local arrays of eight. The loops over them are unrolled, and the arrays end in
registers; the tests check that. A precision is an argument, not a type (`cpu.CODES`): every kernel
has one signature, so that caches cannot mix up two of them, and all threads take the same branch.
Words are fetched before anything is computed, so that a thread's accesses are in flight together.
"""

import torch
from numba import float32, uint32, uint64

from hpczero_kernels.cpu import BF16, CODES, FP32
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
)
from hpczero_kernels.cuda.launch import THREADS, Size, blocks
from hpczero_kernels.cuda.target import cuda

EIGHT = 8
NO_WEIGHTS = -1  # the precision of a tensor that is none


@inner
def fetch(words, address, precision, index, left, aligned):
    """Set words to those of elements index .. index + 7, and to zeros from the `left`-th on.

    `aligned`: element 0 and this one lie at multiples of 16 bytes, so that 128-bit accesses fit.
    """
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
            low = uint32(0)
            high = uint32(0)
            if uint64(2 * i) < left:
                low = load2(address, (index + uint64(2 * i)) * size)
            if uint64(2 * i + 1) < left:
                high = load2(address, (index + uint64(2 * i + 1)) * size)
            words[i] = uint32(low | uint32(high << uint32(16)))


@inner
def put(words, address, precision, index, left, aligned):
    """Write words to elements index .. index + 7, of which `left` exist; the inverse of fetch."""
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
                half = uint32(words[i // 2] >> uint32(16 * (i % 2)))
                store2(address, (index + uint64(i)) * size, half)


@inner
def widen(numbers, words, precision):
    """Set numbers to the values of words."""
    if precision == FP32:
        for i in range(EIGHT):
            numbers[i] = number_of(words[i])
    elif precision == BF16:
        for i in range(EIGHT // 2):
            numbers[2 * i] = _low(words[i])
            numbers[2 * i + 1] = _high(words[i])
    else:
        for i in range(EIGHT // 2):
            numbers[2 * i], numbers[2 * i + 1] = from_fp16x2(words[i])


@inner
def narrow(words, numbers, precision):
    """Set words to those of numbers, rounded to nearest, ties to even."""
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
def load(numbers, address, precision, index, left, aligned):
    """Fetch and widen; a kernel that reads several vectors fetches all of them before it widens."""
    words = cuda.local.array(EIGHT, uint32)
    fetch(words, address, precision, index, left, aligned)
    widen(numbers, words, precision)


@inner
def store(numbers, address, precision, index, left, aligned):
    """Narrow and put."""
    words = cuda.local.array(EIGHT, uint32)
    narrow(words, numbers, precision)
    put(words, address, precision, index, left, aligned)


@inner
def element(address, precision, index):
    """Return one element as a number."""
    if precision == FP32:
        return number_of(load4(address, index * uint64(4)))
    half = load2(address, index * uint64(2))
    return _low(half) if precision == BF16 else from_fp16x2(half)[0]


@inner
def scalar(scalars, number):
    """Return a number of an fp32 tensor."""
    return number_of(load4(scalars, uint64(4 * number)))


@inner
def put_element(address, precision, index, number):
    if precision == FP32:
        store4(address, index * uint64(4), bits_of(number))
    else:
        zero = float32(0.0)
        half = to_bf16x2(number, zero) if precision == BF16 else to_fp16x2(number, zero)
        store2(address, index * uint64(2), half)


@inner
def whole_number(address, index):
    """Return one element of an int64 tensor as uint64; negative ones are large."""
    low = load4(address, index * uint64(8))
    high = load4(address, index * uint64(8) + uint64(4))
    return uint64(low) | uint64(high) << uint64(32)


@inner
def _low(word):
    return number_of(uint32(word << uint32(16)))


@inner
def _high(word):
    return number_of(uint32(word & uint32(0xFFFF0000)))


# Grids of operations on each column alone
#
# A block of threads has a tile of columns, and takes rows at a stride of the grid's height. A
# thread has eight neighbouring columns, so that a column's bias, or the sum that is its gradient,
# stays in the thread's registers.
_ROWS = 4  # rows of a block, where nothing is summed over rows
_MOST_BLOCKS = 65535  # along y
_SUM_BLOCKS = 528  # of sums over rows: four per multiprocessor of the largest GPUs, on all GPUs


@inner
def own_column():
    """Return the first of this thread's eight columns."""
    thread = uint64(cuda.blockIdx.x) * uint64(cuda.blockDim.x) + uint64(cuda.threadIdx.x)
    return thread * uint64(EIGHT)


def to_write(tensor: torch.Tensor | None) -> tuple[int, int]:
    """Return the address and the precision of a tensor that a kernel may write; NO_WEIGHTS."""
    return (0, NO_WEIGHTS) if tensor is None else (tensor.data_ptr(), CODES[tensor.dtype])


def threads_for(columns: int, most: int = THREADS) -> int:
    return min(most, WARP * blocks(max(1, columns), WARP * EIGHT))


def grid_over(rows: int, columns: int) -> Size:
    return blocks(columns, threads_for(columns) * EIGHT), min(_MOST_BLOCKS, blocks(rows, _ROWS))


def grid_with_sums(rows: int, columns: int) -> Size:
    across = blocks(columns, threads_for(columns) * EIGHT)
    return across, min(rows, blocks(_SUM_BLOCKS, max(1, across)))
