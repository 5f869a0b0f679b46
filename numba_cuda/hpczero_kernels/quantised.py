"""Messages of 8 or 4 bits an element: integers, and one fp32 scale for each block of 256 elements.

    total = values + error                             (error None: total = values)
    scale = max of |total| over the block / most       (most = 127 or 7)
    q     = total (1 / scale), rounded to nearest, ties to even
    sent  = q scale
    error = total - sent                               (kept, and added to the next message)

Integers are in two's complement; of two in a byte the first is the low half, and the last byte may
end with a zero. A scale below the smallest normal fp32 counts as 0: then q is 0, and all of the
total stays in the error. Of a NaN or an infinity in a block the scale is NaN and q is 0: all that
is restored is NaN.
"""

from collections.abc import Iterator
from functools import partial

import numpy as np
import torch
from numba import float32, int8, int32, uint8, uint16, uint32, uint64
from torch import Tensor
from torch.nn import functional

from hpczero_kernels.cpu import (
    BF16,
    CODES,
    FP32,
    INLINE,
    Pool,
    address_in,
    address_of,
    bits_as,
    from_element,
    inner,
    kernel,
    load,
    pointer,
    scratch,
    store,
    to_bf16,
)
from hpczero_kernels.cpu_messages import GROUP, put_average_of_integers
from hpczero_kernels.cpu_streams import finish_streams, store_past_caches, streams
from hpczero_kernels.dispatch import CUDA, NUMBA, choose
from hpczero_kernels.message_sizes import (
    MOST,
    QUANTISED_BLOCK,
    SMALLEST_SCALE,
    quantised_blocks,
    quantised_bytes,
)

_CHUNK = 512 * QUANTISED_BLOCK  # elements of a reference's temporary tensors

# ------------------------------------------------------------------------------------- references


def quantise_reference(
    values: Tensor, error: Tensor | None, packed: Tensor, scales: Tensor, bits: int
) -> None:
    for elements, bytes_, blocks in _chunks(values.numel(), bits):
        total = values[elements].float()
        if error is not None:
            total = total + error[elements]
        in_blocks = _in_blocks(total)  # [blocks, QUANTISED_BLOCK]
        largest = in_blocks.abs().amax(1, keepdim=True)  # NaN, if there is one
        scale = largest / torch.full_like(largest, MOST[bits])  # a GPU rounds x / number otherwise
        scale = torch.where(scale < SMALLEST_SCALE, 0.0, scale)
        scale = torch.where(scale.isinf(), torch.nan, scale)
        q = torch.where(scale > 0, in_blocks * (1 / scale), 0.0).round()
        scales[blocks] = scale.squeeze(1)
        if error is not None:
            error[elements] = (in_blocks - q * scale).view(-1)[: total.numel()]
        packed[bytes_] = _packed(q.view(-1), bits)[: quantised_bytes(total.numel(), bits)]


def restore_reference(packed: Tensor, scales: Tensor, values: Tensor, bits: int) -> None:
    for elements, bytes_, blocks in _chunks(values.numel(), bits):
        count = values[elements].numel()
        values[elements] = _sent(packed[bytes_], scales[blocks], count, bits)


def average_quantised_reference(packed: Tensor, scales: Tensor, average: Tensor, bits: int) -> None:
    workers = len(packed)
    for elements, bytes_, blocks in _chunks(average.numel(), bits):
        total = torch.zeros_like(average[elements])
        for worker in range(workers):
            total += _sent(packed[worker, bytes_], scales[worker, blocks], total.numel(), bits)
        average[elements] = total * (1 / workers)


def _chunks(count: int, bits: int) -> Iterator[tuple[slice, slice, slice]]:
    """Yield the elements of each chunk, its bytes and its blocks."""
    for start in range(0, count, _CHUNK):
        stop = min(start + _CHUNK, count)
        yield (
            slice(start, stop),
            slice(quantised_bytes(start, bits), quantised_bytes(stop, bits)),
            slice(quantised_blocks(start), quantised_blocks(stop)),
        )


