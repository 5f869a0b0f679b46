"""Rotary embedding (`hpczero_kernels.rotary`): each thread turns eight pairs of a head, which lie half a head apart."""

import torch
from numba import float32, uint32, uint64

from hpczero_kernels.cpu import CODES, FP32
from hpczero_kernels.cuda.launch import ADDRESS, CODE, COUNT, THREADS, aligned, blocks, kernel
from hpczero_kernels.cuda.target import cuda
from hpczero_kernels.cuda.vectors import EIGHT, fetch, narrow, put, widen


@kernel(ADDRESS, ADDRESS, ADDRESS, ADDRESS, CODE, COUNT, COUNT, COUNT, COUNT, CODE, CODE)
def turn(x, cosines, sines, y, precision, count, positions, heads, half, back, is_aligned):
    """count: pairs' groups of eight; x [samples, positions, heads, 2, half], cosines and sines fp32 [positions, half]."""
    words, more = cuda.local.array(EIGHT, uint32), cuda.local.array(EIGHT, uint32)
    of_cosines, of_sines = cuda.local.array(EIGHT, uint32), cuda.local.array(EIGHT, uint32)
    low, high = cuda.local.array(EIGHT, float32), cuda.local.array(EIGHT, float32)
    c, s = cuda.local.array(EIGHT, float32), cuda.local.array(EIGHT, float32)
    number = uint64(cuda.blockIdx.x) * uint64(cuda.blockDim.x) + uint64(cuda.threadIdx.x)
    if number >= count:
        return
    of_head = (half + uint64(EIGHT - 1)) // uint64(EIGHT)
    head = number // of_head
    column = (number - head * of_head) * uint64(EIGHT)
    position, left, first = head // heads % positions, half - column, uint64(2) * head * half + column
    fetch(words, x, precision, first, left, is_aligned)
    fetch(more, x, precision, first + half, left, is_aligned)
    fetch(of_cosines, cosines, FP32, position * half + column, left, is_aligned)
    fetch(of_sines, sines, FP32, position * half + column, left, is_aligned)
    widen(low, words, precision)
    widen(high, more, precision)
    widen(c, of_cosines, FP32)
    widen(s, of_sines, FP32)
    for i in range(EIGHT):
        sine, one = -s[i] if back else s[i], low[i]
        low[i] = one * c[i] - high[i] * sine
        high[i] = high[i] * c[i] + one * sine
    narrow(words, low, precision)
    put(words, y, precision, first, left, is_aligned)
    narrow(words, high, precision)
    put(words, y, precision, first + half, left, is_aligned)


def rotary(x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor, back: bool) -> torch.Tensor:
    """x [samples, positions, heads, head_dim]"""
    x, cosines, sines = x.contiguous(), cosines.contiguous(), sines.contiguous()
    _, positions, heads, head_dim = x.shape
    y, half = torch.empty_like(x), head_dim // 2
    count = x.numel() // max(1, head_dim) * blocks(half, EIGHT)
    fits = half % EIGHT == 0 and bool(aligned(x, cosines, sines, y))
    turn.launch(
        (blocks(count, THREADS), 1), THREADS,
        x.data_ptr(), cosines.data_ptr(), sines.data_ptr(), y.data_ptr(), CODES[x.dtype], count, positions, heads, half, back, fits,
    )  # fmt: skip
    return y
