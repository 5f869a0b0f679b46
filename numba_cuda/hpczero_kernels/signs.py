"""Messages of one bit an element: signs, and one fp32 scale for each block of 2,048 elements.

1-bit Adam (Tang et al. 2021) sends the momentum so, with error feedback (Seide et al. 2014):

    total = values + error
    scale = mean of |total| over the living elements of the block
    sent  = scale with the sign of total
    error = total - sent                               (kept, and added to the next message)

Elements whose variance is 0 do not live: they count in no scale, and are 0 with their errors. Bit k
of byte i is the sign of element 8 i + k, 1 where it is negative; the sign of a zero is that of its
bits. The last byte ends with zeros. Of a NaN or an infinity among a block's living elements, or of
a sum beyond fp32, the scale is not finite: what is sent shows it.
"""

from collections.abc import Iterator
from functools import partial

import torch
from numba import float32, uint8, uint32, uint64
from torch import Tensor
from torch.nn import functional

from hpczero_kernels.cpu import (
    FP32,
    INLINE,
    Pool,
    address_of,
    bits_as,
    from_element,
    inner,
    kernel,
    pointer,
    scratch,
    store,
)
from hpczero_kernels.cpu_messages import GROUP, put_average_of_signs, put_signs
from hpczero_kernels.cpu_streams import finish_streams, store_past_caches, streams
from hpczero_kernels.dispatch import CUDA, NUMBA, choose, is_like
from hpczero_kernels.message_sizes import SIGN_BLOCK, sign_blocks, sign_bytes

_CHUNK = 64 * SIGN_BLOCK  # elements of a reference's temporary tensors

# ------------------------------------------------------------------------------------- references


def pack_signs_reference(
    values: Tensor, error: Tensor, variance: Tensor | None, packed: Tensor, scales: Tensor
) -> None:
    for elements, bytes_, blocks in _chunks(values.numel()):
        living = _living(variance, elements, values)
        total = torch.where(living, values[elements] + error[elements], 0.0)
        in_blocks = _in_blocks(total)  # [blocks, SIGN_BLOCK]
        scale = in_blocks.abs().sum(1) / _in_blocks(living).sum(1).clamp(min=1)
        sent = torch.copysign(scale.unsqueeze(1), in_blocks).view(-1)[: total.numel()]
        scales[blocks] = scale
        error[elements] = torch.where(living, total - sent, 0.0)
        places = torch.arange(8, dtype=torch.int64, device=values.device)
        bits = in_blocks.signbit().view(-1, 8) << places
        packed[bytes_] = bits.sum(1)[: sign_bytes(total.numel())].to(torch.uint8)


def unpack_signs_reference(
    packed: Tensor, scales: Tensor, variance: Tensor | None, values: Tensor
) -> None:
    for elements, bytes_, blocks in _chunks(values.numel()):
        sent = _sent(packed[bytes_], scales[blocks], values[elements].numel())
        values[elements] = torch.where(_living(variance, elements, values), sent, 0.0)


def average_signs_reference(packed: Tensor, scales: Tensor, average: Tensor) -> None:
    workers = len(packed)
    for elements, bytes_, blocks in _chunks(average.numel()):
        total = torch.zeros_like(average[elements])
        for worker in range(workers):
            total += _sent(packed[worker, bytes_], scales[worker, blocks], total.numel())
        average[elements] = total * (1 / workers)


def _chunks(count: int) -> Iterator[tuple[slice, slice, slice]]:
    """Yield the elements of each chunk, its bytes and its blocks."""
    for start in range(0, count, _CHUNK):
        stop = min(start + _CHUNK, count)
        yield (
            slice(start, stop),
            slice(sign_bytes(start), sign_bytes(stop)),
            slice(sign_blocks(start), sign_blocks(stop)),
        )


def _in_blocks(chunk: Tensor) -> Tensor:
    """Return the chunk as [blocks, SIGN_BLOCK], with zeros at its end."""
    return functional.pad(chunk, (0, -chunk.numel() % SIGN_BLOCK)).view(-1, SIGN_BLOCK)


def _living(variance: Tensor | None, elements: slice, like: Tensor) -> Tensor:
    if variance is None:
        return torch.ones_like(like[elements], dtype=torch.bool)
    return variance[elements] != 0


def _sent(packed: Tensor, scale: Tensor, count: int) -> Tensor:
    """Return what is sent: the scales with the signs of `count` elements."""
    bits = packed.unsqueeze(1) >> torch.arange(8, dtype=torch.uint8, device=packed.device) & 1
    scale = scale.repeat_interleave(SIGN_BLOCK)[:count]
    return torch.where(bits.view(-1)[:count].bool(), -scale, scale)


# --------------------------------------------------------------------------------------- for CPUs

_LAST = GROUP // 8  # bytes of a group


