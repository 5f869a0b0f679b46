"""AdamW (Loshchilov and Hutter 2019) on flat buffers: one read and one write of everything.

    g = gradient * gradient_scale                       (unscale and clip)
    m = beta1 m + (1 - beta1) g;  v = beta2 v + (1 - beta2) g^2
    w = w (1 - lr decay) - lr (m / correction1) / (sqrt(v / correction2) + eps)

master, first and second moment are fp32; the gradient may be half precision; `weights`, where given, is the half-precision copy that is written back.
"""

from dataclasses import dataclass
from math import sqrt

import numpy as np
import torch
from numba import float32, njit, uint16, uint64

from hpczero_kernels.cpu import (
    BF16,
    CODES,
    FP32,
    INLINE,
    STRETCH,
    Pool,
    address_of,
    from_bf16,
    inner,
    load,
    named_by_sources,
    pointer,
    store,
    to_bf16,
)
from hpczero_kernels.dispatch import CUDA, NUMBA, choose

_SCALE, _SKIP = 0, 9  # their places among the scalars
_CHUNK = (
    1 << 15
)  # elements whose five buffers stay in a core's cache over the dozen torch operations


@dataclass(frozen=True)
class AdamWScalars:
    """What is the same for all elements in a step: an fp32 buffer on the device of the state, which may compute some of it (`follow`).

    [gradient_scale, beta1, 1 - beta1, beta2, 1 - beta2, eps, lr, lr / correction1, 1 / correction2, skip]

    Where `skip` is not 0 (a gradient was not finite) nothing changes.
    """

    values: torch.Tensor

    def follow(self, norm: torch.Tensor, clip: float, scale: float) -> None:
        """Of gradients that are `scale` times too large: the step clips them to `clip` (0: not at all) by their true `norm`, one fp64 number, and is
        skipped where that is not finite. No wait for the device.
        """
        clipped = (clip / (norm + 1e-6)).clamp(max=1.0) if clip else torch.ones_like(norm)
        self.values[_SCALE] = clipped / scale
        self.values[_SKIP] = ~norm.isfinite()


@dataclass(frozen=True)
class AdamWBuffers:
    """The flat buffers of a stretch of parameters; all of one length."""

    master: torch.Tensor
    moment1: torch.Tensor
    moment2: torch.Tensor
    gradient: torch.Tensor
    weights: torch.Tensor | None


def scalars_of_step(
    step: int, lr: float, betas: tuple[float, float], eps: float, gradient_scale: float = 1.0
) -> AdamWScalars:
    """`step` counts the updates from 1."""
    (beta1, beta2), correction1, correction2 = betas, 1.0 - betas[0] ** step, 1.0 - betas[1] ** step
    of_betas = beta1, 1.0 - beta1, beta2, 1.0 - beta2
    values = [gradient_scale, *of_betas, eps, lr, lr / correction1, 1.0 / correction2, 0.0]
    return AdamWScalars(torch.tensor(values, dtype=torch.float32))


def adamw_reference(
    state: AdamWBuffers, decay: float, scalars: AdamWScalars, zero_gradient: bool = False
) -> None:
    gradient_scale, beta1, rest1, beta2, rest2, eps, lr, step, spread, skip = (
        scalars.values.tolist()
    )
    if skip:
        if zero_gradient:
            state.gradient.zero_()
        return
    for start in range(0, state.master.numel(), _CHUNK):
        part = slice(start, start + _CHUNK)
        master, moment1, moment2 = state.master[part], state.moment1[part], state.moment2[part]
        gradient = state.gradient[part].float() * gradient_scale
        moment1.mul_(beta1).add_(gradient, alpha=rest1)
        moment2.mul_(beta2).addcmul_(gradient, gradient, value=rest2)
        denominator = (moment2 * spread).sqrt_().add_(eps)
        master.mul_(1.0 - lr * decay).addcdiv_(moment1, denominator, value=-step)
        if state.weights is not None:
            state.weights[part].copy_(master)
        if zero_gradient:
            state.gradient[part].zero_()


@inner
def _updated(weight, moment1, moment2, gradient, keep, scalars):
    """One element; keep = 1 - lr decay."""
    gradient_scale, beta1, rest1, beta2, rest2 = (
        scalars[0],
        scalars[1],
        scalars[2],
        scalars[3],
        scalars[4],
    )
    eps, step, spread = scalars[5], scalars[7], scalars[8]
    scaled = gradient * gradient_scale
    mean = beta1 * moment1 + rest1 * scaled
    square = beta2 * moment2 + rest2 * scaled * scaled
    return keep * weight - step * mean / (sqrt(square * spread) + eps), mean, square


