"""LayerNorm (Ba et al. 2016) and RMSNorm (Zhang and Sennrich 2019), with a residual added before.

    total = x + residual
    y = (total - mean) / sqrt(variance + eps) * weight + bias        RMSNorm: mean = 0, no bias

The norm is over the last dimension; statistics are fp32, one per row. With a residual, the total
is an output beside y: the residual stream.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from hpczero_kernels.dispatch import (
    CUDA,
    choose,
    empty_contiguous,
    is_like,
    is_per_column,
    operator,
    upcast_half,
)

EPS = 1e-5
LONGEST = 8192  # columns that a block of threads holds in its registers


def forward_reference(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    centred: bool,
) -> tuple[Tensor, ...]:
    """Return y, total (empty without a residual), and each row's mean and inverse deviation."""
    total = x if residual is None else x + residual
    values = upcast_half(total)
    mean = values.mean(-1, keepdim=True) if centred else torch.zeros_like(values[..., :1])
    inverse = torch.rsqrt((values - mean).square().mean(-1, keepdim=True) + eps)
    y = (values - mean) * inverse * upcast_half(weight)
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
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of the total (those of x and residual), weight and bias.

    `grad_total` is the gradient of the output total; it is added.
    """
    mean, inverse = (statistic.view(*total.shape[:-1], 1) for statistic in (mean, inverse))
    g = upcast_half(gradient)
    normal = (upcast_half(total) - mean) * inverse
    scaled = g * upcast_half(weight)
    along = normal * (scaled * normal).mean(-1, keepdim=True)
    across = scaled.mean(-1, keepdim=True) if centred else torch.zeros_like(inverse)
    grad_x = (scaled - across - along) * inverse
    grad_x = grad_x if grad_total is None else grad_x + upcast_half(grad_total)
    grad_weight = (g * normal).flatten(0, -2).sum(0).to(weight.dtype)
    grad_bias = g.flatten(0, -2).sum(0).to(weight.dtype)
    return grad_x.to(total.dtype), grad_weight, grad_bias


def _fake_forward(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    centred: bool,
) -> tuple[Tensor, ...]:
    dtype = torch.promote_types(x.dtype, torch.float32)
    statistics = [x.new_empty(x.numel() // x.shape[-1], dtype=dtype) for _ in range(2)]
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
) -> tuple[Tensor, Tensor, Tensor]:
    return empty_contiguous(total), empty_contiguous(weight), empty_contiguous(weight)


_forward = operator(
    "norm_forward(Tensor x, Tensor? residual, Tensor weight, Tensor? bias, float eps, bool centred)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    forward_reference, "norm:norm_forward", _fake_forward,
)  # fmt: skip
_backward = operator(
    "norm_backward(Tensor gradient, Tensor? grad_total, Tensor total, Tensor weight, Tensor mean,"
    " Tensor inverse, bool centred) -> (Tensor, Tensor, Tensor)",
    backward_reference, "norm:norm_backward", _fake_backward,
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
    ) -> Any:
        y, total, mean, inverse = _forward(x, residual, weight, bias, eps, centred)
        context.save_for_backward(x if residual is None else total, weight, mean, inverse)
        context.centred = centred
        context.has_residual = residual is not None
        context.has_bias = bias is not None
        return y if residual is None else (y, total)

    @staticmethod
    @once_differentiable
    def backward(
        context: Any, gradient: Tensor, grad_total: Tensor | None = None
    ) -> tuple[Tensor | None, ...]:
        grad_x, grad_weight, grad_bias = _backward(
            gradient, grad_total, *context.saved_tensors, context.centred
        )
        return (
            grad_x,
            grad_x if context.has_residual else None,
            grad_weight,
            grad_bias if context.has_bias else None,
            None,
            None,
        )


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float = EPS) -> Tensor:
    if choose("norm", x, _fits(x, None, weight, bias)) == CUDA:
        return Norm.apply(x, None, weight, bias, eps, True)
    return layer_norm_reference(x, weight, bias, eps)


def layer_norm_reference(x: Tensor, weight: Tensor, bias: Tensor, eps: float = EPS) -> Tensor:
    return functional.layer_norm(x, weight.shape, weight, bias, eps)


def rms_norm(x: Tensor, weight: Tensor, eps: float = EPS, offset: float = 0.0) -> Tensor:
    """Return the norm of x times weight + offset."""
    if choose("norm", x, _fits(x, None, weight) and not offset) == CUDA:
        return Norm.apply(x, None, weight, None, eps, False)
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
        return Norm.apply(x, residual, weight, bias, eps, True)
    return add_layer_norm_reference(x, residual, weight, bias, eps)


def add_layer_norm_reference(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float = EPS
) -> tuple[Tensor, Tensor]:
    total = x + residual
    return layer_norm_reference(total, weight, bias, eps), total


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float = EPS
) -> tuple[Tensor, Tensor]:
    if choose("norm", x, _fits(x, residual, weight)) == CUDA:
        return Norm.apply(x, residual, weight, None, eps, False)
    return add_rms_norm_reference(x, residual, weight, eps)


def add_rms_norm_reference(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float = EPS
) -> tuple[Tensor, Tensor]:
    total = x + residual
    return rms_norm_reference(total, weight, eps), total


def _fits(x: Tensor, residual: Tensor | None, *per_column: Tensor) -> bool:
    return (
        0 < x.shape[-1] <= LONGEST
        and is_like(x, residual)
        and all(is_per_column(x, tensor) for tensor in per_column)
    )
