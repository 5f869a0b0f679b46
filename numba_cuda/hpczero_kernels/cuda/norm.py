"""LayerNorm and RMSNorm (`hpczero_kernels.norm`): a block of threads for a row, which is read once and stays in registers.

A thread has two times eight neighbouring columns. Backward: a block takes every so many-th row and keeps its share of the weight's gradient, so that
what is left to do is a sum over the blocks, in one order.
"""

import torch
from numba import float32, uint32, uint64

from hpczero_kernels.cpu import CODES, FP32
from hpczero_kernels.cuda.intrinsics import WARP, block_sum, block_sums, inner, sqrt
from hpczero_kernels.cuda.launch import (
    ADDRESS,
    CODE,
    COUNT,
    NUMBER,
    address_of,
    blocks,
    contiguous,
    kernel,
    rows_aligned,
)
from hpczero_kernels.cuda.target import cuda
from hpczero_kernels.cuda.vectors import EIGHT, element, fetch, narrow, put, put_element, widen
from hpczero_kernels.norm import LONGEST

PARTS = 2
assert LONGEST == 512 * PARTS * EIGHT
_BLOCKS = (
    528  # of a backward: four for each multiprocessor of the largest GPUs, the same everywhere
)


@inner
def _column(part):
    """The first of a thread's eight columns."""
    return (uint64(part) * uint64(cuda.blockDim.x) + uint64(cuda.threadIdx.x)) * uint64(EIGHT)


@inner
def _put_own(sums, address, columns, is_aligned):
    """What this block has of a sum over rows."""
    words = cuda.local.array(EIGHT, uint32)
    for part in range(PARTS):
        column = _column(part)
        if column < columns:
            narrow(words, sums[part], FP32)
            put(
                words,
                address,
                FP32,
                uint64(cuda.blockIdx.x) * columns + column,
                columns - column,
                is_aligned,
            )


@kernel(
    ADDRESS,
    ADDRESS,
    CODE,
    ADDRESS,
    ADDRESS,
    ADDRESS,
    CODE,
    ADDRESS,
    ADDRESS,
    ADDRESS,
    CODE,
    COUNT,
    NUMBER,
    CODE,
    CODE,
    registers=64,
)
def forward(
    x,
    residual,
    has_residual,
    total,
    weight,
    bias,
    has_bias,
    y,
    means,
    inverses,
    precision,
    columns,
    eps,
    centred,
    is_aligned,
):
    words, more, values = (
        cuda.local.array((PARTS, EIGHT), uint32), cuda.local.array((PARTS, EIGHT), uint32), cuda.local.array((PARTS, EIGHT), float32)
    )  # fmt: skip
    numbers, row, one = cuda.local.array(EIGHT, float32), uint64(cuda.blockIdx.x), float32(1.0)
    first = row * columns
    for part in range(PARTS):
        column = _column(part)
        left = columns - column if column < columns else uint64(0)
        if left > uint64(0):
            fetch(words[part], x, precision, first + column, left, is_aligned)
            if has_residual:
                fetch(more[part], residual, precision, first + column, left, is_aligned)
    own = float32(0.0)
    for part in range(PARTS):
        column = _column(part)
        left = columns - column if column < columns else uint64(0)
        for i in range(EIGHT):
            values[part, i] = float32(0.0)
        if left > uint64(0):
            widen(values[part], words[part], precision)
            if has_residual:
                widen(numbers, more[part], precision)
                for i in range(EIGHT):
                    values[part, i] += numbers[i]
                narrow(words[part], values[part], precision)
                put(words[part], total, precision, first + column, left, is_aligned)
                widen(values[part], words[part], precision)  # as stored
        for i in range(EIGHT):
            own += values[part, i] if centred else values[part, i] * values[part, i]
    share = one / float32(columns)
    mean, square = float32(0.0), block_sum(own) * share
    if centred:
        mean, own = square, float32(0.0)
        for part in range(PARTS):
            column = _column(part)
            for i in range(EIGHT):
                if column + uint64(i) < columns:
                    own += (values[part, i] - mean) * (values[part, i] - mean)
        square = block_sum(own) * share
    inverse = one / sqrt(square + eps)
    if cuda.threadIdx.x == 0:
        put_element(means, FP32, row, mean)
        put_element(inverses, FP32, row, inverse)
    for part in range(PARTS):
        column = _column(part)
        if column < columns:
            left = columns - column
            fetch(words[part], weight, precision, column, left, is_aligned)
            widen(numbers, words[part], precision)
            for i in range(EIGHT):
                values[part, i] = (values[part, i] - mean) * inverse * numbers[i]
            if has_bias:
                fetch(words[part], bias, precision, column, left, is_aligned)
                widen(numbers, words[part], precision)
                for i in range(EIGHT):
                    values[part, i] += numbers[i]
            narrow(words[part], values[part], precision)
            put(words[part], y, precision, first + column, left, is_aligned)


