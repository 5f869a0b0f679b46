"""Bias and GELU (`hpczero_kernels.elementwise`) in one pass; backward computes what it needs of forward again."""

import torch
from numba import float32, uint32, uint64

from hpczero_kernels.cpu import CODES, FP32
from hpczero_kernels.cuda.intrinsics import erf, exp, inner
from hpczero_kernels.cuda.launch import (
    ADDRESS,
    CODE,
    COUNT,
    THREADS,
    address_of,
    aligned,
    blocks,
    contiguous,
    kernel,
    rows_aligned,
)
from hpczero_kernels.cuda.target import cuda
from hpczero_kernels.cuda.vectors import (
    EIGHT,
    fetch,
    grid_over,
    grid_with_sums,
    narrow,
    own_column,
    put,
    threads_for,
    widen,
)

_ROOT, _CUBE = float32(0.7978845608028654), float32(0.044715)  # sqrt(2 / pi)
_HALF_ROOT, _DENSITY = (
    float32(0.7071067811865476),
    float32(0.3989422804014327),
)  # sqrt(1 / 2), 1 / sqrt(2 pi)


@inner
def _tanh(x):
    """Of |x|, so that exp does not overflow and tanh(-x) is -tanh(x)."""
    power = exp(float32(-2.0) * abs(x))
    size = (float32(1.0) - power) / (float32(1.0) + power)
    return size if x >= float32(0.0) else -size if x < float32(0.0) else x


@inner
def _gelu(x, by_tanh):
    half = float32(0.5) * x
    if by_tanh:
        return half + half * _tanh(_ROOT * x * (float32(1.0) + _CUBE * x * x))
    return half + half * erf(x * _HALF_ROOT)


@inner
def _slope(x, by_tanh):
    if by_tanh:
        t = _tanh(_ROOT * x * (float32(1.0) + _CUBE * x * x))
        inside = _ROOT * (float32(1.0) + float32(3.0) * _CUBE * x * x)
        return (
            float32(0.5) * (float32(1.0) + t) + float32(0.5) * x * (float32(1.0) - t * t) * inside
        )
    return float32(0.5) * (float32(1.0) + erf(x * _HALF_ROOT)) + x * _DENSITY * exp(
        float32(-0.5) * x * x
    )


@kernel(ADDRESS, ADDRESS, CODE, ADDRESS, CODE, COUNT, COUNT, CODE, CODE)
def gelu_forward_kernel(x, bias, has_bias, y, precision, rows, columns, by_tanh, is_aligned):
    words, numbers, shift = (
        cuda.local.array(EIGHT, uint32),
        cuda.local.array(EIGHT, float32),
        cuda.local.array(EIGHT, float32),
    )
    column = own_column()
    if column >= columns:
        return
    left = columns - column
    for i in range(EIGHT):
        shift[i] = float32(0.0)
    if has_bias:
        fetch(words, bias, precision, column, left, is_aligned)
        widen(shift, words, precision)
    row = uint64(cuda.blockIdx.y)
    while row < rows:
        fetch(words, x, precision, row * columns + column, left, is_aligned)
        widen(numbers, words, precision)
        for i in range(EIGHT):
            numbers[i] = _gelu(numbers[i] + shift[i], by_tanh)
        narrow(words, numbers, precision)
        put(words, y, precision, row * columns + column, left, is_aligned)
        row += uint64(cuda.gridDim.y)


@kernel(ADDRESS, ADDRESS, ADDRESS, CODE, ADDRESS, ADDRESS, CODE, COUNT, COUNT, CODE, CODE)
def gelu_backward_kernel(
    gradient, x, bias, has_bias, of_x, of_bias, precision, rows, columns, by_tanh, is_aligned
):
    """of_bias: fp32 [blocks along y, columns], what each of them has of it."""
    words, more, numbers, g = (
        cuda.local.array(EIGHT, uint32), cuda.local.array(EIGHT, uint32), cuda.local.array(EIGHT, float32), cuda.local.array(EIGHT, float32)
    )  # fmt: skip
    shift, sums = cuda.local.array(EIGHT, float32), cuda.local.array(EIGHT, float32)
    column = own_column()
    if column >= columns:
        return
    left = columns - column
    for i in range(EIGHT):
        shift[i], sums[i] = float32(0.0), float32(0.0)
    if has_bias:
        fetch(words, bias, precision, column, left, is_aligned)
        widen(shift, words, precision)
    row = uint64(cuda.blockIdx.y)
    while row < rows:
        fetch(words, x, precision, row * columns + column, left, is_aligned)
        fetch(more, gradient, precision, row * columns + column, left, is_aligned)
        widen(numbers, words, precision)
        widen(g, more, precision)
        for i in range(EIGHT):
            g[i] *= _slope(numbers[i] + shift[i], by_tanh)
            sums[i] += g[i]
        narrow(words, g, precision)
        put(words, of_x, precision, row * columns + column, left, is_aligned)
        row += uint64(cuda.gridDim.y)
    if has_bias:
        narrow(words, sums, FP32)
        put(words, of_bias, FP32, uint64(cuda.blockIdx.y) * columns + column, left, is_aligned)


def gelu_forward(x: torch.Tensor, bias: torch.Tensor | None, by_tanh: bool) -> torch.Tensor:
    x, bias, columns = x.contiguous(), contiguous(bias), x.shape[-1]
    y, rows = torch.empty_like(x), x.numel() // max(1, columns)
    gelu_forward_kernel.launch(
        grid_over(rows, columns), threads_for(columns),
        x.data_ptr(), address_of(bias), bias is not None, y.data_ptr(), CODES[x.dtype], rows, columns, by_tanh,
        rows_aligned(columns, x, bias, y),
    )  # fmt: skip
    return y


