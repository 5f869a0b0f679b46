"""LayerNorm (Ba et al. 2016) and RMSNorm (Zhang and Sennrich 2019), with a residual added before.

    total = x + residual
    y = (total - mean) / sqrt(variance + eps) * (offset + weight) + bias

RMSNorm, which is not centred, has no mean and no bias; Gemma's has an offset of 1. The norm is over
the last dimension; statistics are fp32, one per row. With a residual, the total is an output beside
y: the residual stream.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from hpczero_kernels.cpu import CODES
from hpczero_kernels.dispatch import (
    CUDA,
    TORCH,
    choose,
    empty_contiguous,
    is_like,
    is_per_column,
    operator,
    upcast_half,
)
from hpczero_kernels.rms_norm_cpu import rms_backward, rms_forward

EPS = 1e-5
LONGEST = 8192  # columns that a block of threads holds in its registers


def forward_reference(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    centred: bool,
    offset: float,
) -> tuple[Tensor, ...]:
    """Return y, total (empty without a residual), each row's mean and inverse deviation.

    There is no mean of what is not centred.
    """
    total = x if residual is None else x + residual
    values = upcast_half(total)
    mean = values.mean(-1, keepdim=True) if centred else values.new_empty(0)
    values = values - mean if centred else values
    inverse = torch.rsqrt(values.square().mean(-1, keepdim=True) + eps)
    y = values * inverse * (upcast_half(weight) + offset)
    y = y if bias is None else y + upcast_half(bias)
    return (
        y.to(x.dtype),
        x.new_empty(0) if residual is None else total,
        mean.flatten(),
        inverse.flatten(),
    )


def backward_reference(
    gradient: Tensor,
    grad_total: Tensor | None,
    total: Tensor,
    weight: Tensor,
    mean: Tensor,
    inverse: Tensor,
    centred: bool,
    offset: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of the total (those of x and residual), weight and bias.

    `grad_total` is the gradient of the output total; it is added. What is not centred has no bias.
    """
    by_row = (*total.shape[:-1], 1)
    g = upcast_half(gradient)
    values = upcast_half(total)
    normal = (values - mean.view(by_row) if centred else values) * inverse.view(by_row)
    scaled = g * (upcast_half(weight) + offset)
    grad_x = scaled - normal * (scaled * normal).mean(-1, keepdim=True)
    grad_x = (grad_x - scaled.mean(-1, keepdim=True) if centred else grad_x) * inverse.view(by_row)
    grad_x = grad_x if grad_total is None else grad_x + upcast_half(grad_total)
    grad_weight = (g * normal).flatten(0, -2).sum(0).to(weight.dtype)
    grad_bias = g.flatten(0, -2).sum(0).to(weight.dtype) if centred else weight.new_empty(0)
    return grad_x.to(total.dtype), grad_weight, grad_bias


def _forward_on_cpu(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    centred: bool,
    offset: float,
) -> tuple[Tensor, ...]:
    if x.dtype not in CODES or centred or residual is not None or bias is not None:
        return forward_reference(x, residual, weight, bias, eps, centred, offset)
    y, inverse = rms_forward(x, weight, eps, offset)
    return y, x.new_empty(0), inverse.new_empty(0), inverse


def _backward_on_cpu(
    gradient: Tensor,
    grad_total: Tensor | None,
    total: Tensor,
    weight: Tensor,
    mean: Tensor,
    inverse: Tensor,
    centred: bool,
    offset: float,
) -> tuple[Tensor, Tensor, Tensor]:
    if total.dtype not in CODES or centred or grad_total is not None:
        return backward_reference(
            gradient, grad_total, total, weight, mean, inverse, centred, offset
        )
    grad_x, grad_weight = rms_backward(gradient, total, weight, inverse, offset)
    return grad_x, grad_weight, weight.new_empty(0)


def _fake_forward(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    centred: bool,
    offset: float,
) -> tuple[Tensor, ...]:
    dtype = torch.promote_types(x.dtype, torch.float32)
    rows = x.numel() // x.shape[-1]
    statistics = [x.new_empty(count, dtype=dtype) for count in (rows if centred else 0, rows)]
    return (
        empty_contiguous(x),
        x.new_empty(0) if residual is None else empty_contiguous(x),
        *statistics,
    )


