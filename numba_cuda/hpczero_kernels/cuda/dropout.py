"""Bias, dropout by address and residual (`hpczero_kernels.dropout`) in one pass. What is dropped is computed again in backward, and nowhere kept."""

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
    narrow,
    own_column,
    put,
    threads_for,
    whole_number,
    widen,
)
from hpczero_kernels.dropout import Chosen, chosen_of, threshold

_words = inner(random.block_of_words.py_func)


@inner
def _drop(numbers, key, stream, position, limit, scale):
    """numbers [8], of which the first has this position in its sample."""
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
            place = position + uint64(i)
            a, b, c, d = _words(key, stream, place >> uint64(2))
            lane = place & uint64(3)
            word = (
                a
                if lane == uint64(0)
                else b
                if lane == uint64(1)
                else c
                if lane == uint64(2)
                else d
            )
            numbers[i] = numbers[i] * scale if word >= limit else float32(0.0)


@kernel(
    ADDRESS, ADDRESS, CODE, ADDRESS, CODE, ADDRESS, CODE, COUNT, COUNT, COUNT, COUNT, WORD, NUMBER, ADDRESS, COUNT, COUNT, COUNT, CODE
)  # fmt: skip
def forward(
    x, bias, has_bias, residual, has_residual, y, precision, rows, rows_of_sample, columns, key, limit, scale, samples, all_columns, first_row,
    first_column, is_aligned,
):  # fmt: skip
    words, more, numbers, shift = (
        cuda.local.array(EIGHT, uint32), cuda.local.array(EIGHT, uint32), cuda.local.array(EIGHT, float32), cuda.local.array(EIGHT, float32)
    )  # fmt: skip
    others = cuda.local.array(EIGHT, float32)
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
        if has_residual:
            fetch(more, residual, precision, row * columns + column, left, is_aligned)
        widen(numbers, words, precision)
        for i in range(EIGHT):
            numbers[i] += shift[i]
        sample = row // rows_of_sample
        position = (first_row + row - sample * rows_of_sample) * all_columns + first_column + column
        _drop(numbers, uint64(key), whole_number(samples, sample), position, limit, scale)
        if has_residual:
            widen(others, more, precision)
            for i in range(EIGHT):
                numbers[i] += others[i]
        narrow(words, numbers, precision)
        put(words, y, precision, row * columns + column, left, is_aligned)
        row += uint64(cuda.gridDim.y)


@kernel(
    ADDRESS,
    ADDRESS,
    ADDRESS,
    CODE,
    CODE,
    COUNT,
    COUNT,
    COUNT,
    COUNT,
    WORD,
    NUMBER,
    ADDRESS,
    COUNT,
    COUNT,
    COUNT,
    CODE,
)
def backward(
    gradient, of_x, of_bias, has_bias, precision, rows, rows_of_sample, columns, key, limit, scale, samples, all_columns, first_row, first_column,
    is_aligned,
):  # fmt: skip
    """of_bias: fp32 [blocks along y, columns], what each of them has of it."""
    words, numbers, sums = (
        cuda.local.array(EIGHT, uint32),
        cuda.local.array(EIGHT, float32),
        cuda.local.array(EIGHT, float32),
    )
    column = own_column()
    if column >= columns:
        return
    left, row = columns - column, uint64(cuda.blockIdx.y)
    for i in range(EIGHT):
        sums[i] = float32(0.0)
    while row < rows:
        fetch(words, gradient, precision, row * columns + column, left, is_aligned)
        widen(numbers, words, precision)
        sample = row // rows_of_sample
        position = (first_row + row - sample * rows_of_sample) * all_columns + first_column + column
        _drop(numbers, uint64(key), whole_number(samples, sample), position, limit, scale)
        for i in range(EIGHT):
            sums[i] += numbers[i]
        narrow(words, numbers, precision)
        put(words, of_x, precision, row * columns + column, left, is_aligned)
        row += uint64(cuda.gridDim.y)
    if has_bias:
        narrow(words, sums, FP32)
        put(words, of_bias, FP32, uint64(cuda.blockIdx.y) * columns + column, left, is_aligned)


def _choice(chosen: Chosen) -> tuple[int | float, ...]:
    """What is dropped, as the kernels are told."""
    place = chosen.place
    return (
        chosen.key, threshold(chosen.probability), chosen.scale, chosen.samples.data_ptr(), place.all_columns, place.first_row, place.first_column
    )  # fmt: skip


def dropout_forward(
    x: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor | None, *chosen: Any
) -> torch.Tensor:
    x, bias, residual, choice = (
        x.contiguous(),
        contiguous(bias),
        contiguous(residual),
        chosen_of(*chosen),
    )
    count, of_sample, columns = x.shape
    y = torch.empty_like(x)
    forward.launch(
        grid_over(count * of_sample, columns), threads_for(columns),
        x.data_ptr(), address_of(bias), bias is not None, address_of(residual), residual is not None, y.data_ptr(), CODES[x.dtype],
        count * of_sample, of_sample, columns, *_choice(choice), rows_aligned(columns, x, bias, residual, y),
    )  # fmt: skip
    return y


def dropout_backward(
    gradient: torch.Tensor, has_bias: bool, *chosen: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients of x and of the bias (empty: there is none); that of the residual is the gradient itself."""
    gradient, choice = gradient.contiguous(), chosen_of(*chosen)
    count, of_sample, columns = gradient.shape
    grid = (
        grid_with_sums(count * of_sample, columns)
        if has_bias
        else grid_over(count * of_sample, columns)
    )
    of_x, of_bias = (
        torch.empty_like(gradient),
        gradient.new_empty((grid[1], columns) if has_bias else (0, 0), dtype=torch.float32),
    )
    backward.launch(
        grid, threads_for(columns),
        gradient.data_ptr(), of_x.data_ptr(), of_bias.data_ptr(), has_bias, CODES[gradient.dtype], count * of_sample, of_sample, columns,
        *_choice(choice), rows_aligned(columns, gradient, of_x, of_bias),
    )  # fmt: skip
    return of_x, of_bias.sum(0).to(gradient.dtype)
