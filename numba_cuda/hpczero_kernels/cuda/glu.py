"""Gated linear units (`hpczero_kernels.glu`), each direction in one pass.

Gates and values lie side by side in one tensor [rows, 2, columns]. Backward computes forward's
intermediate values again.
"""

import torch
from numba import float32, uint32, uint64

from hpczero_kernels.cpu import CODES
from hpczero_kernels.cuda.elementwise import ONE, ZERO, gelu_of, slope_of
from hpczero_kernels.cuda.intrinsics import exp, inner
from hpczero_kernels.cuda.launch import ADDRESS, CODE, COUNT, kernel, rows_aligned
from hpczero_kernels.cuda.target import cuda
from hpczero_kernels.cuda.vectors import (
    EIGHT,
    fetch,
    grid_over,
    own_column,
    store,
    threads_for,
    widen,
)
from hpczero_kernels.glu import ACTIVATIONS, GELU, SILU


@inner
def _sigmoid(x):
    """Return sigmoid(x), by |x|: exp does not overflow."""
    power = exp(-abs(x))
    size = ONE / (ONE + power)
    return size if x >= ZERO else power * size


@inner
def _multiply(values, gates, activation):
    """Multiply values by the activation of gates."""
    if activation == SILU:
        for i in range(EIGHT):
            values[i] *= gates[i] * _sigmoid(gates[i])
    elif activation == GELU:
        for i in range(EIGHT):
            values[i] *= gelu_of(gates[i], True)
    else:
        for i in range(EIGHT):
            values[i] *= gelu_of(gates[i], False)


@inner
def _differentiate(values, gates, g, activation):
    """Set values and gates to their gradients; g is that of their product."""
    if activation == SILU:
        for i in range(EIGHT):
            sigmoid = _sigmoid(gates[i])
            silu = gates[i] * sigmoid
            gates[i] = g[i] * values[i] * (sigmoid + silu * (ONE - sigmoid))
            values[i] = g[i] * silu
    elif activation == GELU:
        for i in range(EIGHT):
            activated = gelu_of(gates[i], True)
            gates[i] = g[i] * values[i] * slope_of(gates[i], True)
            values[i] = g[i] * activated
    else:
        for i in range(EIGHT):
            activated = gelu_of(gates[i], False)
            gates[i] = g[i] * values[i] * slope_of(gates[i], False)
            values[i] = g[i] * activated


@kernel(ADDRESS, ADDRESS, CODE, COUNT, COUNT, CODE, CODE)
def forward(both, y, precision, rows, columns, activation, is_aligned):
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
        _multiply(values, gates, activation)
        store(values, y, precision, row * columns + column, left, is_aligned)
        row += uint64(cuda.gridDim.y)


@kernel(ADDRESS, ADDRESS, ADDRESS, CODE, COUNT, COUNT, CODE, CODE)
def backward(gradient, both, grad_both, precision, rows, columns, activation, is_aligned):
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
        _differentiate(values, gates, g, activation)
        store(gates, grad_both, precision, gate, left, is_aligned)
        store(values, grad_both, precision, gate + columns, left, is_aligned)
        row += uint64(cuda.gridDim.y)


def glu_forward(both: torch.Tensor, activation: str) -> torch.Tensor:
    both = both.contiguous()
    columns = both.shape[-1]
    rows = both.numel() // max(1, 2 * columns)
    y = both.new_empty(*both.shape[:-2], columns)
    forward.launch(
        grid_over(rows, columns), threads_for(columns),
        both.data_ptr(), y.data_ptr(), CODES[both.dtype], rows, columns,
        ACTIVATIONS[activation], rows_aligned(columns, both, y),
    )  # fmt: skip
    return y


def glu_backward(gradient: torch.Tensor, both: torch.Tensor, activation: str) -> torch.Tensor:
    gradient = gradient.contiguous()
    both = both.contiguous()
    columns = both.shape[-1]
    rows = both.numel() // max(1, 2 * columns)
    grad_both = torch.empty_like(both)
    backward.launch(
        grid_over(rows, columns), threads_for(columns),
        gradient.data_ptr(), both.data_ptr(), grad_both.data_ptr(), CODES[both.dtype],
        rows, columns, ACTIVATIONS[activation], rows_aligned(columns, gradient, both, grad_both),
    )  # fmt: skip
    return grad_both
