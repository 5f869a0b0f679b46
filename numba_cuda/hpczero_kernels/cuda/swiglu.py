"""SwiGLU (`hpczero_kernels.swiglu`): gates and values lie side by side in one tensor [rows, 2, columns]."""

import torch
from numba import float32, uint32, uint64

from hpczero_kernels.cpu import CODES
from hpczero_kernels.cuda.intrinsics import exp, inner
from hpczero_kernels.cuda.launch import ADDRESS, CODE, COUNT, kernel, rows_aligned
from hpczero_kernels.cuda.target import cuda
from hpczero_kernels.cuda.tiles import grid_over, own_column, threads_for
from hpczero_kernels.cuda.vectors import EIGHT, fetch, narrow, put, widen


@inner
def _sigmoid(x):
    """Of |x|, so that exp does not overflow."""
    power = exp(-abs(x))
    share = float32(1.0) / (float32(1.0) + power)
    return share if x >= float32(0.0) else power * share


@kernel(ADDRESS, ADDRESS, CODE, COUNT, COUNT, CODE)
def forward(both, y, precision, rows, columns, is_aligned):
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
def backward(gradient, both, of_both, precision, rows, columns, is_aligned):
    words, more, of_y = cuda.local.array(EIGHT, uint32), cuda.local.array(EIGHT, uint32), cuda.local.array(EIGHT, uint32)
    gates, values, g = cuda.local.array(EIGHT, float32), cuda.local.array(EIGHT, float32), cuda.local.array(EIGHT, float32)
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
    forward.launch(
        grid_over(rows, columns), threads_for(columns),
        both.data_ptr(), y.data_ptr(), CODES[both.dtype], rows, columns, rows_aligned(columns, both, y),
    )  # fmt: skip
    return y


def swiglu_backward(gradient: torch.Tensor, both: torch.Tensor) -> torch.Tensor:
    gradient, both, columns = gradient.contiguous(), both.contiguous(), both.shape[-1]
    of_both, rows = torch.empty_like(both), both.numel() // max(1, 2 * columns)
    backward.launch(
        grid_over(rows, columns), threads_for(columns),
        gradient.data_ptr(), both.data_ptr(), of_both.data_ptr(), CODES[both.dtype], rows, columns, rows_aligned(columns, gradient, both, of_both),
    )  # fmt: skip
    return of_both