def _in_blocks(chunk: Tensor) -> Tensor:
    """Return the chunk as [blocks, QUANTISED_BLOCK], with zeros at its end."""
    return functional.pad(chunk, (0, -chunk.numel() % QUANTISED_BLOCK)).view(-1, QUANTISED_BLOCK)


def _packed(q: Tensor, bits: int) -> Tensor:
    """Return integers as bytes."""
    codes = q.to(torch.int8).view(torch.uint8)
    return codes if bits == 8 else codes[0::2] & 0xF | codes[1::2] << 4


def _sent(packed: Tensor, scale: Tensor, count: int, bits: int) -> Tensor:
    """Return what is sent: `count` integers of bytes, times their scales."""
    if bits == 4:
        packed = torch.stack((packed << 4, packed), 1).view(-1)  # each in the upper half of a byte
    q = packed.view(torch.int8) >> 8 - bits
    return q[:count] * scale.repeat_interleave(QUANTISED_BLOCK)[:count]


# --------------------------------------------------------------------------------------- for CPUs

_SHIFT = float32(12582912.0)  # 1.5 * 2^23: a number added to it is rounded to an integer
_STRIDE = 8 * QUANTISED_BLOCK  # elements that a kernel takes at a time
_CODES = _STRIDE + 2
_SMALLEST_SCALE = float32(SMALLEST_SCALE)
_MAGNITUDE, _INFINITE = 0x7FFFFFFF, 0x7F800000  # bits of an fp32


@inner
def _scale_of(total, size, most):
    """Return the scale of a block."""
    largest = uint32(0)  # bits of numbers without sign are in the numbers' order, NaN the largest
    for i in range(size):
        largest = max(largest, uint32(bits_as(total[i], uint32) & uint32(_MAGNITUDE)))
    if largest >= uint32(_INFINITE):
        return float32(np.nan)
    scale = bits_as(largest, float32) / most
    return float32(0.0) if scale < _SMALLEST_SCALE else scale


@inner
def _round(codes, total, errors, size, scale, keeps):
    """Set codes[:size] to the integers and, if it `keeps` them, errors[:size] to what is left.

    Of a normal scale the reciprocal is normal, too. As the product is rounded thrice by half an ulp
    at most, none is rounded to more than `most`.
    """
    if not scale > float32(0.0):
        for i in range(size):
            codes[i] = uint8(0)
        if keeps:
            for i in range(size):
                errors[i] = total[i] - scale  # NaN, or the total
        return
    reciprocal = float32(1.0) / scale
    if keeps:
        for i in range(size):
            shifted = total[i] * reciprocal + _SHIFT
            codes[i] = uint8(bits_as(shifted, uint32))
            errors[i] = total[i] - (shifted - _SHIFT) * scale
    else:
        for i in range(size):
            codes[i] = uint8(bits_as(total[i] * reciprocal + _SHIFT, uint32))


