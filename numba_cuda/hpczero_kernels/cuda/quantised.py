"""Messages of 8 or 4 bits an element (`hpczero_kernels.quantised`).

A warp has one block of elements with their scale, a thread eight elements.
"""

from numba import float32, int32, uint32, uint64
from torch import Tensor

from hpczero_kernels.cpu import CODES, FP32
from hpczero_kernels.cuda.intrinsics import (
    WARP,
    bits_of,
    inner,
    load1,
    load4,
    moved,
    number_of,
    product,
    store1,
    store4,
    warp_max,
)
from hpczero_kernels.cuda.launch import (
    ADDRESS,
    CODE,
    COUNT,
    NUMBER,
    THREADS,
    address_of,
    aligned,
    blocks,
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
from hpczero_kernels.message_sizes import MOST, QUANTISED_BLOCK, SMALLEST_SCALE

_INFINITE, _NAN = 0x7F800000, 0x7FC00000  # bits of an fp32
_SHIFT = 12582912.0  # 1.5 * 2^23: a number added to it is rounded to an integer
assert WARP * EIGHT == QUANTISED_BLOCK


@inner
def _scale_of(total, most):
    """Return the scale of a warp's elements."""
    largest = uint32(0)
    for i in range(EIGHT):
        largest = max(largest, uint32(bits_of(total[i]) & uint32(0x7FFFFFFF)))
    largest = warp_max(largest)
    scale = number_of(largest) / most
    if largest >= uint32(_INFINITE):
        return number_of(uint32(_NAN))
    return scale if scale >= float32(SMALLEST_SCALE) else float32(0.0)


@inner
def _put_codes(codes, packed, bits, index, left, is_aligned):
    """Store the lower bits of eight codes, of which `left` are of elements."""
    low = uint32(0)
    high = uint32(0)
    if bits == 8:
        for i in range(4):
            low = uint32(low | uint32(uint32(codes[i] & uint32(0xFF)) << uint32(8 * i)))
            high = uint32(high | uint32(uint32(codes[i + 4] & uint32(0xFF)) << uint32(8 * i)))
        if is_aligned and left >= uint64(EIGHT):
            store4(packed, index, low)
            store4(packed, index + uint64(4), high)
            return
        for i in range(EIGHT):
            if uint64(i) < left:
                store1(packed, index + uint64(i), codes[i])
        return
    for i in range(EIGHT):
        low = uint32(low | uint32(uint32(codes[i] & uint32(0xF)) << uint32(4 * i)))
    if is_aligned and left >= uint64(EIGHT):
        store4(packed, index // uint64(2), low)
        return
    for i in range(4):
        if uint64(2 * i) < left:
            store1(packed, index // uint64(2) + uint64(i), uint32(low >> uint32(8 * i)))


@inner
def _add_codes(total, packed, bits, index, left, is_aligned, scale):
    """Add what a message has of eight elements, of which `left` exist, to total."""
    low = uint32(0)
    high = uint32(0)
    if bits == 8:
        if is_aligned and left >= uint64(EIGHT):
            low = load4(packed, index)
            high = load4(packed, index + uint64(4))
        else:
            for i in range(4):
                if uint64(i) < left:
                    low = uint32(low | uint32(load1(packed, index + uint64(i)) << uint32(8 * i)))
                if uint64(i + 4) < left:
                    code = load1(packed, index + uint64(i + 4))
                    high = uint32(high | uint32(code << uint32(8 * i)))
        for i in range(4):
            total[i] += product(_integer(low, 8, i), scale)
            total[i + 4] += product(_integer(high, 8, i), scale)
        return
    if is_aligned and left >= uint64(EIGHT):
        low = load4(packed, index // uint64(2))
    else:
        for i in range(4):
            if uint64(2 * i) < left:
                pair = load1(packed, index // uint64(2) + uint64(i))
                low = uint32(low | uint32(pair << uint32(8 * i)))
    for i in range(EIGHT):
        total[i] += product(_integer(low, 4, i), scale)


@inner
def _integer(word, bits, number):
    """Return one of the integers in a word as a number."""
    half = 1 << (bits - 1)
    code = uint32(uint32(word >> uint32(bits * number)) & uint32(2 * half - 1))
    return float32(int32(int32(code ^ uint32(half)) - int32(half)))


@kernel(ADDRESS, CODE, ADDRESS, CODE, ADDRESS, ADDRESS, CODE, NUMBER, COUNT, CODE)
def pack(
    values, precision, error, has_error, packed, scales, bits, most, count, is_aligned
):  # fmt: skip
    words = cuda.local.array(EIGHT, uint32)
    more = cuda.local.array(EIGHT, uint32)
    codes = cuda.local.array(EIGHT, uint32)
    total = cuda.local.array(EIGHT, float32)
    errors = cuda.local.array(EIGHT, float32)
    index = own_column()
    left = count - index if index < count else uint64(0)
    fetch(words, values, precision, index, left, is_aligned)
    if has_error:
        fetch(more, error, FP32, index, left, is_aligned)
    widen(total, words, precision)
    if has_error:
        widen(errors, more, FP32)
        for i in range(EIGHT):
            total[i] += errors[i]
    scale = _scale_of(total, most)
    reciprocal = float32(1.0) / scale if scale > float32(0.0) else float32(0.0)
    for i in range(EIGHT):
        shifted = float32(_SHIFT)
        if scale > float32(0.0):
            shifted += product(total[i], reciprocal)
        codes[i] = bits_of(shifted)
        total[i] -= product(shifted - float32(_SHIFT), scale)
    if left:
        _put_codes(codes, packed, bits, index, left, is_aligned)
        if has_error:
            store(total, error, FP32, index, left, is_aligned)
        if index % uint64(QUANTISED_BLOCK) == uint64(0):
            put_element(scales, FP32, index // uint64(QUANTISED_BLOCK), scale)


@kernel(ADDRESS, COUNT, ADDRESS, COUNT, CODE, NUMBER, ADDRESS, CODE, CODE, COUNT, CODE, CODE)
def average(
    packed, row, scales, scales_row, workers, factor, values, precision, bits, count, is_aligned,
    rows_are_aligned,
):  # fmt: skip
    """Average eight elements per thread; a row is the bytes from a worker's to the next one's."""
    total = cuda.local.array(EIGHT, float32)
    index = own_column()
    if index >= count:
        return
    left = count - index
    for i in range(EIGHT):
        total[i] = float32(0.0)
    for worker in range(workers):
        codes = moved(packed, uint64(worker) * row)
        scales_of_worker = moved(scales, uint64(worker) * scales_row)
        scale = element(scales_of_worker, FP32, index // uint64(QUANTISED_BLOCK))
        _add_codes(total, codes, bits, index, left, rows_are_aligned, scale)
    for i in range(EIGHT):
        total[i] *= factor
    store(total, values, precision, index, left, is_aligned)


def quantise(
    values: Tensor, error: Tensor | None, packed: Tensor, scales: Tensor, bits: int
) -> None:
    """Carry out hpczero_kernels.quantised.quantise on a GPU."""
    count = values.numel()
    pack.launch(
        (blocks(count, THREADS * EIGHT), 1), THREADS,
        values.data_ptr(), CODES[values.dtype], address_of(error), error is not None,
        packed.data_ptr(), scales.data_ptr(), bits, MOST[bits], count,
        aligned(values, error, packed),
    )  # fmt: skip


def restore(packed: Tensor, scales: Tensor, values: Tensor, bits: int) -> None:
    """Carry out hpczero_kernels.quantised.restore on a GPU."""
    average_quantised(packed.unsqueeze(0), scales.unsqueeze(0), values, bits)


def average_quantised(packed: Tensor, scales: Tensor, values: Tensor, bits: int) -> None:
    """Carry out hpczero_kernels.quantised.average_quantised on a GPU."""
    count = values.numel()
    workers = len(packed)
    average.launch(
        (blocks(count, THREADS * EIGHT), 1), THREADS,
        packed.data_ptr(), packed.stride(0), scales.data_ptr(), 4 * scales.stride(0),
        workers, 1 / workers, values.data_ptr(), CODES[values.dtype], bits, count,
        aligned(values), aligned(packed) and (workers == 1 or packed.stride(0) % 16 == 0),
    )  # fmt: skip
