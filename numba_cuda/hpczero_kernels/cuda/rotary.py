"""Rotary embedding (`hpczero_kernels.rotary`) in one pass.

A thread turns eight pairs of a head, or copies eight of the elements that stay as they are.
"""

import torch
from numba import float32, uint32, uint64

from hpczero_kernels.cpu import CODES, FP32
from hpczero_kernels.cuda.intrinsics import inner
from hpczero_kernels.cuda.launch import (
    ADDRESS,
    CODE,
    COUNT,
    THREADS,
    aligned,
    blocks,
    kernel,
)
from hpczero_kernels.cuda.target import cuda
from hpczero_kernels.cuda.vectors import EIGHT, fetch, put, store, widen


@inner
def _turn_eight(
    x, cosines, sines, y, precision, first, pairs, angle, left, back, is_aligned
):  # fmt: skip
    """Turn the pairs whose elements begin at `first` and at `pairs` after it."""
    words = cuda.local.array(EIGHT, uint32)
    more = cuda.local.array(EIGHT, uint32)
    c_words = cuda.local.array(EIGHT, uint32)
    s_words = cuda.local.array(EIGHT, uint32)
    low = cuda.local.array(EIGHT, float32)
    high = cuda.local.array(EIGHT, float32)
    c = cuda.local.array(EIGHT, float32)
    s = cuda.local.array(EIGHT, float32)
    fetch(words, x, precision, first, left, is_aligned)
    fetch(more, x, precision, first + pairs, left, is_aligned)
    fetch(c_words, cosines, FP32, angle, left, is_aligned)
    fetch(s_words, sines, FP32, angle, left, is_aligned)
    widen(low, words, precision)
    widen(high, more, precision)
    widen(c, c_words, FP32)
    widen(s, s_words, FP32)
    for i in range(EIGHT):
        sine = -s[i] if back else s[i]
        a = low[i]
        low[i] = a * c[i] - high[i] * sine
        high[i] = high[i] * c[i] + a * sine
    store(low, y, precision, first, left, is_aligned)
    store(high, y, precision, first + pairs, left, is_aligned)


@kernel(
    ADDRESS, ADDRESS, ADDRESS, ADDRESS, CODE, COUNT, COUNT, COUNT, COUNT, COUNT, COUNT, CODE, CODE
)
def turn(
    x, cosines, sines, y, precision, count, positions, heads, head_dim, pairs, of_sample, back,
    is_aligned,
):  # fmt: skip
    """Turn or copy `count` groups of eight.

    x [samples, positions, heads, head_dim]; cosines, sines fp32 [positions, pairs], a sample's
    `of_sample` elements after those of the sample before.
    """
    words = cuda.local.array(EIGHT, uint32)
    number = uint64(cuda.blockIdx.x) * uint64(cuda.blockDim.x) + uint64(cuda.threadIdx.x)
    if number >= count:
        return
    stay = head_dim - uint64(2) * pairs
    turned_groups = (pairs + uint64(EIGHT - 1)) // uint64(EIGHT)
    groups = turned_groups + (stay + uint64(EIGHT - 1)) // uint64(EIGHT)
    head = number // groups
    group = number - head * groups
    if group < turned_groups:
        column = group * uint64(EIGHT)
        row = head // heads
        sample = row // positions
        angle = sample * of_sample + (row - sample * positions) * pairs + column
        _turn_eight(
            x, cosines, sines, y, precision, head * head_dim + column, pairs, angle,
            pairs - column, back, is_aligned,
        )  # fmt: skip
    else:
        column = (group - turned_groups) * uint64(EIGHT)
        index = head * head_dim + uint64(2) * pairs + column
        fetch(words, x, precision, index, stay - column, is_aligned)
        put(words, y, precision, index, stay - column, is_aligned)


def rotary(x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor, back: bool) -> torch.Tensor:
    """Return x [samples, positions, heads, head_dim] turned; `back` turns by the opposite angle."""
    x = x.contiguous()
    cosines = cosines.contiguous()
    sines = sines.contiguous()
    _, positions, heads, head_dim = x.shape
    pairs = cosines.shape[-1]
    of_sample = positions * pairs if cosines.dim() == 3 else 0
    y = torch.empty_like(x)
    groups = blocks(pairs, EIGHT) + blocks(head_dim - 2 * pairs, EIGHT)
    count = x.numel() // max(1, head_dim) * groups
    fits = pairs % EIGHT == head_dim % EIGHT == 0 and bool(aligned(x, cosines, sines, y))
    turn.launch(
        (blocks(count, THREADS), 1), THREADS,
        x.data_ptr(), cosines.data_ptr(), sines.data_ptr(), y.data_ptr(), CODES[x.dtype],
        count, positions, heads, head_dim, pairs, of_sample, back, fits,
    )  # fmt: skip
    return y