@inner
def _join(codes, size, packed):
    """Store pairs of codes as bytes; codes[size] is 0 if `size` is odd."""
    pairs = pointer(address_in(codes), uint16)
    for i in range((size + uint64(1)) // uint64(2)):
        pair = uint32(pairs[i])
        packed[i] = uint8((pair & uint32(0xF)) | ((pair >> uint32(4)) & uint32(0xF0)))


@kernel("void(uint64, int64, uint64, uint64, uint64, int64, float32, uint64, uint64)")
def _quantise(values, precision, error, packed, scales, bits, most, start, stop):
    """Quantise elements start .. stop - 1; `start` begins a block, tensors are addresses.

    Several blocks at a time: their scales do not wait for each other.
    """
    total = scratch(_STRIDE, float32)
    codes = scratch(_CODES, uint8)
    while start < stop:
        size = min(stop - start, uint64(_STRIDE))
        load(total, size, values, precision, start)
        errors = pointer(error + uint64(4) * start, float32)
        if error:
            for i in range(size):
                total[i] += errors[i]
        scale = pointer(scales + start // uint64(QUANTISED_BLOCK) * uint64(4), float32)
        for first in range(uint64(0), size, uint64(QUANTISED_BLOCK)):
            length = min(size - first, uint64(QUANTISED_BLOCK))
            block = from_element(total, first)
            scale[first // uint64(QUANTISED_BLOCK)] = _scale_of(block, length, most)
        integers = pointer(packed + start * uint64(bits) // uint64(8), uint8)
        rounded = integers if bits == 8 else codes
        for first in range(uint64(0), size, uint64(QUANTISED_BLOCK)):
            length = min(size - first, uint64(QUANTISED_BLOCK))
            _round(
                from_element(rounded, first), from_element(total, first),
                from_element(errors, first), length, scale[first // uint64(QUANTISED_BLOCK)],
                error != 0,
            )  # fmt: skip
        if bits == 4:
            codes[size] = uint8(0)
            _join(codes, size, integers)
        start += uint64(_STRIDE)


@inner
def _put_groups(
    numbers, packed, row, scales, scales_row, workers, factor, streamed, bits, groups
):  # fmt: skip
    """Set whole groups of numbers, fp32 or bits of bf16, to the averages of their workers.

    `packed` and `scales` are the addresses of their first integers and scale.
    """
    for group in range(groups):
        scale = scales + group // uint64(QUANTISED_BLOCK // GROUP) * uint64(4)
        if bits == 8:
            integers = packed + uint64(GROUP) * group
            put_average_of_integers(
                numbers, group, integers, row, scale, scales_row, workers, factor, streamed, 8
            )  # fmt: skip
        else:
            integers = packed + uint64(GROUP // 2) * group
            put_average_of_integers(
                numbers, group, integers, row, scale, scales_row, workers, factor, streamed, 4
            )  # fmt: skip


@inner
def _average_of(packed, row, scales, scales_row, workers, factor, bits, i):
    """Return the average of one number, as _put_groups makes it."""
    number = float32(0.0)
    for worker in range(workers):
        scale = scales + worker * scales_row + i // uint64(QUANTISED_BLOCK) * uint64(4)
        integer = _integer(pointer(packed + worker * row, uint8), bits, i)
        number += integer * pointer(scale, float32)[0]
    return number * factor


@inner
def _integer(packed, bits, i):
    """Return one integer as a number."""
    if bits == 8:
        return float32(int8(packed[i]))
    half = (uint32(packed[i // uint64(2)]) >> uint32(i % uint64(2) * uint64(4))) & uint32(0xF)
    return float32(int32((half ^ uint32(8)) - uint32(8)))


@kernel(
    "void(uint64, uint64, uint64, uint64, uint64, float32, uint64, int64, boolean, int64, uint64,"
    " uint64)"
)
def _average_integers(
    packed, row, scales, scales_row, workers, factor, average, precision, streamed, bits, start,
    stop,
):  # fmt: skip
    """Average elements start .. stop - 1; `start` begins a block, tensors are addresses.

    `row` and `scales_row` are the bytes from one worker's to the next one's.
    """
    total = scratch(_STRIDE, float32)
    staging = scratch(_STRIDE, float32)
    while start < stop:
        size = min(stop - start, uint64(_STRIDE))
        groups = size // uint64(GROUP)
        integers = packed + start * uint64(bits) // uint64(8)
        scale = scales + start // uint64(QUANTISED_BLOCK) * uint64(4)
        singles = pointer(average + start * uint64(4), float32)
        halves = pointer(average + start * uint64(2), uint16)
        of = integers, row, scale, scales_row, workers, factor
        if precision == FP32:
            _put_groups(singles, *of, streamed, bits, groups)
            for i in range(groups * uint64(GROUP), size):
                singles[i] = _average_of(*of, bits, i)
        elif precision == BF16:
            _put_groups(halves, *of, streamed, bits, groups)
            for i in range(groups * uint64(GROUP), size):
                halves[i] = to_bf16(_average_of(*of, bits, i))
        else:
            _put_groups(total, *of, False, bits, groups)
            for i in range(groups * uint64(GROUP), size):
                total[i] = _average_of(*of, bits, i)
            if streamed:
                store_past_caches(total, size, average, precision, start, staging)
            else:
                store(total, size, average, precision, start)
        start += uint64(_STRIDE)
    finish_streams()


# --------------------------------------------------------------------------------- what is called


def quantise(
    values: Tensor,
    error: Tensor | None,
    packed: Tensor,
    scales: Tensor,
    bits: int,
    pool: Pool = INLINE,
) -> None:
    """Set `packed` [quantised_bytes] and `scales` [quantised_blocks] to the message.

    Values are flat, in any of the three precisions. `error` (fp32) becomes what is left; without
    it, what is left is dropped.
    """
    _check(values, packed, scales, bits)
    assert error is None or (error.shape == values.shape and error.dtype == torch.float32)
    assert error is None or (error.is_contiguous() and error.device == values.device)
    implementation = choose("quantised", values)
    if implementation == CUDA:
        from hpczero_kernels.cuda import quantised

        quantised.quantise(values, error, packed, scales, bits)
    elif implementation == NUMBA:
        given = (address_of(values), CODES[values.dtype], 0 if error is None else address_of(error))
        arguments = (*given, address_of(packed), address_of(scales), bits, MOST[bits])
        pool.run(partial(_quantise, *arguments), values.numel())
    else:
        quantise_reference(values, error, packed, scales, bits)


def restore(packed: Tensor, scales: Tensor, values: Tensor, bits: int, pool: Pool = INLINE) -> None:
    """Set `values` (flat, in any of the three precisions) to what was sent."""
    _check(values, packed, scales, bits)
    implementation = choose("quantised", values)
    if implementation == CUDA:
        from hpczero_kernels.cuda import quantised

        quantised.restore(packed, scales, values, bits)
    elif implementation == NUMBA:
        _average_on_cpu(packed.unsqueeze(0), scales.unsqueeze(0), values, bits, pool)
    else:
        restore_reference(packed, scales, values, bits)


def average_quantised(
    packed: Tensor, scales: Tensor, average: Tensor, bits: int, pool: Pool = INLINE
) -> None:
    """Set `average` (flat, fp32) to the mean of what the workers sent, added up in their order.

    packed: [workers, quantised_bytes], scales: [workers, quantised_blocks]; rows may lie apart, as
    in messages of both.
    """
    assert len(packed) == len(scales) > 0, (packed.shape, scales.shape)
    assert average.dtype == torch.float32, average.dtype
    _check(average, packed, scales, bits)
    implementation = choose("quantised", average)
    if implementation == CUDA:
        from hpczero_kernels.cuda import quantised

        quantised.average_quantised(packed, scales, average, bits)
    elif implementation == NUMBA:
        _average_on_cpu(packed, scales, average, bits, pool)
    else:
        average_quantised_reference(packed, scales, average, bits)


def _average_on_cpu(packed: Tensor, scales: Tensor, average: Tensor, bits: int, pool: Pool) -> None:
    workers = len(packed)
    rows = (packed.data_ptr(), packed.stride(0), scales.data_ptr(), 4 * scales.stride(0))
    to_write = (address_of(average), CODES[average.dtype], streams(average), bits)
    pool.run(partial(_average_integers, *rows, workers, 1 / workers, *to_write), average.numel())


def _check(values: Tensor, packed: Tensor, scales: Tensor, bits: int) -> None:
    """Assert that a message, or the rows of several, has the size of the values' message."""
    count = values.numel()
    assert bits in MOST, bits
    assert values.dtype in CODES, values.dtype
    assert values.is_contiguous(), values.stride()
    assert packed.dtype == torch.uint8, packed.dtype
    assert scales.dtype == torch.float32, scales.dtype
    assert packed.device == scales.device == values.device, (packed.device, scales.device)
    assert packed.shape[-1] == quantised_bytes(count, bits), (packed.shape, count)
    assert scales.shape[-1] == quantised_blocks(count), (scales.shape, count)
    assert packed.stride(-1) == scales.stride(-1) == 1, (packed.stride(), scales.stride())
