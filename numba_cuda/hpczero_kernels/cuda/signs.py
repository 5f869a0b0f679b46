"""Messages of signs (`hpczero_kernels.signs`).

A block of threads has one block of signs, a thread one byte: eight elements.
"""

from numba import float32, uint32, uint64
from torch import Tensor

from hpczero_kernels.cpu import FP32
from hpczero_kernels.cuda.intrinsics import (
    bits_of,
    block_sums,
    inner,
    load1,
    moved,
    number_of,
    store1,
)
from hpczero_kernels.cuda.launch import (
    ADDRESS,
    CODE,
    COUNT,
    NUMBER,
    THREADS,
    address_of,
    aligned,
    kernel,
)
from hpczero_kernels.cuda.target import cuda
from hpczero_kernels.cuda.vectors import (
    EIGHT,
    element,
    fetch,
    own_column,
    put_element,
    store,
    widen,
)
from hpczero_kernels.message_sizes import SIGN_BLOCK, sign_blocks

assert THREADS * EIGHT == SIGN_BLOCK


@inner
def _signed(scale, sign):
    """Return a scale, which is not negative, with a sign: the highest bit of a word."""
    return number_of(uint32(bits_of(scale) | uint32(sign & uint32(0x80000000))))


@kernel(ADDRESS, ADDRESS, ADDRESS, CODE, ADDRESS, ADDRESS, COUNT, CODE)
def pack(values, error, variance, has_variance, packed, scales, count, is_aligned):
    words = cuda.local.array(EIGHT, uint32)
    more = cuda.local.array(EIGHT, uint32)
    variances = cuda.local.array(EIGHT, uint32)
    total = cuda.local.array(EIGHT, float32)
    others = cuda.local.array(EIGHT, float32)
    living = cuda.local.array(EIGHT, float32)  # 1 or 0
    index = own_column()
    left = count - index if index < count else uint64(0)
    fetch(words, values, FP32, index, left, is_aligned)
    fetch(more, error, FP32, index, left, is_aligned)
    if has_variance:
        fetch(variances, variance, FP32, index, left, is_aligned)
        widen(living, variances, FP32)
        for i in range(EIGHT):
            living[i] = float32(1.0) if living[i] != float32(0.0) else float32(0.0)
    else:
        for i in range(EIGHT):
            living[i] = float32(1.0) if uint64(i) < left else float32(0.0)
    widen(total, words, FP32)
    widen(others, more, FP32)
    magnitude = float32(0.0)
    lives = float32(0.0)
    signs = uint32(0)
    for i in range(EIGHT):
        total[i] = total[i] + others[i] if living[i] != float32(0.0) else float32(0.0)
        magnitude += abs(total[i])
        lives += living[i]
        signs = uint32(signs | uint32(uint32(bits_of(total[i]) >> uint32(31)) << uint32(i)))
    magnitude, lives = block_sums(magnitude, lives)
    scale = magnitude / max(lives, float32(1.0))
    for i in range(EIGHT):
        sent = _signed(scale, bits_of(total[i]))
        total[i] = total[i] - sent if living[i] != float32(0.0) else float32(0.0)
    if left:
        store(total, error, FP32, index, left, is_aligned)
        store1(packed, index // uint64(EIGHT), signs)
    if cuda.threadIdx.x == 0:
        put_element(scales, FP32, uint64(cuda.blockIdx.x), scale)


@kernel(
    ADDRESS, COUNT, ADDRESS, COUNT, CODE, NUMBER, ADDRESS, CODE, ADDRESS, COUNT, CODE
)  # fmt: skip
def average(
    packed, row, scales, scales_row, workers, factor, variance, has_variance, values, count,
    is_aligned,
):  # fmt: skip
    """Average eight elements per thread; a row is the bytes from a worker's to the next one's."""
    words = cuda.local.array(EIGHT, uint32)
    variances = cuda.local.array(EIGHT, float32)
    total = cuda.local.array(EIGHT, float32)
    index = own_column()
    if index >= count:
        return
    left = count - index
    for i in range(EIGHT):
        words[i] = uint32(0x3F800000)  # 1
        total[i] = float32(0.0)
    if has_variance:
        fetch(words, variance, FP32, index, left, is_aligned)
    widen(variances, words, FP32)
    for worker in range(workers):
        signs = load1(packed, uint64(worker) * row + index // uint64(EIGHT))
        scales_of_worker = moved(scales, uint64(worker) * scales_row)
        scale = element(scales_of_worker, FP32, uint64(cuda.blockIdx.x))
        for i in range(EIGHT):
            total[i] += _signed(scale, uint32(signs << uint32(31 - i)))
    for i in range(EIGHT):
        total[i] = total[i] * factor if variances[i] != float32(0.0) else float32(0.0)
    store(total, values, FP32, index, left, is_aligned)


def pack_signs(
    values: Tensor, error: Tensor, variance: Tensor | None, packed: Tensor, scales: Tensor
) -> None:
    """Carry out hpczero_kernels.signs.pack_signs on a GPU."""
    count = values.numel()
    pack.launch(
        (sign_blocks(count), 1), THREADS,
        values.data_ptr(), error.data_ptr(), address_of(variance), variance is not None,
        packed.data_ptr(), scales.data_ptr(), count, aligned(values, error, variance),
    )  # fmt: skip


def unpack_signs(packed: Tensor, scales: Tensor, variance: Tensor | None, values: Tensor) -> None:
    """Carry out hpczero_kernels.signs.unpack_signs on a GPU."""
    _average(packed.unsqueeze(0), scales.unsqueeze(0), variance, values)


def average_signs(packed: Tensor, scales: Tensor, values: Tensor) -> None:
    """Carry out hpczero_kernels.signs.average_signs on a GPU."""
    _average(packed, scales, None, values)


def _average(packed: Tensor, scales: Tensor, variance: Tensor | None, values: Tensor) -> None:
    count = values.numel()
    workers = len(packed)
    average.launch(
        (sign_blocks(count), 1), THREADS,
        packed.data_ptr(), packed.stride(0), scales.data_ptr(), 4 * scales.stride(0),
        workers, 1 / workers, address_of(variance), variance is not None,
        values.data_ptr(), count, aligned(values, variance),
    )  # fmt: skip
