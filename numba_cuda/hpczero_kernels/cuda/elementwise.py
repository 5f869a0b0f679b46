"""Bias and GELU, SwiGLU and rotary embedding (`hpczero_kernels.elementwise`), each in one pass.

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
    load,
    own_column,
    store,
    threads_for,
    widen,
)

_ZERO, _HALF, _ONE = float32(0.0), float32(0.5), float32(1.0)
_ROOT = float32(0.7978845608028654)  # sqrt(2 / pi)
_CUBE = float32(0.044715)
_HALF_ROOT = float32(0.7071067811865476)  # sqrt(1 / 2)
_DENSITY = float32(0.3989422804014327)  # 1 / sqrt(2 pi)


@inner
def _tanh(x):
    """Return tanh(x), by |x|: exp does not overflow, and tanh(-x) is -tanh(x)."""
    power = exp(float32(-2.0) * abs(x))
    size = (_ONE - power) / (_ONE + power)
    if x >= _ZERO:
        return size
    return -size if x < _ZERO else x


@inner
def _gelu(x, by_tanh):
    half = _HALF * x
    if by_tanh:
        return half + half * _tanh(_ROOT * x * (_ONE + _CUBE * x * x))
    return half + half * erf(x * _HALF_ROOT)


@inner
def _slope(x, by_tanh):
    """Return the derivative of _gelu."""
    if by_tanh:
        t = _tanh(_ROOT * x * (_ONE + _CUBE * x * x))
        inside = _ROOT * (_ONE + float32(3.0) * _CUBE * x * x)
        return _HALF * (_ONE + t) + _HALF * x * (_ONE - t * t) * inside
    return _HALF * (_ONE + erf(x * _HALF_ROOT)) + x * _DENSITY * exp(-_HALF * x * x)


@kernel(ADDRESS, ADDRESS, CODE, ADDRESS, CODE, COUNT, COUNT, CODE, CODE)
def gelu_forward_kernel(x, bias, has_bias, y, precision, rows, columns, by_tanh, is_aligned):
    numbers = cuda.local.array(EIGHT, float32)
    shift = cuda.local.array(EIGHT, float32)
    column = own_column()
    if column >= columns:
        return
    left = columns - column
    for i in range(EIGHT):
        shift[i] = _ZERO
    if has_bias:
        load(shift, bias, precision, column, left, is_aligned)
    row = uint64(cuda.blockIdx.y)
    while row < rows:
        index = row * columns + column
        load(numbers, x, precision, index, left, is_aligned)
        for i in range(EIGHT):
            numbers[i] = _gelu(numbers[i] + shift[i], by_tanh)
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
        shift[i] = _ZERO
        sums[i] = _ZERO
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
            g[i] *= _slope(numbers[i] + shift[i], by_tanh)
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


# SwiGLU: gates and values lie side by side in one tensor [rows, 2, columns].
@inner
def _sigmoid(x):
    """Return sigmoid(x), by |x|: exp does not overflow."""
    power = exp(-abs(x))
    size = _ONE / (_ONE + power)
    return size if x >= _ZERO else power * size


@kernel(ADDRESS, ADDRESS, CODE, COUNT, COUNT, CODE)
def swiglu_forward_kernel(both, y, precision, rows, columns, is_aligned):
    words = cuda.local.array(EIGHT, uint32)
    more = cuda.local.array(EIGHT, uint32)
    gates = cuda.local.array(EIGHT, float32)
    values = cuda.local.array(EIGHT, float32)
    column = own_column()
    if column >= columns:
        return
    left = columns - column
    row = uint64(cuda.blockIdx.y)
    while row < rows:
        gate = uint64(2) * row * columns + column
        fetch(words, both, precision, gate, left, is_aligned)
        fetch(more, both, precision, gate + columns, left, is_aligned)
        widen(gates, words, precision)
        widen(values, more, precision)
        for i in range(EIGHT):
            values[i] *= gates[i] * _sigmoid(gates[i])
        store(values, y, precision, row * columns + column, left, is_aligned)
        row += uint64(cuda.gridDim.y)


@kernel(ADDRESS, ADDRESS, ADDRESS, CODE, COUNT, COUNT, CODE)
def swiglu_backward_kernel(gradient, both, grad_both, precision, rows, columns, is_aligned):
    words = cuda.local.array(EIGHT, uint32)
    more = cuda.local.array(EIGHT, uint32)
    g_words = cuda.local.array(EIGHT, uint32)
    gates = cuda.local.array(EIGHT, float32)
    values = cuda.local.array(EIGHT, float32)
    g = cuda.local.array(EIGHT, float32)
    column = own_column()
    if column >= columns:
        return
    left = columns - column
    row = uint64(cuda.blockIdx.y)
    while row < rows:
        gate = uint64(2) * row * columns + column
        fetch(words, both, precision, gate, left, is_aligned)
        fetch(more, both, precision, gate + columns, left, is_aligned)
        fetch(g_words, gradient, precision, row * columns + column, left, is_aligned)
        widen(gates, words, precision)
        widen(values, more, precision)
        widen(g, g_words, precision)
        for i in range(EIGHT):
            sigmoid = _sigmoid(gates[i])
            silu = gates[i] * sigmoid
            gates[i] = g[i] * values[i] * (sigmoid + silu * (_ONE - sigmoid))
            values[i] = g[i] * silu
        store(gates, grad_both, precision, gate, left, is_aligned)
        store(values, grad_both, precision, gate + columns, left, is_aligned)
        row += uint64(cuda.gridDim.y)


def swiglu_forward(both: torch.Tensor) -> torch.Tensor:
    both = both.contiguous()
    columns = both.shape[-1]
    rows = both.numel() // max(1, 2 * columns)
    y = both.new_empty(*both.shape[:-2], columns)
    swiglu_forward_kernel.launch(
        grid_over(rows, columns), threads_for(columns),
        both.data_ptr(), y.data_ptr(), CODES[both.dtype], rows, columns,
        rows_aligned(columns, both, y),
    )  # fmt: skip
    return y


def swiglu_backward(gradient: torch.Tensor, both: torch.Tensor) -> torch.Tensor:
    gradient = gradient.contiguous()
    both = both.contiguous()
    columns = both.shape[-1]
    rows = both.numel() // max(1, 2 * columns)
    grad_both = torch.empty_like(both)
    swiglu_backward_kernel.launch(
        grid_over(rows, columns), threads_for(columns),
        gradient.data_ptr(), both.data_ptr(), grad_both.data_ptr(), CODES[both.dtype],
        rows, columns, rows_aligned(columns, gradient, both, grad_both),
    )  # fmt: skip
    return grad_both


# Rotary embedding: each thread turns eight pairs of a head, which lie half a head apart.
@kernel(ADDRESS, ADDRESS, ADDRESS, ADDRESS, CODE, COUNT, COUNT, COUNT, COUNT, CODE, CODE)
def turn(x, cosines, sines, y, precision, count, positions, heads, half, back, is_aligned):
    """Turn `count` groups of eight pairs.

    x [samples, positions, heads, 2, half]; cosines, sines fp32 [positions, half].
    """
    words = cuda.local.array(EIGHT, uint32)
    more = cuda.local.array(EIGHT, uint32)
    c_words = cuda.local.array(EIGHT, uint32)
    s_words = cuda.local.array(EIGHT, uint32)
    low = cuda.local.array(EIGHT, float32)
    high = cuda.local.array(EIGHT, float32)
    c = cuda.local.array(EIGHT, float32)
    s = cuda.local.array(EIGHT, float32)
    number = uint64(cuda.blockIdx.x) * uint64(cuda.blockDim.x) + uint64(cuda.threadIdx.x)
    if number >= count:
        return
    head_groups = (half + uint64(EIGHT - 1)) // uint64(EIGHT)
    head = number // head_groups
    column = (number - head * head_groups) * uint64(EIGHT)
    left = half - column
    first = uint64(2) * head * half + column
    angle = head // heads % positions * half + column
    fetch(words, x, precision, first, left, is_aligned)
    fetch(more, x, precision, first + half, left, is_aligned)
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
    store(high, y, precision, first + half, left, is_aligned)


def rotary(x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor, back: bool) -> torch.Tensor:
    """Return x [samples, positions, heads, head_dim] turned; `back` turns by the opposite angle."""
    x = x.contiguous()
    cosines = cosines.contiguous()
    sines = sines.contiguous()
    _, positions, heads, head_dim = x.shape
    y = torch.empty_like(x)
    half = head_dim // 2
    count = x.numel() // max(1, head_dim) * blocks(half, EIGHT)
    fits = half % EIGHT == 0 and bool(aligned(x, cosines, sines, y))
    turn.launch(
        (blocks(count, THREADS), 1), THREADS,
        x.data_ptr(), cosines.data_ptr(), sines.data_ptr(), y.data_ptr(), CODES[x.dtype],
        count, positions, heads, half, back, fits,
    )  # fmt: skip
    return y