def _fake_backward(
    gradient: Tensor,
    grad_total: Tensor | None,
    total: Tensor,
    weight: Tensor,
    mean: Tensor,
    inverse: Tensor,
    centred: bool,
    offset: float,
) -> tuple[Tensor, Tensor, Tensor]:
    grad_bias = empty_contiguous(weight) if centred else weight.new_empty(0)
    return empty_contiguous(total), empty_contiguous(weight), grad_bias


_forward = operator(
    "norm_forward(Tensor x, Tensor? residual, Tensor weight, Tensor? bias, float eps, bool centred,"
    " float offset) -> (Tensor, Tensor, Tensor, Tensor)",
    forward_reference, "norm:norm_forward", _fake_forward, _forward_on_cpu,
)  # fmt: skip
_backward = operator(
    "norm_backward(Tensor gradient, Tensor? grad_total, Tensor total, Tensor weight, Tensor mean,"
    " Tensor inverse, bool centred, float offset) -> (Tensor, Tensor, Tensor)",
    backward_reference, "norm:norm_backward", _fake_backward, _backward_on_cpu,
)  # fmt: skip


class Norm(torch.autograd.Function):
    """Norm that returns y; (y, total) with a residual."""

    @staticmethod
    def forward(
        context: Any,
        x: Tensor,
        residual: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
        eps: float,
        centred: bool,
        offset: float,
    ) -> Any:
        y, total, mean, inverse = _forward(x, residual, weight, bias, eps, centred, offset)
        context.save_for_backward(x if residual is None else total, weight, mean, inverse)
        context.centred = centred
        context.offset = offset
        context.has_residual = residual is not None
        context.has_bias = bias is not None
        return y if residual is None else (y, total)

    @staticmethod
    @once_differentiable
    def backward(
        context: Any, gradient: Tensor, grad_total: Tensor | None = None
    ) -> tuple[Tensor | None, ...]:
        grad_x, grad_weight, grad_bias = _backward(
            gradient, grad_total, *context.saved_tensors, context.centred, context.offset
        )
        return (
            grad_x,
            grad_x if context.has_residual else None,
            grad_weight,
            grad_bias if context.has_bias else None,
            None,
            None,
            None,
        )


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float = EPS) -> Tensor:
    if choose("norm", x, _fits(x, None, weight, bias)) == CUDA:
        return Norm.apply(x, None, weight, bias, eps, True, 0.0)
    return layer_norm_reference(x, weight, bias, eps)


def layer_norm_reference(x: Tensor, weight: Tensor, bias: Tensor, eps: float = EPS) -> Tensor:
    return functional.layer_norm(x, weight.shape, weight, bias, eps)


def rms_norm(x: Tensor, weight: Tensor, eps: float = EPS, offset: float = 0.0) -> Tensor:
    """Return the norm of x times weight + offset."""
    if choose("rms_norm", x, _fits(x, None, weight)) != TORCH:
        return Norm.apply(x, None, weight, None, eps, False, offset)
    return rms_norm_reference(x, weight, eps, offset)


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float = EPS, offset: float = 0.0) -> Tensor:
    if offset:
        wide = functional.rms_norm(upcast_half(x), weight.shape, upcast_half(weight) + offset, eps)
        return wide.to(x.dtype)
    return functional.rms_norm(x, weight.shape, weight, eps)


def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float = EPS
) -> tuple[Tensor, Tensor]:
    """Return the norm of x + residual, and this sum."""
    if choose("norm", x, _fits(x, residual, weight, bias)) == CUDA:
        return Norm.apply(x, residual, weight, bias, eps, True, 0.0)
    return add_layer_norm_reference(x, residual, weight, bias, eps)


def add_layer_norm_reference(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float = EPS
) -> tuple[Tensor, Tensor]:
    total = x + residual
    return layer_norm_reference(total, weight, bias, eps), total


def _fits(x: Tensor, residual: Tensor | None, *per_column: Tensor) -> bool:
    return (
        0 < x.shape[-1] <= LONGEST
        and is_like(x, residual)
        and all(is_per_column(x, tensor) for tensor in per_column)
    )