@inner
def _add_error(total, values, error, variance, size):
    """Set total[:size] to values + error, 0 where the variance is 0; return how many live."""
    if variance == 0:
        for i in range(size):
            total[i] = values[i] + error[i]
        return size
    variances = pointer(variance, float32)
    living = uint64(0)
    for i in range(size):
        lives = variances[i] != float32(0.0)
        total[i] = values[i] + error[i] if lives else float32(0.0)
        living += uint64(lives)
    return living


@inner
def _sum_of_magnitudes(total, lanes, size):
    """Return the sum of |total|; the order is fixed, whatever the compiler makes of it."""
    for lane in range(GROUP):
        lanes[lane] = abs(total[lane])
    for start in range(uint64(GROUP), size, uint64(GROUP)):
        for lane in range(GROUP):
            lanes[lane] += abs(total[start + uint64(lane)])
    half = GROUP // 2
    while half:
        for lane in range(half):
            lanes[lane] += lanes[half + lane]
        half //= 2
    return lanes[0]


@inner
def _keep_error(error, total, scale, variance, size):
    if variance == 0:
        for i in range(size):
            error[i] = total[i] - _with_sign_of(total[i], scale)
        return
    variances = pointer(variance, float32)
    for i in range(size):
        left = total[i] - _with_sign_of(total[i], scale)
        error[i] = left if variances[i] != float32(0.0) else float32(0.0)


@inner
def _with_sign_of(number, scale):
    """Return a scale, which is not negative, with the sign of a number."""
    sign = uint32(bits_as(number, uint32) & uint32(0x80000000))
    return bits_as(uint32(bits_as(scale, uint32) | sign), float32)


