"""GELU (Hendrycks and Gimpel 2016) of x + bias, exact (erf) or by tanh.

    erf:  x (1 + erf(x / sqrt 2)) / 2        tanh:  x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2
"""

from math import pi, sqrt
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from hpczero_kernels.dispatch import CUDA, choose
from hpczero_kernels.operators import empty, is_of_columns, operator, wide


def forward_reference(x: Tensor, bias: Tensor | None, by_tanh: bool) -> Tensor:
    return functional.gelu(_shifted(x, bias), approximate="tanh" if by_tanh else "none").to(x.dtype)


def backward_reference(gradient: Tensor, x: Tensor, bias: Tensor | None, by_tanh: bool) -> tuple[Tensor, Tensor]:
    """Gradients of x and of the bias (empty: there is none)."""
    x_dtype, x = x.dtype, _shifted(x, bias)
    if by_tanh:
        t = torch.tanh(sqrt(2 / pi) * (x + 0.044715 * x**3))
        slope = 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * sqrt(2 / pi) * (1 + 3 * 0.044715 * x * x)
    else:
        slope = 0.5 * (1 + torch.erf(x / sqrt(2))) + x * torch.exp(-0.5 * x * x) / sqrt(2 * pi)
    of_x = wide(gradient) * slope
    of_bias = x.new_empty(0, dtype=x_dtype) if bias is None else of_x.flatten(0, -2).sum(0).to(x_dtype)
    return of_x.to(x_dtype), of_bias


def _shifted(x: Tensor, bias: Tensor | None) -> Tensor:
    return wide(x) if bias is None else wide(x) + wide(bias)


def _fake_backward(gradient: Tensor, x: Tensor, bias: Tensor | None, by_tanh: bool) -> tuple[Tensor, Tensor]:
    return empty(x), x.new_empty(0) if bias is None else empty(bias)


_forward = operator(
    "gelu_forward(Tensor x, Tensor? bias, bool by_tanh) -> Tensor",
    forward_reference, "elementwise:gelu_forward", lambda x, bias, by_tanh: empty(x),
)  # fmt: skip
_backward = operator(
    "gelu_backward(Tensor gradient, Tensor x, Tensor? bias, bool by_tanh) -> (Tensor, Tensor)",
    backward_reference, "elementwise:gelu_backward", _fake_backward,
)  # fmt: skip


class Gelu(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor, bias: Tensor | None, by_tanh: bool) -> Tensor:
        context.save_for_backward(x, *([] if bias is None else [bias]))
        context.by_tanh = by_tanh
        return _forward(x, bias, by_tanh)

    @staticmethod
    @once_differentiable
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, *rest = context.saved_tensors
        of_x, of_bias = _backward(gradient, x, rest[0] if rest else None, context.by_tanh)
        return of_x, of_bias if rest else None, None


def gelu(x: Tensor, bias: Tensor | None = None, by_tanh: bool = True) -> Tensor:
    if choose("gelu", x, is_of_columns(x, bias)) == CUDA:
        return Gelu.apply(x, bias, by_tanh)
    return gelu_reference(x, bias, by_tanh)


def gelu_reference(x: Tensor, bias: Tensor | None = None, by_tanh: bool = True) -> Tensor:
    return functional.gelu(x if bias is None else x + bias, approximate="tanh" if by_tanh else "none")
