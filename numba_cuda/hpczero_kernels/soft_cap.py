"""Soft cap of logits (Gemma 2): y = cap tanh(x / cap), which stays between -cap and cap.

Backward reads x, not y: the cross-entropy writes its gradient over y.
"""

from functools import partial
from typing import Any

import numpy as np
import torch
from numba import uint64
from torch import Tensor
from torch.autograd.function import once_differentiable

from hpczero_kernels.cpu import (
    CODES,
    STRETCH,
    address_of,
    kernel,
    load,
    pool_of_torch,
    store,
)
from hpczero_kernels.cpu_functions import tanh
from hpczero_kernels.dispatch import TORCH, choose, empty_contiguous, operator, upcast_half


def forward_reference(x: Tensor, cap: float) -> Tensor:
    return soft_cap_reference(upcast_half(x), cap).to(x.dtype)


def backward_reference(gradient: Tensor, x: Tensor, cap: float) -> Tensor:
    slope = 1 - torch.tanh(upcast_half(x) / cap).square()
    return (upcast_half(gradient) * slope).to(x.dtype)


@kernel("void(uint64, uint64, int64, float32, uint64, uint64)")
def _cap_forward(x, y, precision, cap, start, stop):
    """Set elements start .. stop - 1 of y; tensors are addresses."""
    values = np.empty(STRETCH, np.float32)
    while start < stop:
        size = min(stop - start, uint64(STRETCH))
        load(values, size, x, precision, start)
        for i in range(size):
            values[i] = cap * tanh(values[i] / cap)
        store(values, size, y, precision, start)
        start += size


@kernel("void(uint64, uint64, uint64, int64, float32, uint64, uint64)")
def _cap_backward(gradient, x, grad_x, precision, cap, start, stop):
    """Set elements start .. stop - 1 of grad_x; tensors are addresses."""
    values = np.empty(STRETCH, np.float32)
    g = np.empty(STRETCH, np.float32)
    while start < stop:
        size = min(stop - start, uint64(STRETCH))
        load(values, size, x, precision, start)
        load(g, size, gradient, precision, start)
        for i in range(size):
            t = tanh(values[i] / cap)
            g[i] -= g[i] * t * t
        store(g, size, grad_x, precision, start)
        start += size


def forward_on_cpu(x: Tensor, cap: float) -> Tensor:
    if x.dtype not in CODES:
        return forward_reference(x, cap)
    x = x.contiguous()
    y = torch.empty_like(x)
    arguments = (address_of(x), address_of(y), CODES[x.dtype], cap)
    pool_of_torch().run(partial(_cap_forward, *arguments), x.numel())
    return y


def backward_on_cpu(gradient: Tensor, x: Tensor, cap: float) -> Tensor:
    if x.dtype not in CODES:
        return backward_reference(gradient, x, cap)
    gradient = gradient.contiguous()
    x = x.contiguous()
    grad_x = torch.empty_like(x)
    addresses = map(address_of, (gradient, x, grad_x))
    arguments = (*addresses, CODES[x.dtype], cap)
    pool_of_torch().run(partial(_cap_backward, *arguments), x.numel())
    return grad_x


_forward = operator(
    "soft_cap_forward(Tensor x, float cap) -> Tensor",
    forward_reference, "soft_cap:soft_cap_forward", lambda x, cap: empty_contiguous(x),
    forward_on_cpu,
)  # fmt: skip
_backward = operator(
    "soft_cap_backward(Tensor gradient, Tensor x, float cap) -> Tensor",
    backward_reference, "soft_cap:soft_cap_backward",
    lambda gradient, x, cap: empty_contiguous(x), backward_on_cpu,
)  # fmt: skip


class SoftCap(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor, cap: float) -> Tensor:
        context.save_for_backward(x)
        context.cap = cap
        return _forward(x, cap)

    @staticmethod
    @once_differentiable
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return _backward(gradient, *context.saved_tensors, context.cap), None


def soft_cap(x: Tensor, cap: float) -> Tensor:
    if choose("soft_cap", x) != TORCH:
        return SoftCap.apply(x, cap)
    return soft_cap_reference(x, cap)


def soft_cap_reference(x: Tensor, cap: float) -> Tensor:
    return torch.tanh(x / cap) * cap
