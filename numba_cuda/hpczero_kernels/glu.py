"""Gated linear units (Shazeer 2020): SwiGLU, and GeGLU by tanh or exact.

For x [..., 2, columns] that holds gates and values:

    y = activation(gate) * value
    silu: gate * sigmoid(gate); gelu, gelu_exact: those of `elementwise`
"""

from functools import partial
from typing import Any

import numpy as np
import torch
from numba import uint64
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from hpczero_kernels.cpu import (
    CODES,
    STRETCH,
    address_of,
    inner,
    kernel,
    load,
    pool_of_torch,
    store,
)
from hpczero_kernels.cpu_functions import gelu_by_erf, gelu_by_tanh, silu
from hpczero_kernels.dispatch import TORCH, choose, empty_contiguous, operator, upcast_half
from hpczero_kernels.elementwise import gelu_reference, gelu_slope

SILU, GELU, GELU_EXACT = 0, 1, 2
ACTIVATIONS = {"silu": SILU, "gelu": GELU, "gelu_exact": GELU_EXACT}


def forward_reference(x: Tensor, activation: str) -> Tensor:
    return glu_reference(upcast_half(x), activation).to(x.dtype)


def backward_reference(gradient: Tensor, x: Tensor, activation: str) -> Tensor:
    gate, value = upcast_half(x).unbind(-2)
    g = upcast_half(gradient)
    if activation == "silu":
        sigmoid = torch.sigmoid(gate)
        slope = sigmoid * (1 + gate * (1 - sigmoid))
    else:
        slope = gelu_slope(gate, activation == "gelu")
    return torch.stack([g * value * slope, g * _activated(gate, activation)], -2).to(x.dtype)


# Kernels for CPUs: x and the others are addresses; columns of a row go by stretches.
@inner
def _multiply(values, gates, size, activation):
    """Multiply values by the activation of gates."""
    if activation == SILU:
        for i in range(size):
            values[i] *= silu(gates[i])[0]
    elif activation == GELU:
        for i in range(size):
            values[i] *= gelu_by_tanh(gates[i])[0]
    else:
        for i in range(size):
            values[i] *= gelu_by_erf(gates[i])[0]


@inner
def _differentiate(values, gates, g, size, activation):
    """Set values and gates to their gradients; g is that of their product."""
    if activation == SILU:
        for i in range(size):
            activated, slope = silu(gates[i])
            gates[i] = g[i] * values[i] * slope
            values[i] = g[i] * activated
    elif activation == GELU:
        for i in range(size):
            activated, slope = gelu_by_tanh(gates[i])
            gates[i] = g[i] * values[i] * slope
            values[i] = g[i] * activated
    else:
        for i in range(size):
            activated, slope = gelu_by_erf(gates[i])
            gates[i] = g[i] * values[i] * slope
            values[i] = g[i] * activated


@kernel("void(uint64, uint64, int64, uint64, int64, uint64, uint64)")
def _glu_forward(x, y, precision, columns, activation, start, stop):
    """Set elements start .. stop - 1 of y."""
    gates = np.empty(STRETCH, np.float32)
    values = np.empty(STRETCH, np.float32)
    while start < stop:
        row = start // columns
        size = min(stop - start, (row + uint64(1)) * columns - start, uint64(STRETCH))
        gate = start + row * columns
        load(gates, size, x, precision, gate)
        load(values, size, x, precision, gate + columns)
        _multiply(values, gates, size, activation)
        store(values, size, y, precision, start)
        start += size


@kernel("void(uint64, uint64, uint64, int64, uint64, int64, uint64, uint64)")
def _glu_backward(gradient, x, grad_x, precision, columns, activation, start, stop):
    """Set what follows from elements start .. stop - 1 of the gradient."""
    gates = np.empty(STRETCH, np.float32)
    values = np.empty(STRETCH, np.float32)
    g = np.empty(STRETCH, np.float32)
    while start < stop:
        row = start // columns
        size = min(stop - start, (row + uint64(1)) * columns - start, uint64(STRETCH))
        gate = start + row * columns
        load(gates, size, x, precision, gate)
        load(values, size, x, precision, gate + columns)
        load(g, size, gradient, precision, start)
        _differentiate(values, gates, g, size, activation)
        store(gates, size, grad_x, precision, gate)
        store(values, size, grad_x, precision, gate + columns)
        start += size


def forward_on_cpu(x: Tensor, activation: str) -> Tensor:
    if x.dtype not in CODES:
        return forward_reference(x, activation)
    x = x.contiguous()
    y = x.new_empty(*x.shape[:-2], x.shape[-1])
    arguments = (
        address_of(x),
        address_of(y),
        CODES[x.dtype],
        x.shape[-1],
        ACTIVATIONS[activation],
    )
    pool_of_torch().run(partial(_glu_forward, *arguments), y.numel())
    return y


def backward_on_cpu(gradient: Tensor, x: Tensor, activation: str) -> Tensor:
    if x.dtype not in CODES:
        return backward_reference(gradient, x, activation)
    gradient = gradient.contiguous()
    x = x.contiguous()
    grad_x = torch.empty_like(x)
    addresses = map(address_of, (gradient, x, grad_x))
    arguments = (*addresses, CODES[x.dtype], x.shape[-1], ACTIVATIONS[activation])
    pool_of_torch().run(partial(_glu_backward, *arguments), gradient.numel())
    return grad_x


_forward = operator(
    "glu_forward(Tensor x, str activation) -> Tensor",
    forward_reference, "glu:glu_forward",
    lambda x, activation: x.new_empty(*x.shape[:-2], x.shape[-1]), forward_on_cpu,
)  # fmt: skip
_backward = operator(
    "glu_backward(Tensor gradient, Tensor x, str activation) -> Tensor",
    backward_reference, "glu:glu_backward",
    lambda gradient, x, activation: empty_contiguous(x), backward_on_cpu,
)  # fmt: skip


class Glu(torch.autograd.Function):
    """Gated linear unit that keeps its input alone."""

    @staticmethod
    def forward(context: Any, x: Tensor, activation: str) -> Tensor:
        context.save_for_backward(x)
        context.activation = activation
        return _forward(x, activation)

    @staticmethod
    @once_differentiable
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return _backward(gradient, *context.saved_tensors, context.activation), None


def glu(x: Tensor, activation: str) -> Tensor:
    """Return activation(gate) * value for x [..., 2, columns] that holds gates and values."""
    if choose("glu", x, x.dim() > 1 and x.shape[-2] == 2) != TORCH:
        return Glu.apply(x, activation)
    return glu_reference(x, activation)


def glu_reference(x: Tensor, activation: str) -> Tensor:
    gate, value = x.unbind(-2)
    return _activated(gate, activation) * value


def _activated(gate: Tensor, activation: str) -> Tensor:
    assert activation in ACTIVATIONS, activation
    if activation == "silu":
        return functional.silu(gate)
    return gelu_reference(gate, None, activation == "gelu")