@inner
def _store_signs(signs, total, size):
    """Store the signs of total[:size]; `total` ends with a whole group."""
    groups = size // uint64(GROUP)
    for group in range(groups):
        put_signs(signs, total, group)
    rest = size - groups * uint64(GROUP)
    if rest:
        last = scratch(_LAST, uint8)
        put_signs(last, from_element(total, groups * uint64(GROUP)), uint64(0))
        for byte in range((rest + uint64(7)) // uint64(8)):
            signs[groups * uint64(GROUP // 8) + byte] = last[byte]


@inner
def _put_average(numbers, packed, row, scales, scales_row, workers, factor, streamed, size):
    """Set numbers[:size] to the average of a block.

    `packed` and `scales` are the addresses of its first signs and scale.
    """
    groups = size // uint64(GROUP)
    for group in range(groups):
        put_average_of_signs(
            numbers, group, packed + uint64(GROUP // 8) * group, row, scales, scales_row, workers,
            factor, streamed,
        )  # fmt: skip
    for i in range(groups * uint64(GROUP), size):
        number = float32(0.0)
        for worker in range(workers):
            signs = pointer(packed + worker * row, uint8)
            scale = pointer(scales + worker * scales_row, float32)[0]
            negative = (uint32(signs[i // uint64(8)]) >> uint32(i % uint64(8))) & uint32(1)
            number += -scale if negative else scale
        numbers[i] = number * factor


@kernel("void(uint64, uint64, uint64, uint64, uint64, uint64, uint64)")
def _pack_signs(values, error, variance, packed, scales, start, stop):
    """Pack elements start .. stop - 1; `start` begins a block, tensors are addresses."""
    total = scratch(SIGN_BLOCK, float32)
    lanes = scratch(GROUP, float32)
    while start < stop:
        size = min(stop - start, uint64(SIGN_BLOCK))
        for i in range(size, (size + uint64(GROUP - 1)) // uint64(GROUP) * uint64(GROUP)):
            total[i] = float32(0.0)
        single = uint64(4) * start
        errors = pointer(error + single, float32)
        variances = variance + single if variance else variance
        living = _add_error(total, pointer(values + single, float32), errors, variances, size)
        scale = _sum_of_magnitudes(total, lanes, size) / float32(max(living, uint64(1)))
        _store_signs(pointer(packed + start // uint64(8), uint8), total, size)
        _keep_error(errors, total, scale, variances, size)
        pointer(scales, float32)[start // uint64(SIGN_BLOCK)] = scale
        start += uint64(SIGN_BLOCK)


@kernel(
    "void(uint64, uint64, uint64, uint64, uint64, float32, uint64, uint64, boolean, uint64, uint64)"
)
def _average_signs(
    packed, row, scales, scales_row, workers, factor, variance, average, streamed, start, stop
):  # fmt: skip
    """Average elements start .. stop - 1; `start` begins a block, tensors are addresses.

    `row` and `scales_row` are the bytes from one worker's to the next one's. Where there is a
    variance (else 0), elements whose variance is 0 become 0.
    """
    total = scratch(SIGN_BLOCK, float32)
    while start < stop:
        size = min(stop - start, uint64(SIGN_BLOCK))
        signs = packed + start // uint64(8)
        scale = scales + start // uint64(SIGN_BLOCK) * uint64(4)
        out = pointer(average + uint64(4) * start, float32)
        sent = out if variance == 0 else total
        streams_sent = streamed and variance == 0
        _put_average(sent, signs, row, scale, scales_row, workers, factor, streams_sent, size)
        if variance:
            variances = pointer(variance + uint64(4) * start, float32)
            for i in range(size):
                total[i] = total[i] if variances[i] != float32(0.0) else float32(0.0)
            if streamed:
                store_past_caches(total, size, average, FP32, start, total)
            else:
                store(total, size, average, FP32, start)
        start += uint64(SIGN_BLOCK)
    finish_streams()


# --------------------------------------------------------------------------------- what is called


def pack_signs(
    values: Tensor,
    error: Tensor,
    variance: Tensor | None,
    packed: Tensor,
    scales: Tensor,
    pool: Pool = INLINE,
) -> None:
    """Set `packed` [sign_bytes] and `scales` [sign_blocks] to the message, `error` to what is left.

    Values, error and variance are flat and fp32; without a variance all elements live. Scales
    differ from those of pack_signs_reference by the rounding of the mean.
    """
    _check(values, error, variance)
    _check_message(packed, scales, values)
    implementation = choose("signs", values)
    if implementation == CUDA:
        from hpczero_kernels.cuda import signs

        signs.pack_signs(values, error, variance, packed, scales)
    elif implementation == NUMBA:
        addresses = [0 if x is None else address_of(x) for x in (values, error, variance)]
        arguments = (*addresses, address_of(packed), address_of(scales))
        pool.run(partial(_pack_signs, *arguments), values.numel())
    else:
        pack_signs_reference(values, error, variance, packed, scales)


def unpack_signs(
    packed: Tensor, scales: Tensor, variance: Tensor | None, values: Tensor, pool: Pool = INLINE
) -> None:
    """Set `values` (flat, fp32) to what was sent, 0 where the variance is 0."""
    _check(values, variance)
    _check_message(packed, scales, values)
    implementation = choose("signs", values)
    if implementation == CUDA:
        from hpczero_kernels.cuda import signs

        signs.unpack_signs(packed, scales, variance, values)
    elif implementation == NUMBA:
        _average_on_cpu(packed.unsqueeze(0), scales.unsqueeze(0), variance, values, pool)
    else:
        unpack_signs_reference(packed, scales, variance, values)


def average_signs(packed: Tensor, scales: Tensor, average: Tensor, pool: Pool = INLINE) -> None:
    """Set `average` (flat, fp32) to the mean of what the workers sent, added up in their order.

    packed: [workers, sign_bytes], scales: [workers, sign_blocks]; rows may lie apart, as in
    messages of both.
    """
    assert len(packed) == len(scales) > 0, (packed.shape, scales.shape)
    _check(average)
    _check_message(packed, scales, average)
    implementation = choose("signs", average)
    if implementation == CUDA:
        from hpczero_kernels.cuda import signs

        signs.average_signs(packed, scales, average)
    elif implementation == NUMBA:
        _average_on_cpu(packed, scales, None, average, pool)
    else:
        average_signs_reference(packed, scales, average)


def _average_on_cpu(
    packed: Tensor, scales: Tensor, variance: Tensor | None, average: Tensor, pool: Pool
) -> None:
    workers = len(packed)
    rows = (packed.data_ptr(), packed.stride(0), scales.data_ptr(), 4 * scales.stride(0))
    living = 0 if variance is None else address_of(variance)
    others = (living, address_of(average), streams(average))
    pool.run(partial(_average_signs, *rows, workers, 1 / workers, *others), average.numel())


def _check(values: Tensor, *others: Tensor | None) -> None:
    """Assert that all are flat, contiguous, fp32 and as long as the values, on one device."""
    assert values.dtype == torch.float32, values.dtype
    for other in (values, *others):
        assert is_like(values, other), (values.shape, other)
        assert other is None or other.is_contiguous(), other.stride()


def _check_message(packed: Tensor, scales: Tensor, values: Tensor) -> None:
    """Assert that a message, or the rows of several, has the size of the values' message."""
    count = values.numel()
    assert packed.dtype == torch.uint8, packed.dtype
    assert scales.dtype == torch.float32, scales.dtype
    assert packed.device == scales.device == values.device, (packed.device, scales.device)
    assert packed.shape[-1] == sign_bytes(count), (packed.shape, count)
    assert scales.shape[-1] == sign_blocks(count), (scales.shape, count)
    assert packed.stride(-1) == scales.stride(-1) == 1, (packed.stride(), scales.stride())
