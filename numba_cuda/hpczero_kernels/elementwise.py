"""GELU of x + bias, SwiGLU and rotary embedding: references, operators and autograd functions.

GELU (Hendrycks and Gimpel 2016), exact or by tanh:

    erf:   x (1 + erf(x / sqrt 2)) / 2
    tanh:  x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2

SwiGLU (Shazeer 2020), for x [..., 2, columns] that holds gates and values:

    y = gate * sigmoid(gate) * value

Rotary embedding (Su et al. 2021) turns pairs of a head's elements, half a head apart, by an angle
that grows with the position; x [samples, positions, heads, head_dim], cosines and sines fp32
[positions, head_dim / 2]:

    y = [a cos - b sin, b cos + a sin] for x = [a, b]
"""

from math import pi, sqrt
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from hpczero_kernels.dispatch import (
    CUDA,
    choose,
    empty_contiguous,
    is_per_column,
    operator,
    upcast_half,
)


def gelu_forward_reference(x: Tensor, bias: Tensor | None, by_tanh: bool) -> Tensor:
    return gelu_reference(_add_bias(x, bias), None, by_tanh).to(x.dtype)


def gelu_backward_reference(
    gradient: Tensor, x: Tensor, bias: Tensor | None, by_tanh: bool
) -> tuple[Tensor, Tensor]:
    """Return the gradients of x and of the bias (empty without one)."""
    x_dtype = x.dtype
    x = _add_bias(x, bias)
    if by_tanh:
        t = torch.tanh(sqrt(2 / pi) * (x + 0.044715 * x**3))
        slope = 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * sqrt(2 / pi) * (1 + 3 * 0.044715 * x * x)
    else:
        slope = 0.5 * (1 + torch.erf(x / sqrt(2))) + x * torch.exp(-0.5 * x * x) / sqrt(2 * pi)
    grad_x = upcast_half(gradient) * slope
    grad_bias = x.new_empty(0) if bias is None else grad_x.flatten(0, -2).sum(0)
    return grad_x.to(x_dtype), grad_bias.to(x_dtype)


def _add_bias(x: Tensor, bias: Tensor | None) -> Tensor:
    return upcast_half(x) if bias is None else upcast_half(x) + upcast_half(bias)


def _fake_backward(
    gradient: Tensor, x: Tensor, bias: Tensor | None, by_tanh: bool
) -> tuple[Tensor, Tensor]:
    return empty_contiguous(x), x.new_empty(0) if bias is None else empty_contiguous(bias)


_gelu_forward = operator(
    "gelu_forward(Tensor x, Tensor? bias, bool by_tanh) -> Tensor",
    gelu_forward_reference, "elementwise:gelu_forward",
    lambda x, bias, by_tanh: empty_contiguous(x),
)  # fmt: skip
_gelu_backward = operator(
    "gelu_backward(Tensor gradient, Tensor x, Tensor? bias, bool by_tanh) -> (Tensor, Tensor)",
    gelu_backward_reference, "elementwise:gelu_backward", _fake_backward,
)  # fmt: skip


class Gelu(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor, bias: Tensor | None, by_tanh: bool) -> Tensor:
        context.save_for_backward(x, *([] if bias is None else [bias]))
        context.by_tanh = by_tanh
        return _gelu_forward(x, bias, by_tanh)

    @staticmethod
    @once_differentiable
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, *biases = context.saved_tensors
        bias = biases[0] if biases else None
        grad_x, grad_bias = _gelu_backward(gradient, x, bias, context.by_tanh)
        return grad_x, grad_bias if biases else None, None


def gelu(x: Tensor, bias: Tensor | None = None, by_tanh: bool = True) -> Tensor:
    if choose("gelu", x, is_per_column(x, bias)) == CUDA:
        return Gelu.apply(x, bias, by_tanh)
    return gelu_reference(x, bias, by_tanh)


def gelu_reference(x: Tensor, bias: Tensor | None = None, by_tanh: bool = True) -> Tensor:
    x = x if bias is None else x + bias
    return functional.gelu(x, approximate="tanh" if by_tanh else "none")


# SwiGLU
def swiglu_forward_reference(x: Tensor) -> Tensor:
    return swiglu_reference(upcast_half(x)).to(x.dtype)


def swiglu_backward_reference(gradient: Tensor, x: Tensor) -> Tensor:
    gate, value = upcast_half(x).unbind(-2)
    g = upcast_half(gradient)
    sigmoid = torch.sigmoid(gate)
    grad_gate = g * value * sigmoid * (1 + gate * (1 - sigmoid))
    return torch.stack([grad_gate, g * gate * sigmoid], -2).to(x.dtype)


