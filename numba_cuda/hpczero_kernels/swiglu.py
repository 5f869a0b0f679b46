"""SwiGLU (Shazeer 2020): gate * sigmoid(gate) * value, for x [..., 2, columns] that holds gates and values."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from hpczero_kernels.dispatch import CUDA, choose
from hpczero_kernels.operators import empty, operator, wide


def forward_reference(x: Tensor) -> Tensor:
    gate, value = wide(x).unbind(-2)
    return (functional.silu(gate) * value).to(x.dtype)


def backward_reference(gradient: Tensor, x: Tensor) -> Tensor:
    (gate, value), g = wide(x).unbind(-2), wide(gradient)
    share = torch.sigmoid(gate)
    of_gate = g * value * share * (1 + gate * (1 - share))
    return torch.stack([of_gate, g * gate * share], -2).to(x.dtype)


_forward = operator(
    "swiglu_forward(Tensor x) -> Tensor", forward_reference, "swiglu:swiglu_forward", lambda x: x.new_empty(*x.shape[:-2], x.shape[-1])
)
_backward = operator(
    "swiglu_backward(Tensor gradient, Tensor x) -> Tensor", backward_reference, "swiglu:swiglu_backward", lambda gradient, x: empty(x)
)


class Swiglu(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        context.save_for_backward(x)
        return _forward(x)

    @staticmethod
    @once_differentiable
    def backward(context: Any, gradient: Tensor) -> Tensor:
        return _backward(gradient, *context.saved_tensors)


def swiglu(x: Tensor) -> Tensor:
    return Swiglu.apply(x) if choose("swiglu", x, x.dim() > 1 and x.shape[-2] == 2) == CUDA else swiglu_reference(x)


def swiglu_reference(x: Tensor) -> Tensor:
    gate, value = x.unbind(-2)
    return functional.silu(gate) * value
