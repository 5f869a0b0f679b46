"""GELU of x + bias.

GELU (Hendrycks and Gimpel 2016), exact or by tanh:

    erf:   x (1 + erf(x / sqrt 2)) / 2
    tanh:  x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2
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
    grad_x = upcast_half(gradient) * gelu_slope(x, by_tanh)
    grad_bias = x.new_empty(0) if bias is None else grad_x.flatten(0, -2).sum(0)
    return grad_x.to(x_dtype), grad_bias.to(x_dtype)


def gelu_slope(x: Tensor, by_tanh: bool) -> Tensor:
    """Return the derivative of GELU."""
    if by_tanh:
        t = torch.tanh(sqrt(2 / pi) * (x + 0.044715 * x**3))
        return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * sqrt(2 / pi) * (1 + 3 * 0.044715 * x * x)
    return 0.5 * (1 + torch.erf(x / sqrt(2))) + x * torch.exp(-0.5 * x * x) / sqrt(2 * pi)


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