_swiglu_forward = operator(
    "swiglu_forward(Tensor x) -> Tensor",
    swiglu_forward_reference,
    "elementwise:swiglu_forward",
    lambda x: x.new_empty(*x.shape[:-2], x.shape[-1]),
)
_swiglu_backward = operator(
    "swiglu_backward(Tensor gradient, Tensor x) -> Tensor",
    swiglu_backward_reference,
    "elementwise:swiglu_backward",
    lambda gradient, x: empty_contiguous(x),
)


class Swiglu(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        context.save_for_backward(x)
        return _swiglu_forward(x)

    @staticmethod
    @once_differentiable
    def backward(context: Any, gradient: Tensor) -> Tensor:
        return _swiglu_backward(gradient, *context.saved_tensors)


def swiglu(x: Tensor) -> Tensor:
    if choose("swiglu", x, x.dim() > 1 and x.shape[-2] == 2) == CUDA:
        return Swiglu.apply(x)
    return swiglu_reference(x)


def swiglu_reference(x: Tensor) -> Tensor:
    return glu_reference(x, "silu")


def glu(x: Tensor, activation: str) -> Tensor:
    """Return activation(gate) * value for x that holds gates and values."""
    return swiglu(x) if activation == "silu" else glu_reference(x, activation)


def glu_reference(x: Tensor, activation: str) -> Tensor:
    gate, value = x.unbind(-2)
    if activation == "silu":
        return functional.silu(gate) * value
    return functional.gelu(gate, approximate="tanh" if activation == "gelu" else "none") * value


# Rotary embedding
def angles(positions: Tensor, head_dim: int, base: float = 10000.0) -> tuple[Tensor, Tensor]:
    """Return the cosines and sines for these positions (int64)."""
    even = torch.arange(0, head_dim, 2, dtype=torch.float64, device=positions.device)
    frequencies = base ** (-even / head_dim)
    turned = positions.double()[:, None] * frequencies
    return turned.cos().float(), turned.sin().float()


def turn_reference(x: Tensor, cosines: Tensor, sines: Tensor, back: bool) -> Tensor:
    """Turn the pairs; `back` turns by the opposite angle, which is forward's backward."""
    low, high = upcast_half(x).chunk(2, -1)
    cosines = cosines.unsqueeze(-2)
    sines = (-sines if back else sines).unsqueeze(-2)
    return torch.cat([low * cosines - high * sines, high * cosines + low * sines], -1).to(x.dtype)


_turn = operator(
    "rotary(Tensor x, Tensor cosines, Tensor sines, bool back) -> Tensor",
    turn_reference, "elementwise:rotary", lambda x, cosines, sines, back: empty_contiguous(x),
)  # fmt: skip


class Rotary(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        context.save_for_backward(cosines, sines)
        return _turn(x, cosines, sines, False)

    @staticmethod
    @once_differentiable
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return _turn(gradient, *context.saved_tensors, True), None, None


def rotary(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Return x with the pairs turned that the tables have; other elements stay as they are.

    Tables of each sample's own positions are [samples, positions, pairs].
    """
    turned = 2 * cosines.shape[-1]
    if turned < x.shape[-1]:
        return torch.cat([rotary(x[..., :turned], cosines, sines), x[..., turned:]], -1)
    if cosines.dim() == 3:
        joined = [tensor.flatten(0, 1) for tensor in (x, cosines, sines)]
        return rotary(joined[0][None], *joined[1:]).view(x.shape)
    shape = (x.shape[1], x.shape[-1] // 2)
    fits = (
        x.dim() == 4
        and x.shape[-1] % 2 == 0
        and all(_is_table(table, shape, x.device) for table in (cosines, sines))
    )
    if choose("rotary", x, fits) == CUDA:
        return Rotary.apply(x, cosines, sines)
    return rotary_reference(x, cosines, sines)


def _is_table(table: Tensor, shape: tuple[int, int], device: torch.device) -> bool:
    return table.shape == shape and table.dtype == torch.float32 and table.device == device


def rotary_reference(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    turned = 2 * cosines.shape[-1]
    if turned < x.shape[-1]:
        return torch.cat([rotary_reference(x[..., :turned], cosines, sines), x[..., turned:]], -1)
    return turn_reference(x, cosines, sines, False)