@kernel(
    ADDRESS,
    ADDRESS,
    CODE,
    ADDRESS,
    ADDRESS,
    ADDRESS,
    ADDRESS,
    ADDRESS,
    ADDRESS,
    ADDRESS,
    CODE,
    COUNT,
    COUNT,
    CODE,
    CODE,
    registers=128,
)
def backward(
    gradient,
    of_total,
    has_of_total,
    x,
    weight,
    means,
    inverses,
    of_x,
    of_weight,
    of_bias,
    precision,
    rows,
    columns,
    centred,
    is_aligned,
):
    """of_weight and of_bias: fp32 [blocks, columns], what each block has of them."""
    words, more, g, normal = (
        cuda.local.array(EIGHT, uint32), cuda.local.array(EIGHT, uint32),
        cuda.local.array((PARTS, EIGHT), float32), cuda.local.array((PARTS, EIGHT), float32),
    )  # fmt: skip
    weights, sums, shifts = (
        cuda.local.array((PARTS, EIGHT), float32), cuda.local.array((PARTS, EIGHT), float32), cuda.local.array((PARTS, EIGHT), float32)
    )  # fmt: skip
    share = float32(1.0) / float32(columns)
    for part in range(PARTS):
        column = _column(part)
        left = columns - column if column < columns else uint64(0)
        for i in range(EIGHT):
            words[i] = uint32(0)
            sums[part, i], shifts[part, i] = float32(0.0), float32(0.0)
        if left > uint64(0):
            fetch(words, weight, precision, column, left, is_aligned)
        widen(weights[part], words, precision)
    row = uint64(cuda.blockIdx.x)
    while row < rows:
        mean, inverse = element(means, FP32, row), element(inverses, FP32, row)
        first, along, across = row * columns, float32(0.0), float32(0.0)
        for part in range(PARTS):
            column = _column(part)
            if column < columns:
                left = columns - column
                fetch(words, x, precision, first + column, left, is_aligned)
                fetch(more, gradient, precision, first + column, left, is_aligned)
                widen(normal[part], words, precision)
                widen(g[part], more, precision)
                for i in range(EIGHT):
                    normal[part, i] = (normal[part, i] - mean) * inverse
                    sums[part, i] += g[part, i] * normal[part, i]
                    shifts[part, i] += g[part, i]
                    g[part, i] *= weights[part, i]
                    across += g[part, i]
                    along += g[part, i] * normal[part, i]
        across, along = block_sums(across, along)
        across = across * share if centred else float32(0.0)
        along *= share
        for part in range(PARTS):
            column = _column(part)
            if column < columns:
                left = columns - column
                for i in range(EIGHT):
                    g[part, i] = inverse * (g[part, i] - across - normal[part, i] * along)
                if has_of_total:
                    fetch(words, of_total, precision, first + column, left, is_aligned)
                    widen(normal[part], words, precision)
                    for i in range(EIGHT):
                        g[part, i] += normal[part, i]
                narrow(words, g[part], precision)
                put(words, of_x, precision, first + column, left, is_aligned)
        row += uint64(cuda.gridDim.x)
    _put_own(sums, of_weight, columns, is_aligned)
    _put_own(shifts, of_bias, columns, is_aligned)


def _threads(columns: int) -> int:
    return WARP * blocks(columns, WARP * PARTS * EIGHT)


def norm_forward(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    centred: bool,
) -> tuple[torch.Tensor, ...]:
    """As hpczero_kernels.norm.forward_reference."""
    x, weight, columns = x.contiguous(), weight.contiguous(), x.shape[-1]
    rows = x.numel() // columns
    residual, bias = contiguous(residual), contiguous(bias)
    total = x.new_empty(0) if residual is None else torch.empty_like(x)
    y, (means, inverses) = (
        torch.empty_like(x),
        (x.new_empty(rows, dtype=torch.float32) for _ in range(2)),
    )
    forward.launch(
        (rows, 1), _threads(columns),
        x.data_ptr(), address_of(residual), residual is not None, total.data_ptr(), weight.data_ptr(), address_of(bias), bias is not None,
        y.data_ptr(), means.data_ptr(), inverses.data_ptr(), CODES[x.dtype], columns, eps, centred,
        rows_aligned(columns, x, residual, total, weight, bias, y),
    )  # fmt: skip
    return y, total, means, inverses


def norm_backward(
    gradient: torch.Tensor, of_total: torch.Tensor | None, x: torch.Tensor, weight: torch.Tensor, means: torch.Tensor, inverses: torch.Tensor,
    centred: bool,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """As hpczero_kernels.norm.backward_reference."""
    gradient, x, weight, columns = (
        gradient.contiguous(),
        x.contiguous(),
        weight.contiguous(),
        x.shape[-1],
    )
    of_total = contiguous(of_total)
    rows = x.numel() // columns
    parts = min(rows, _BLOCKS)
    of_x, of_weight, of_bias = (
        torch.empty_like(x),
        *(x.new_empty(parts, columns, dtype=torch.float32) for _ in range(2)),
    )
    backward.launch(
        (parts, 1), _threads(columns),
        gradient.data_ptr(), address_of(of_total), of_total is not None, x.data_ptr(), weight.data_ptr(), means.data_ptr(), inverses.data_ptr(),
        of_x.data_ptr(), of_weight.data_ptr(), of_bias.data_ptr(), CODES[x.dtype], rows, columns, centred,
        rows_aligned(columns, gradient, of_total, x, weight, of_x, of_weight, of_bias),
    )  # fmt: skip
    return of_x, of_weight.sum(0).to(weight.dtype), of_bias.sum(0).to(weight.dtype)