def gelu_backward(
    gradient: torch.Tensor, x: torch.Tensor, bias: torch.Tensor | None, by_tanh: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients of x and of the bias (empty: there is none)."""
    gradient, x, bias, columns = (
        gradient.contiguous(),
        x.contiguous(),
        contiguous(bias),
        x.shape[-1],
    )
    rows = x.numel() // max(1, columns)
    grid = grid_over(rows, columns) if bias is None else grid_with_sums(rows, columns)
    of_x, of_bias = (
        torch.empty_like(x),
        x.new_empty((0, 0) if bias is None else (grid[1], columns), dtype=torch.float32),
    )
    gelu_backward_kernel.launch(
        grid, threads_for(columns),
        gradient.data_ptr(), x.data_ptr(), address_of(bias), bias is not None, of_x.data_ptr(), of_bias.data_ptr(), CODES[x.dtype], rows, columns,
        by_tanh, rows_aligned(columns, gradient, x, bias, of_x, of_bias),
    )  # fmt: skip
    return of_x, of_bias.sum(0).to(x.dtype)


# SwiGLU (`hpczero_kernels.elementwise`): gates and values lie side by side in one tensor [rows, 2, columns].
@inner
def _sigmoid(x):
    """Of |x|, so that exp does not overflow."""
    power = exp(-abs(x))
    share = float32(1.0) / (float32(1.0) + power)
    return share if x >= float32(0.0) else power * share


@kernel(ADDRESS, ADDRESS, CODE, COUNT, COUNT, CODE)
def swiglu_forward_kernel(both, y, precision, rows, columns, is_aligned):
    words, more, gates, values = (
        cuda.local.array(EIGHT, uint32), cuda.local.array(EIGHT, uint32), cuda.local.array(EIGHT, float32), cuda.local.array(EIGHT, float32)
    )  # fmt: skip
    column = own_column()
    if column >= columns:
        return
    left, row = columns - column, uint64(cuda.blockIdx.y)
    while row < rows:
        gate = uint64(2) * row * columns + column
        fetch(words, both, precision, gate, left, is_aligned)
        fetch(more, both, precision, gate + columns, left, is_aligned)
        widen(gates, words, precision)
        widen(values, more, precision)
        for i in range(EIGHT):
            values[i] *= gates[i] * _sigmoid(gates[i])
        narrow(words, values, precision)
        put(words, y, precision, row * columns + column, left, is_aligned)
        row += uint64(cuda.gridDim.y)


@kernel(ADDRESS, ADDRESS, ADDRESS, CODE, COUNT, COUNT, CODE)
def swiglu_backward_kernel(gradient, both, of_both, precision, rows, columns, is_aligned):
    words, more, of_y = (
        cuda.local.array(EIGHT, uint32),
        cuda.local.array(EIGHT, uint32),
        cuda.local.array(EIGHT, uint32),
    )
    gates, values, g = (
        cuda.local.array(EIGHT, float32),
        cuda.local.array(EIGHT, float32),
        cuda.local.array(EIGHT, float32),
    )
    column = own_column()
    if column >= columns:
        return
    left, row = columns - column, uint64(cuda.blockIdx.y)
    while row < rows:
        gate = uint64(2) * row * columns + column
        fetch(words, both, precision, gate, left, is_aligned)
        fetch(more, both, precision, gate + columns, left, is_aligned)
        fetch(of_y, gradient, precision, row * columns + column, left, is_aligned)
        widen(gates, words, precision)
        widen(values, more, precision)
        widen(g, of_y, precision)
        for i in range(EIGHT):
            share = _sigmoid(gates[i])
            bent = gates[i] * share
            gates[i] = g[i] * values[i] * (share + bent * (float32(1.0) - share))
            values[i] = g[i] * bent
        narrow(words, gates, precision)
        put(words, of_both, precision, gate, left, is_aligned)
        narrow(words, values, precision)
        put(words, of_both, precision, gate + columns, left, is_aligned)
        row += uint64(cuda.gridDim.y)


def swiglu_forward(both: torch.Tensor) -> torch.Tensor:
    both, columns = both.contiguous(), both.shape[-1]
    y, rows = both.new_empty(*both.shape[:-2], columns), both.numel() // max(1, 2 * columns)
    swiglu_forward_kernel.launch(
        grid_over(rows, columns), threads_for(columns),
        both.data_ptr(), y.data_ptr(), CODES[both.dtype], rows, columns, rows_aligned(columns, both, y),
    )  # fmt: skip
    return y


def swiglu_backward(gradient: torch.Tensor, both: torch.Tensor) -> torch.Tensor:
    gradient, both, columns = gradient.contiguous(), both.contiguous(), both.shape[-1]
    of_both, rows = torch.empty_like(both), both.numel() // max(1, 2 * columns)
    swiglu_backward_kernel.launch(
        grid_over(rows, columns), threads_for(columns),
        gradient.data_ptr(), both.data_ptr(), of_both.data_ptr(), CODES[both.dtype], rows, columns, rows_aligned(columns, gradient, both, of_both),
    )  # fmt: skip
    return of_both


# Rotary embedding (`hpczero_kernels.elementwise`): each thread turns eight pairs of a head, which lie half a head apart.
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
    position, left, first = (
        head // heads % positions,
        half - column,
        uint64(2) * head * half + column,
    )
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
