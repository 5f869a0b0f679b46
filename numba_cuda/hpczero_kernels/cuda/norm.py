"""LayerNorm and RMSNorm (`hpczero_kernels.norm`): a row is read once and stays in registers.

Forward: a block of threads has a row; a thread has two vectors of eight neighbouring columns.
Backward: a block takes rows at a stride of the grid's width and keeps its part of the weight's and
bias's gradients; a sum over the blocks, in a fixed order, completes them.
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
from hpczero_kernels.cuda.vectors import (
    EIGHT,
    element,
    fetch,
    load,
    narrow,
    put,
    put_element,
    store,
    widen,
)
from hpczero_kernels.norm import LONGEST

_VECTORS = 2  # of a thread
assert LONGEST == 512 * _VECTORS * EIGHT
_SUM_BLOCKS = 528  # of a backward: four per multiprocessor of the largest GPUs, on all GPUs


@inner
def _column(vector):
    """Return the first of a vector's eight columns."""
    return (uint64(vector) * uint64(cuda.blockDim.x) + uint64(cuda.threadIdx.x)) * uint64(EIGHT)


@inner
def _load_total(
    values, x, residual, has_residual, total, precision, first, columns, is_aligned
):  # fmt: skip
    """Set values to a row of x (+ residual, stored as total), and to zeros beyond its end."""
    words = cuda.local.array((_VECTORS, EIGHT), uint32)
    more = cuda.local.array((_VECTORS, EIGHT), uint32)
    numbers = cuda.local.array(EIGHT, float32)
    for vector in range(_VECTORS):
        column = _column(vector)
        if column < columns:
            left = columns - column
            fetch(words[vector], x, precision, first + column, left, is_aligned)
            if has_residual:
                fetch(more[vector], residual, precision, first + column, left, is_aligned)
    for vector in range(_VECTORS):
        column = _column(vector)
        for i in range(EIGHT):
            values[vector, i] = float32(0.0)
        if column < columns:
            left = columns - column
            widen(values[vector], words[vector], precision)
            if has_residual:
                widen(numbers, more[vector], precision)
                for i in range(EIGHT):
                    values[vector, i] += numbers[i]
                narrow(words[vector], values[vector], precision)
                put(words[vector], total, precision, first + column, left, is_aligned)
                widen(values[vector], words[vector], precision)  # as stored


@inner
def _statistics(values, columns, eps, centred):
    """Return the row's mean (0 unless centred) and inverse deviation."""
    share = float32(1.0) / float32(columns)
    thread_sum = float32(0.0)
    for vector in range(_VECTORS):
        for i in range(EIGHT):
            value = values[vector, i]
            thread_sum += value if centred else value * value
    mean = float32(0.0)
    square = block_sum(thread_sum) * share
    if centred:
        mean = square
        thread_sum = float32(0.0)
        for vector in range(_VECTORS):
            column = _column(vector)
            for i in range(EIGHT):
                if column + uint64(i) < columns:
                    thread_sum += (values[vector, i] - mean) * (values[vector, i] - mean)
        square = block_sum(thread_sum) * share
    return mean, float32(1.0) / sqrt(square + eps)


@kernel(
    ADDRESS, ADDRESS, CODE, ADDRESS, ADDRESS, ADDRESS, CODE, ADDRESS, ADDRESS, ADDRESS,
    CODE, COUNT, NUMBER, CODE, NUMBER, CODE, registers=64,
)  # fmt: skip
def forward(
    x, residual, has_residual, total, weight, bias, has_bias, y, means, inverses,
    precision, columns, eps, centred, offset, is_aligned,
):  # fmt: skip
    values = cuda.local.array((_VECTORS, EIGHT), float32)
    numbers = cuda.local.array(EIGHT, float32)
    row = uint64(cuda.blockIdx.x)
    first = row * columns
    _load_total(values, x, residual, has_residual, total, precision, first, columns, is_aligned)
    mean, inverse = _statistics(values, columns, eps, centred)
    if cuda.threadIdx.x == 0:
        if centred:
            put_element(means, FP32, row, mean)
        put_element(inverses, FP32, row, inverse)
    for vector in range(_VECTORS):
        column = _column(vector)
        if column < columns:
            left = columns - column
            load(numbers, weight, precision, column, left, is_aligned)
            for i in range(EIGHT):
                values[vector, i] = (values[vector, i] - mean) * inverse * (numbers[i] + offset)
            if has_bias:
                load(numbers, bias, precision, column, left, is_aligned)
                for i in range(EIGHT):
                    values[vector, i] += numbers[i]
            store(values[vector], y, precision, first + column, left, is_aligned)


