"""Bias and GELU (`hpczero_kernels.elementwise`) in one pass.

Backward computes forward's intermediate values again.
"""

import torch
from numba import float32, uint32, uint64

from hpczero_kernels.cpu import CODES, FP32
from hpczero_kernels.cuda.intrinsics import erf, exp, inner
from hpczero_kernels.cuda.launch import (
    ADDRESS,
    CODE,
    COUNT,
    address_of,
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
    load,
    own_column,
    store,
    threads_for,
    widen,
)

ZERO, HALF, ONE = float32(0.0), float32(0.5), float32(1.0)
_ROOT = float32(0.7978845608028654)  # sqrt(2 / pi)
_CUBE = float32(0.044715)
_HALF_ROOT = float32(0.7071067811865476)  # sqrt(1 / 2)
_DENSITY = float32(0.3989422804014327)  # 1 / sqrt(2 pi)


@inner
def tanh_of(x):
    """Return tanh(x), by |x|: exp does not overflow, and tanh(-x) is -tanh(x).

    For small x, where the quotient would cancel, by the polynomial of Cephes (S. Moshier).
    """
    power = exp(float32(-2.0) * abs(x))
    size = (ONE - power) / (ONE + power)
    z = x * x
    p = float32(-5.70498872745e-3)
    p = p * z + float32(2.06390887954e-2)
    p = p * z + float32(-5.37397155531e-2)
    p = p * z + float32(1.33314422036e-1)
    p = p * z + float32(-3.33332819422e-1)
    near = p * z * x + x
    far = size if x >= ZERO else -size
    return near if abs(x) < float32(0.625) else far


@inner
def gelu_of(x, by_tanh):
    half = HALF * x
    if by_tanh:
        return half + half * tanh_of(_ROOT * x * (ONE + _CUBE * x * x))
    return half + half * erf(x * _HALF_ROOT)


@inner
def slope_of(x, by_tanh):
    """Return the derivative of gelu_of."""
    if by_tanh:
        t = tanh_of(_ROOT * x * (ONE + _CUBE * x * x))
        inside = _ROOT * (ONE + float32(3.0) * _CUBE * x * x)
        return HALF * (ONE + t) + HALF * x * (ONE - t * t) * inside
    return HALF * (ONE + erf(x * _HALF_ROOT)) + x * _DENSITY * exp(-HALF * x * x)


@kernel(ADDRESS, ADDRESS, CODE, ADDRESS, CODE, COUNT, COUNT, CODE, CODE)
def gelu_forward_kernel(x, bias, has_bias, y, precision, rows, columns, by_tanh, is_aligned):
    numbers = cuda.local.array(EIGHT, float32)
    shift = cuda.local.array(EIGHT, float32)
    column = own_column()
    if column >= columns:
        return
    left = columns - column
    for i in range(EIGHT):
        shift[i] = ZERO
    if has_bias:
        load(shift, bias, precision, column, left, is_aligned)
    row = uint64(cuda.blockIdx.y)
    while row < rows:
        index = row * columns + column
        load(numbers, x, precision, index, left, is_aligned)
        for i in range(EIGHT):
            numbers[i] = gelu_of(numbers[i] + shift[i], by_tanh)
        store(numbers, y, precision, index, left, is_aligned)
        row += uint64(cuda.gridDim.y)


@kernel(ADDRESS, ADDRESS, ADDRESS, CODE, ADDRESS, ADDRESS, CODE, COUNT, COUNT, CODE, CODE)
def gelu_backward_kernel(
    gradient, x, bias, has_bias, grad_x, grad_bias, precision, rows, columns, by_tanh, is_aligned
):
    """Write grad_x, and in grad_bias (fp32 [blocks along y, columns]) a sum over rows per block."""
    words = cuda.local.array(EIGHT, uint32)
    more = cuda.local.array(EIGHT, uint32)
    numbers = cuda.local.array(EIGHT, float32)
    g = cuda.local.array(EIGHT, float32)
    shift = cuda.local.array(EIGHT, float32)
    sums = cuda.local.array(EIGHT, float32)
    column = own_column()
    if column >= columns:
        return
    left = columns - column
    for i in range(EIGHT):
        shift[i] = ZERO
        sums[i] = ZERO
    if has_bias:
        load(shift, bias, precision, column, left, is_aligned)
    row = uint64(cuda.blockIdx.y)
    while row < rows:
        index = row * columns + column
        fetch(words, x, precision, index, left, is_aligned)
        fetch(more, gradient, precision, index, left, is_aligned)
        widen(numbers, words, precision)
        widen(g, more, precision)
        for i in range(EIGHT):
            g[i] *= slope_of(numbers[i] + shift[i], by_tanh)
            sums[i] += g[i]
        store(g, grad_x, precision, index, left, is_aligned)
        row += uint64(cuda.gridDim.y)
    if has_bias:
        index = uint64(cuda.blockIdx.y) * columns + column
        store(sums, grad_bias, FP32, index, left, is_aligned)


def gelu_forward(x: torch.Tensor, bias: torch.Tensor | None, by_tanh: bool) -> torch.Tensor:
    x = x.contiguous()
    bias = contiguous(bias)
    columns = x.shape[-1]
    rows = x.numel() // max(1, columns)
    y = torch.empty_like(x)
    gelu_forward_kernel.launch(
        grid_over(rows, columns), threads_for(columns),
        x.data_ptr(), address_of(bias), bias is not None, y.data_ptr(), CODES[x.dtype],
        rows, columns, by_tanh, rows_aligned(columns, x, bias, y),
    )  # fmt: skip
    return y


def gelu_backward(
    gradient: torch.Tensor, x: torch.Tensor, bias: torch.Tensor | None, by_tanh: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of x and of the bias (empty without one)."""
    gradient = gradient.contiguous()
    x = x.contiguous()
    bias = contiguous(bias)
    columns = x.shape[-1]
    rows = x.numel() // max(1, columns)
    grid = grid_over(rows, columns) if bias is None else grid_with_sums(rows, columns)
    grad_x = torch.empty_like(x)
    sums_shape = (0, 0) if bias is None else (grid[1], columns)
    grad_bias = x.new_empty(sums_shape, dtype=torch.float32)
    gelu_backward_kernel.launch(
        grid, threads_for(columns),
        gradient.data_ptr(), x.data_ptr(), address_of(bias), bias is not None, grad_x.data_ptr(),
        grad_bias.data_ptr(), CODES[x.dtype], rows, columns, by_tanh,
        rows_aligned(columns, gradient, x, bias, grad_x, grad_bias),
    )  # fmt: skip
    return grad_x, grad_bias.sum(0).to(x.dtype)
