"""AdamW whose second moment v is frozen, in two passes; between them workers average their steps.

    own:   m = beta1 m + factor g;  u = m / roots, 0 where v is 0       (factor: 1 - beta1, clipped)
    taken: m = u roots;  w = keep w - size u                            (u: the average)
    roots = sqrt(v / correction2) + eps

All but the gradient is fp32; `scale` is 1 / correction2.
"""

from functools import partial
from math import sqrt

import numpy as np
import torch
from numba import float32, uint64
from torch import Tensor

from hpczero_kernels.cpu import (
    CODES,
    INLINE,
    STRETCH,
    Pool,
    address_of,
    inner,
    kernel,
    load,
    pointer,
)
from hpczero_kernels.dispatch import CUDA, NUMBA, choose, is_like

_CHUNK = 1 << 15  # elements: some buffers of these stay in a core's cache


def own_steps_reference(
    moment: Tensor,
    gradient: Tensor,
    variance: Tensor,
    steps: Tensor,
    beta1: float,
    factor: float,
    scale: float,
    eps: float,
) -> None:
    for start in range(0, moment.numel(), _CHUNK):
        part = slice(start, start + _CHUNK)
        own = moment[part].mul_(beta1).add_(gradient[part].float(), alpha=factor)
        roots = _roots(variance[part], scale, eps)
        steps[part] = torch.where(variance[part] != 0, own / roots, 0.0)


def take_steps_reference(
    steps: Tensor,
    variance: Tensor,
    moment: Tensor,
    master: Tensor,
    keep: float,
    size: float,
    scale: float,
    eps: float,
) -> None:
    for start in range(0, moment.numel(), _CHUNK):
        part = slice(start, start + _CHUNK)
        torch.mul(steps[part], _roots(variance[part], scale, eps), out=moment[part])
        master[part].mul_(keep).sub_(steps[part], alpha=size)


def _roots(variance: Tensor, scale: float, eps: float) -> Tensor:
    return (variance * scale).sqrt_().add_(eps)


@inner
def _own(moment, gradient, variance, steps, size, beta1, factor, scale, eps):
    for i in range(size):
        own = beta1 * moment[i] + factor * gradient[i]
        step = own / (sqrt(variance[i] * scale) + eps)
        moment[i] = own
        steps[i] = step if variance[i] != float32(0.0) else float32(0.0)


@kernel(
    "void(uint64, uint64, int64, uint64, uint64, float32, float32, float32, float32, uint64,"
    " uint64)"
)
def _own_steps(
    moment, gradient, precision, variance, steps, beta1, factor, scale, eps, start, stop
):  # fmt: skip
    """Make the steps of elements start .. stop - 1; tensors are addresses."""
    stretch = np.empty(STRETCH, np.float32)
    while start < stop:
        size = min(stop - start, uint64(STRETCH))
        single = uint64(4) * start
        load(stretch, size, gradient, precision, start)
        _own(
            pointer(moment + single, float32), stretch, pointer(variance + single, float32),
            pointer(steps + single, float32), size, beta1, factor, scale, eps,
        )  # fmt: skip
        start += uint64(STRETCH)


@kernel("void(uint64, uint64, uint64, uint64, float32, float32, float32, float32, uint64, uint64)")
def _take_steps(steps, variance, moment, master, keep, size, scale, eps, start, stop):
    """Take the steps of elements start .. stop - 1; tensors are addresses."""
    given = pointer(steps, float32)
    variances = pointer(variance, float32)
    moments = pointer(moment, float32)
    masters = pointer(master, float32)
    for i in range(start, stop):
        step = given[i]
        moments[i] = step * (sqrt(variances[i] * scale) + eps)
        masters[i] = keep * masters[i] - size * step


def own_steps(
    moment: Tensor,
    gradient: Tensor,
    variance: Tensor,
    steps: Tensor,
    beta1: float,
    factor: float,
    scale: float,
    eps: float,
    pool: Pool = INLINE,
) -> None:
    """Update the momentum by the gradient, and set `steps` to what it asks for."""
    _check(moment, variance, steps)
    assert gradient.shape == moment.shape, (gradient.shape, moment.shape)
    assert gradient.is_contiguous(), gradient.stride()
    scalars = (beta1, factor, scale, eps)
    implementation = choose("frozen_adamw", moment)
    if implementation == CUDA:
        from hpczero_kernels.cuda import frozen_adamw

        frozen_adamw.own_steps(moment, gradient, variance, steps, *scalars)
    elif implementation == NUMBA:
        to_read = (address_of(gradient), CODES[gradient.dtype], address_of(variance))
        arguments = (address_of(moment), *to_read, address_of(steps), *scalars)
        pool.run(partial(_own_steps, *arguments), moment.numel())
    else:
        own_steps_reference(moment, gradient, variance, steps, *scalars)


def take_steps(
    steps: Tensor,
    variance: Tensor,
    moment: Tensor,
    master: Tensor,
    keep: float,
    size: float,
    scale: float,
    eps: float,
    pool: Pool = INLINE,
) -> None:
    """Set the momentum to what gives these steps, and take them."""
    tensors = (steps, variance, moment, master)
    _check(*tensors)
    scalars = (keep, size, scale, eps)
    implementation = choose("frozen_adamw", moment)
    if implementation == CUDA:
        from hpczero_kernels.cuda import frozen_adamw

        frozen_adamw.take_steps(*tensors, *scalars)
    elif implementation == NUMBA:
        to_read = (address_of(steps), address_of(variance))
        arguments = (*to_read, address_of(moment), address_of(master), *scalars)
        pool.run(partial(_take_steps, *arguments), moment.numel())
    else:
        take_steps_reference(*tensors, *scalars)


def _check(first: Tensor, *others: Tensor) -> None:
    """Assert that all are flat, contiguous, fp32 and as long, on one device."""
    for each in (first, *others):
        assert each.dtype == torch.float32, each.dtype
        assert is_like(first, each), (first.shape, each)
        assert each.is_contiguous(), each.stride()