@inner
def _load_weights(weights, weight, precision, columns, offset, is_aligned):
    """Set weights to the offset and those of the thread's columns; to anything beyond the last."""
    words = cuda.local.array(EIGHT, uint32)
    for vector in range(_VECTORS):
        column = _column(vector)
        for i in range(EIGHT):
            words[i] = uint32(0)
        if column < columns:
            fetch(words, weight, precision, column, columns - column, is_aligned)
        widen(weights[vector], words, precision)
        for i in range(EIGHT):
            weights[vector, i] += offset


@inner
def _load_row(
    g, normal, weights, sums, shifts, x, gradient, mean, inverse, precision, first, columns,
    is_aligned,
):  # fmt: skip
    """Set g to gradient * weight and normal to the normalised x; add the row to sums and shifts.

    Return the block's sums of g and of g * normal.
    """
    words = cuda.local.array(EIGHT, uint32)
    more = cuda.local.array(EIGHT, uint32)
    across = float32(0.0)
    along = float32(0.0)
    for vector in range(_VECTORS):
        column = _column(vector)
        if column < columns:
            left = columns - column
            fetch(words, x, precision, first + column, left, is_aligned)
            fetch(more, gradient, precision, first + column, left, is_aligned)
            widen(normal[vector], words, precision)
            widen(g[vector], more, precision)
            for i in range(EIGHT):
                normal[vector, i] = (normal[vector, i] - mean) * inverse
                sums[vector, i] += g[vector, i] * normal[vector, i]
                shifts[vector, i] += g[vector, i]
                g[vector, i] *= weights[vector, i]
                across += g[vector, i]
                along += g[vector, i] * normal[vector, i]
    return block_sums(across, along)


@inner
def _store_sums(sums, address, columns, is_aligned):
    """Store this block's part of a sum over rows."""
    for vector in range(_VECTORS):
        column = _column(vector)
        if column < columns:
            index = uint64(cuda.blockIdx.x) * columns + column
            store(sums[vector], address, FP32, index, columns - column, is_aligned)


