"""Bias and GELU (`hpczero_kernels.elementwise`) in one pass; backward computes what it needs of forward again."""

import torch
from numba import float32, uint32, uint64

from hpczero_kernels.cpu import CODES, FP32
from hpczero_kernels.cuda.intrinsics import erf, exp, inner
from hpczero_kernels.cuda.launch import ADDRESS, CODE, COUNT, address_of, contiguous, kernel, rows_aligned
from hpczero_kernels.cuda.target import cuda
from hpczero_kernels.cuda.tiles import grid_over, grid_with_sums, own_column, threads_for
from hpczero_kernels.cuda.vectors import EIGHT, fetch, narrow, put, widen

_ROOT, _CUBE = float32(0.7978845608028654), float32(0.044715)  # sqrt(2 / pi)
_HALF_ROOT, _DENSITY = float32(0.7071067811865476), float32(0.3989422804014327)  # sqrt(1 / 2), 1 / sqrt(2 pi)


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
        return float32(0.5) * (float32(1.0) + t) + float32(0.5) * x * (float32(1.0) - t * t) * inside
    return float32(0.5) * (float32(1.0) + erf(x * _HALF_ROOT)) + x * _DENSITY * exp(float32(-0.5) * x * x)


@kernel(ADDRESS, ADDRESS, CODE, ADDRESS, CODE, COUNT, COUNT, CODE, CODE)
def forward(x, bias, has_bias, y, precision, rows, columns, by_tanh, is_aligned):
    words, numbers, shift = cuda.local.array(EIGHT, uint32), cuda.local.array(EIGHT, float32), cuda.local.array(EIGHT, float32)
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
def backward(gradient, x, bias, has_bias, of_x, of_bias, precision, rows, columns, by_tanh, is_aligned):
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
    forward.launch(
        grid_over(rows, columns), threads_for(columns),
        x.data_ptr(), address_of(bias), bias is not None, y.data_ptr(), CODES[x.dtype], rows, columns, by_tanh,
        rows_aligned(columns, x, bias, y),
    )  # fmt: skip
    return y


def gelu_backward(gradient: torch.Tensor, x: torch.Tensor, bias: torch.Tensor | None, by_tanh: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients of x and of the bias (empty: there is none)."""
    gradient, x, bias, columns = gradient.contiguous(), x.contiguous(), contiguous(bias), x.shape[-1]
    rows = x.numel() // max(1, columns)
    grid = grid_over(rows, columns) if bias is None else grid_with_sums(rows, columns)
    of_x, of_bias = torch.empty_like(x), x.new_empty((0, 0) if bias is None else (grid[1], columns), dtype=torch.float32)
    backward.launch(
        grid, threads_for(columns),
        gradient.data_ptr(), x.data_ptr(), address_of(bias), bias is not None, of_x.data_ptr(), of_bias.data_ptr(), CODES[x.dtype], rows, columns,
        by_tanh, rows_aligned(columns, gradient, x, bias, of_x, of_bias),
    )  # fmt: skip
    return of_x, of_bias.sum(0).to(x.dtype)
