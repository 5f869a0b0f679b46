"""Bias, dropout by address and residual (`hpczero_kernels.dropout`) in one pass.

Backward computes the mask again; it is kept nowhere.
"""

from typing import Any

import torch
from numba import float32, uint32, uint64

from hpczero_kernels import random
from hpczero_kernels.cpu import CODES, FP32
from hpczero_kernels.cuda.intrinsics import inner
from hpczero_kernels.cuda.launch import (
    ADDRESS,
    CODE,
    COUNT,
    NUMBER,
    WORD,
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
    whole_number,
    widen,
)
from hpczero_kernels.dropout import DropoutParameters, dropout_parameters, threshold

_words = inner(random.block_of_words.py_func)


@inner
def _drop(numbers, key, stream, position, limit, scale):
    """Drop or scale numbers [8], of which the first has this position in its sample."""
    if position & uint64(3) == uint64(0):
        a, b, c, d = _words(key, stream, position >> uint64(2))
        e, f, g, h = _words(key, stream, (position >> uint64(2)) + uint64(1))
        numbers[0] = numbers[0] * scale if a >= limit else float32(0.0)
        numbers[1] = numbers[1] * scale if b >= limit else float32(0.0)
        numbers[2] = numbers[2] * scale if c >= limit else float32(0.0)
        numbers[3] = numbers[3] * scale if d >= limit else float32(0.0)
        numbers[4] = numbers[4] * scale if e >= limit else float32(0.0)
        numbers[5] = numbers[5] * scale if f >= limit else float32(0.0)
        numbers[6] = numbers[6] * scale if g >= limit else float32(0.0)
        numbers[7] = numbers[7] * scale if h >= limit else float32(0.0)
    else:
        for i in range(EIGHT):
            index = position + uint64(i)
            a, b, c, d = _words(key, stream, index >> uint64(2))
            lane = index & uint64(3)
            low = a if lane == uint64(0) else b
            high = c if lane == uint64(2) else d
            word = low if lane < uint64(2) else high
            numbers[i] = numbers[i] * scale if word >= limit else float32(0.0)


@kernel(
    ADDRESS, ADDRESS, CODE, ADDRESS, CODE, ADDRESS, CODE,
    COUNT, COUNT, COUNT, COUNT, WORD, NUMBER, ADDRESS, COUNT, COUNT, COUNT, CODE,
)  # fmt: skip
def forward(
    x, bias, has_bias, residual, has_residual, y, precision,
    rows, sample_rows, columns, key, limit, scale, samples, all_columns, first_row, first_column,
    is_aligned,
):  # fmt: skip
    words = cuda.local.array(EIGHT, uint32)
    more = cuda.local.array(EIGHT, uint32)
    numbers = cuda.local.array(EIGHT, float32)
    others = cuda.local.array(EIGHT, float32)
    shift = cuda.local.array(EIGHT, float32)
    column = own_column()
    if column >= columns:
        return
    left = columns - column
    for i in range(EIGHT):
        shift[i] = float32(0.0)
    if has_bias:
        load(shift, bias, precision, column, left, is_aligned)
    row = uint64(cuda.blockIdx.y)
    while row < rows:
        index = row * columns + column
        fetch(words, x, precision, index, left, is_aligned)
        if has_residual:
            fetch(more, residual, precision, index, left, is_aligned)
        widen(numbers, words, precision)
        for i in range(EIGHT):
            numbers[i] += shift[i]
        sample = row // sample_rows
        position = (first_row + row - sample * sample_rows) * all_columns + first_column + column
        _drop(numbers, uint64(key), whole_number(samples, sample), position, limit, scale)
        if has_residual:
            widen(others, more, precision)
            for i in range(EIGHT):
                numbers[i] += others[i]
        store(numbers, y, precision, index, left, is_aligned)
        row += uint64(cuda.gridDim.y)


@kernel(
    ADDRESS, ADDRESS, ADDRESS, CODE, CODE,
    COUNT, COUNT, COUNT, COUNT, WORD, NUMBER, ADDRESS, COUNT, COUNT, COUNT, CODE,
)  # fmt: skip
def backward(
    gradient, grad_x, grad_bias, has_bias, precision,
    rows, sample_rows, columns, key, limit, scale, samples, all_columns, first_row, first_column,
    is_aligned,
):  # fmt: skip
    """Write grad_x, and in grad_bias (fp32 [blocks along y, columns]) a sum over rows per block."""
    numbers = cuda.local.array(EIGHT, float32)
    sums = cuda.local.array(EIGHT, float32)
    column = own_column()
    if column >= columns:
        return
    left = columns - column
    for i in range(EIGHT):
        sums[i] = float32(0.0)
    row = uint64(cuda.blockIdx.y)
    while row < rows:
        index = row * columns + column
        load(numbers, gradient, precision, index, left, is_aligned)
        sample = row // sample_rows
        position = (first_row + row - sample * sample_rows) * all_columns + first_column + column
        _drop(numbers, uint64(key), whole_number(samples, sample), position, limit, scale)
        for i in range(EIGHT):
            sums[i] += numbers[i]
        store(numbers, grad_x, precision, index, left, is_aligned)
        row += uint64(cuda.gridDim.y)
    if has_bias:
        index = uint64(cuda.blockIdx.y) * columns + column
        store(sums, grad_bias, FP32, index, left, is_aligned)


def _arguments(chosen: DropoutParameters) -> tuple[int | float, ...]:
    """Return the parameters of dropout as the kernels take them: key to first_column."""
    return (
        chosen.key,
        threshold(chosen.probability),
        chosen.scale,
        chosen.samples.data_ptr(),
        chosen.place.all_columns,
        chosen.place.first_row,
        chosen.place.first_column,
    )


def dropout_forward(
    x: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor | None, *chosen: Any
) -> torch.Tensor:
    x = x.contiguous()
    bias = contiguous(bias)
    residual = contiguous(residual)
    count, sample_rows, columns = x.shape
    rows = count * sample_rows
    y = torch.empty_like(x)
    forward.launch(
        grid_over(rows, columns), threads_for(columns),
        x.data_ptr(), address_of(bias), bias is not None, address_of(residual),
        residual is not None, y.data_ptr(), CODES[x.dtype], rows, sample_rows, columns,
        *_arguments(dropout_parameters(*chosen)), rows_aligned(columns, x, bias, residual, y),
    )  # fmt: skip
    return y


def dropout_backward(
    gradient: torch.Tensor, has_bias: bool, *chosen: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of x and the bias (empty without one); the residual's is `gradient`."""
    gradient = gradient.contiguous()
    count, sample_rows, columns = gradient.shape
    rows = count * sample_rows
    grid = grid_with_sums(rows, columns) if has_bias else grid_over(rows, columns)
    grad_x = torch.empty_like(gradient)
    sums_shape = (grid[1], columns) if has_bias else (0, 0)
    grad_bias = gradient.new_empty(sums_shape, dtype=torch.float32)
    backward.launch(
        grid, threads_for(columns),
        gradient.data_ptr(), grad_x.data_ptr(), grad_bias.data_ptr(), has_bias,
        CODES[gradient.dtype], rows, sample_rows, columns, *_arguments(dropout_parameters(*chosen)),
        rows_aligned(columns, gradient, grad_x, grad_bias),
    )  # fmt: skip
    return grad_x, grad_bias.sum(0).to(gradient.dtype)