@inner
def _update(master, moment1, moment2, stretch, size, keep, scalars):
    """Of pointers `master`, `moment1`, `moment2`; the stretch has the gradient, and then the new weights."""
    for i in range(size):
        weight, moment1[i], moment2[i] = _updated(
            master[i], moment1[i], moment2[i], stretch[i], keep, scalars
        )
        master[i] = stretch[i] = weight


@inner
def _update_bf16(master, moment1, moment2, gradient, weights, size, keep, scalars):
    """All are pointers. In one loop memory is read and written all the time: a seventh faster."""
    for i in range(size):
        weight, moment1[i], moment2[i] = _updated(
            master[i], moment1[i], moment2[i], from_bf16(gradient[i]), keep, scalars
        )
        master[i], weights[i] = weight, to_bf16(weight)


@njit(
    "void(uint64, uint64, uint64, uint64, int64, boolean, uint64, int64, float32, float32[::1], uint64, uint64)",
    nogil=True, cache=True, error_model="numpy",
)  # fmt: skip
@named_by_sources
def _adamw(
    master,
    moment1,
    moment2,
    gradient,
    gradient_precision,
    zeroes,
    weights,
    weights_precision,
    decay,
    scalars,
    start,
    stop,
):
    """Elements start .. stop - 1, stretch by stretch; the buffers are addresses (weights 0: none)."""
    stretch, zeros = np.empty(STRETCH, np.float32), np.zeros(STRETCH, np.float32)
    keep, both_bf16 = (
        float32(1.0) - scalars[6] * decay,
        weights != 0 and gradient_precision == weights_precision == BF16,
    )
    while start < stop:
        size, single, half = (
            min(stop - start, uint64(STRETCH)),
            uint64(4) * start,
            uint64(2) * start,
        )
        states = (
            pointer(master + single, float32),
            pointer(moment1 + single, float32),
            pointer(moment2 + single, float32),
        )
        if both_bf16:
            _update_bf16(
                *states,
                pointer(gradient + half, uint16),
                pointer(weights + half, uint16),
                size,
                keep,
                scalars,
            )
        else:
            load(stretch, size, gradient, gradient_precision, start)
            _update(*states, stretch, size, keep, scalars)
            if weights:
                store(stretch, size, weights, weights_precision, start)
        if zeroes:
            store(zeros, size, gradient, gradient_precision, start)
        start += uint64(STRETCH)


def adamw(
    state: AdamWBuffers,
    decay: float,
    scalars: AdamWScalars,
    pool: Pool = INLINE,
    zero_gradient: bool = False,
) -> None:
    """As adamw_reference, up to the rounding of fp32. `zero_gradient`: in the same pass, also where nothing else changes."""
    count, weights = state.master.numel(), state.weights
    fp32 = state.master, state.moment1, state.moment2
    assert all(buffer.numel() == count and buffer.dtype == torch.float32 for buffer in fp32)
    assert all(buffer.is_contiguous() for buffer in (*fp32, state.gradient))
    assert scalars.values.device == state.master.device, (
        scalars.values.device,
        state.master.device,
    )
    assert state.gradient.numel() == count
    assert weights is None or (weights.numel() == count and weights.is_contiguous())
    implementation = choose("adamw", state.master)
    if implementation == CUDA:
        from hpczero_kernels.cuda import adamw

        adamw.adamw(state, decay, scalars, zero_gradient)
    elif implementation == NUMBA:
        _adamw_of_cpu(state, decay, scalars, pool, zero_gradient)
    else:
        adamw_reference(state, decay, scalars, zero_gradient)


def _adamw_of_cpu(
    state: AdamWBuffers, decay: float, scalars: AdamWScalars, pool: Pool, zero_gradient: bool
) -> None:
    if scalars.values[_SKIP]:
        if zero_gradient:
            state.gradient.zero_()
        return
    to_read = address_of(state.gradient), CODES[state.gradient.dtype], zero_gradient
    to_write = (
        (0, FP32)
        if state.weights is None
        else (address_of(state.weights), CODES[state.weights.dtype])
    )
    master, moment1, moment2 = map(address_of, (state.master, state.moment1, state.moment2))
    arguments = master, moment1, moment2, *to_read, *to_write, decay, scalars.values.numpy()

    def kernel(start: int, stop: int) -> None:
        _adamw(*arguments, start, stop)

    pool.run(kernel, state.master.numel())