@kernel(
    ADDRESS, ADDRESS, CODE, ADDRESS, ADDRESS, ADDRESS, ADDRESS, ADDRESS, ADDRESS, ADDRESS,
    CODE, COUNT, COUNT, CODE, NUMBER, CODE, registers=128,
)  # fmt: skip
def backward(
    gradient, grad_total, has_grad_total, x, weight, means, inverses, grad_x, grad_weight,
    grad_bias, precision, rows, columns, centred, offset, is_aligned,
):  # fmt: skip
    """Write grad_x, and each block's part of grad_weight and grad_bias (fp32 [blocks, columns]).

    What is not centred has neither means nor grad_bias.
    """
    g = cuda.local.array((_VECTORS, EIGHT), float32)
    normal = cuda.local.array((_VECTORS, EIGHT), float32)
    weights = cuda.local.array((_VECTORS, EIGHT), float32)
    sums = cuda.local.array((_VECTORS, EIGHT), float32)
    shifts = cuda.local.array((_VECTORS, EIGHT), float32)
    share = float32(1.0) / float32(columns)
    for vector in range(_VECTORS):
        for i in range(EIGHT):
            sums[vector, i] = float32(0.0)
            shifts[vector, i] = float32(0.0)
    _load_weights(weights, weight, precision, columns, offset, is_aligned)
    row = uint64(cuda.blockIdx.x)
    while row < rows:
        first = row * columns
        mean = element(means, FP32, row) if centred else float32(0.0)
        inverse = element(inverses, FP32, row)
        across, along = _load_row(
            g, normal, weights, sums, shifts, x, gradient, mean, inverse, precision, first, columns,
            is_aligned,
        )  # fmt: skip
        across = across * share if centred else float32(0.0)
        along *= share
        for vector in range(_VECTORS):
            column = _column(vector)
            if column < columns:
                left = columns - column
                for i in range(EIGHT):
                    g[vector, i] = inverse * (g[vector, i] - across - normal[vector, i] * along)
                if has_grad_total:
                    index = first + column
                    load(normal[vector], grad_total, precision, index, left, is_aligned)
                    for i in range(EIGHT):
                        g[vector, i] += normal[vector, i]
                store(g[vector], grad_x, precision, first + column, left, is_aligned)
        row += uint64(cuda.gridDim.x)
    _store_sums(sums, grad_weight, columns, is_aligned)
    if centred:
        _store_sums(shifts, grad_bias, columns, is_aligned)


def _threads(columns: int) -> int:
    return WARP * blocks(columns, WARP * _VECTORS * EIGHT)


def norm_forward(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    centred: bool,
    offset: float,
) -> tuple[torch.Tensor, ...]:
    """Compute hpczero_kernels.norm.forward_reference on a GPU."""
    x = x.contiguous()
    weight = weight.contiguous()
    residual = contiguous(residual)
    bias = contiguous(bias)
    columns = x.shape[-1]
    rows = x.numel() // columns
    total = x.new_empty(0) if residual is None else torch.empty_like(x)
    y = torch.empty_like(x)
    means, inverses = (
        x.new_empty(count, dtype=torch.float32) for count in (rows if centred else 0, rows)
    )
    forward.launch(
        (rows, 1), _threads(columns),
        x.data_ptr(), address_of(residual), residual is not None, total.data_ptr(),
        weight.data_ptr(), address_of(bias), bias is not None, y.data_ptr(), means.data_ptr(),
        inverses.data_ptr(), CODES[x.dtype], columns, eps, centred, offset,
        rows_aligned(columns, x, residual, total, weight, bias, y),
    )  # fmt: skip
    return y, total, means, inverses


def norm_backward(
    gradient: torch.Tensor,
    grad_total: torch.Tensor | None,
    x: torch.Tensor,
    weight: torch.Tensor,
    means: torch.Tensor,
    inverses: torch.Tensor,
    centred: bool,
    offset: float,
) -> tuple[torch.Tensor, ...]:
    """Compute hpczero_kernels.norm.backward_reference on a GPU."""
    gradient = gradient.contiguous()
    x = x.contiguous()
    weight = weight.contiguous()
    grad_total = contiguous(grad_total)
    columns = x.shape[-1]
    rows = x.numel() // columns
    count = min(rows, _SUM_BLOCKS)
    grad_x = torch.empty_like(x)
    grad_weight = x.new_empty(count, columns, dtype=torch.float32)
    grad_bias = x.new_empty(count, columns if centred else 0, dtype=torch.float32)
    backward.launch(
        (count, 1), _threads(columns),
        gradient.data_ptr(), address_of(grad_total), grad_total is not None, x.data_ptr(),
        weight.data_ptr(), means.data_ptr(), inverses.data_ptr(), grad_x.data_ptr(),
        grad_weight.data_ptr(), grad_bias.data_ptr(), CODES[x.dtype], rows, columns, centred,
        offset,
        rows_aligned(columns, gradient, grad_total, x, weight, grad_x, grad_weight, grad_bias),
    )  # fmt: skip
    return grad_x, grad_weight.sum(0).to(weight.dtype), grad_bias.sum(0).to(weight.dtype)
