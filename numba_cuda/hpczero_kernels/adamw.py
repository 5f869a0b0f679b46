"""AdamW (Loshchilov and Hutter 2019) on flat buffers: one read and one write of everything.

    g = gradient * gradient_scale                       (unscale and clip)
    m = beta1 m + (1 - beta1) g;  v = beta2 v + (1 - beta2) g^2
    w = w (1 - lr decay) - lr (m / correction1) / (sqrt(v / correction2) + eps)

The master weights and both moments are fp32; the gradient may be half precision. `weights`, where
given, is the half-precision copy of the master weights; the step writes it.
"""

from dataclasses import dataclass
from math import sqrt

import numpy as np
import torch
from numba import float32, uint16, uint64

from hpczero_kernels.cpu import (
    BETA1,
    BETA2,
    BF16,
    CODES,
    EPS,
    FP32,
    GRADIENT_SCALE,
    INLINE,
    LR,
    MOMENT1_SCALE,
    MOMENT2_SCALE,
    ONE_MINUS_BETA1,
    ONE_MINUS_BETA2,
    SKIP,
    STEP_SIZE,
    STRETCH,
    Pool,
    address_of,
    from_bf16,
    inner,
    kernel,
    load,
    pointer,
    store,
    to_bf16,
)
from hpczero_kernels.dispatch import CUDA, NUMBA, choose

_CHUNK = 1 << 15  # elements: five buffers of these stay in a core's cache over a dozen operations


@dataclass(frozen=True)
class AdamWScalars:
    """Scalars of one step, the same for all elements: an fp32 buffer on the state's device.

    `cpu` names their indices: STEP_SIZE is lr / correction1, MOMENT1_SCALE and MOMENT2_SCALE are
    1 / correction1 and 1 / correction2.
    Where SKIP is not 0 (a gradient was not finite), the step changes nothing.
    """

    values: torch.Tensor

    def follow(self, norm: torch.Tensor, clip: float, scale: float) -> None:
        """Set gradient_scale and skip on the device, without waiting for it.

        The gradients are `scale` times too large; `norm`, one fp64 number, is their true norm. The
        step clips them to `clip` (0: no clipping), and is skipped where the norm is not finite.
        """
        clipped = (clip / (norm + 1e-6)).clamp(max=1.0) if clip else torch.ones_like(norm)
        self.values[GRADIENT_SCALE] = clipped / scale
        self.values[SKIP] = ~norm.isfinite()


@dataclass(frozen=True)
class AdamWBuffers:
    """Flat buffers of a range of parameters, all of one length."""

    master: torch.Tensor
    moment1: torch.Tensor
    moment2: torch.Tensor
    gradient: torch.Tensor
    weights: torch.Tensor | None


def scalars_of_step(
    step: int, lr: float, betas: tuple[float, float], eps: float, gradient_scale: float = 1.0
) -> AdamWScalars:
    """Return the scalars of a step, on the CPU; `step` counts the updates from 1."""
    beta1, beta2 = betas
    correction1 = 1.0 - beta1**step
    correction2 = 1.0 - beta2**step
    values = [0.0] * (SKIP + 1)
    values[GRADIENT_SCALE] = gradient_scale
    values[BETA1] = beta1
    values[ONE_MINUS_BETA1] = 1.0 - beta1
    values[BETA2] = beta2
    values[ONE_MINUS_BETA2] = 1.0 - beta2
    values[EPS] = eps
    values[LR] = lr
    values[STEP_SIZE] = lr / correction1
    values[MOMENT1_SCALE] = 1.0 / correction1
    values[MOMENT2_SCALE] = 1.0 / correction2
    return AdamWScalars(torch.tensor(values, dtype=torch.float32))


def adamw_reference(
    state: AdamWBuffers, decay: float, scalars: AdamWScalars, zero_gradient: bool = False
) -> None:
    values = scalars.values.tolist()
    if values[SKIP]:
        if zero_gradient:
            state.gradient.zero_()
        return
    for start in range(0, state.master.numel(), _CHUNK):
        chunk = slice(start, start + _CHUNK)
        master = state.master[chunk]
        moment1 = state.moment1[chunk]
        moment2 = state.moment2[chunk]
        gradient = state.gradient[chunk].float() * values[GRADIENT_SCALE]
        moment1.mul_(values[BETA1]).add_(gradient, alpha=values[ONE_MINUS_BETA1])
        moment2.mul_(values[BETA2]).addcmul_(gradient, gradient, value=values[ONE_MINUS_BETA2])
        denominator = (moment2 * values[MOMENT2_SCALE]).sqrt_().add_(values[EPS])
        master.mul_(1.0 - values[LR] * decay)
        master.addcdiv_(moment1, denominator, value=-values[STEP_SIZE])
        if state.weights is not None:
            state.weights[chunk].copy_(master)
        if zero_gradient:
            state.gradient[chunk].zero_()


@inner
def _update_element(weight, moment1, moment2, gradient, keep, scalars):
    """Return weight, moment1 and moment2 of one element after the step; keep = 1 - lr decay."""
    scaled = gradient * scalars[GRADIENT_SCALE]
    mean = scalars[BETA1] * moment1 + scalars[ONE_MINUS_BETA1] * scaled
    square = scalars[BETA2] * moment2 + scalars[ONE_MINUS_BETA2] * scaled * scaled
    denominator = sqrt(square * scalars[MOMENT2_SCALE]) + scalars[EPS]
    updated = keep * weight - scalars[STEP_SIZE] * mean / denominator
    return updated, mean, square


@inner
def _update(master, moment1, moment2, stretch, size, keep, scalars):
    """Update a stretch, which holds the gradient before and the new weights after."""
    for i in range(size):
        weight, moment1[i], moment2[i] = _update_element(
            master[i], moment1[i], moment2[i], stretch[i], keep, scalars
        )
        master[i] = stretch[i] = weight


@inner
def _update_bf16(master, moment1, moment2, gradient, weights, size, keep, scalars):
    """Update a stretch given by pointers, in one loop that keeps memory busy: a seventh faster."""
    for i in range(size):
        weight, moment1[i], moment2[i] = _update_element(
            master[i], moment1[i], moment2[i], from_bf16(gradient[i]), keep, scalars
        )
        master[i] = weight
        weights[i] = to_bf16(weight)


@kernel(
    "void(uint64, uint64, uint64, uint64, int64, boolean, uint64, int64, float32, float32[::1],"
    " uint64, uint64)"
)
def _adamw(
    master, moment1, moment2, gradient, gradient_precision, zeroes, weights, weights_precision,
    decay, scalars, start, stop,
):  # fmt: skip
    """Update elements start .. stop - 1; the buffers are addresses (weights 0: none)."""
    stretch = np.empty(STRETCH, np.float32)
    zeros = np.zeros(STRETCH, np.float32)
    keep = float32(1.0) - scalars[LR] * decay
    both_bf16 = weights != 0 and gradient_precision == weights_precision == BF16
    while start < stop:
        size = min(stop - start, uint64(STRETCH))
        single = uint64(4) * start
        half = uint64(2) * start
        states = (
            pointer(master + single, float32),
            pointer(moment1 + single, float32),
            pointer(moment2 + single, float32),
        )
        if both_bf16:
            gradient_pointer = pointer(gradient + half, uint16)
            weights_pointer = pointer(weights + half, uint16)
            _update_bf16(*states, gradient_pointer, weights_pointer, size, keep, scalars)
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
    """Update the state in place, as adamw_reference does up to the rounding of fp32.

    `zero_gradient` clears the gradient in the same pass, also in a step that is skipped.
    """
    count = state.master.numel()
    weights = state.weights
    fp32 = (state.master, state.moment1, state.moment2)
    for buffer in fp32:
        assert buffer.dtype == torch.float32
        assert buffer.numel() == count
        assert buffer.is_contiguous()
    devices = (scalars.values.device, state.master.device)
    assert devices[0] == devices[1], devices
    assert state.gradient.numel() == count
    assert state.gradient.is_contiguous()
    assert weights is None or (weights.numel() == count and weights.is_contiguous())
    implementation = choose("adamw", state.master)
    if implementation == CUDA:
        from hpczero_kernels.cuda import adamw

        adamw.adamw(*fp32, state.gradient, weights, scalars.values, decay, zero_gradient)
    elif implementation == NUMBA:
        _adamw_on_cpu(state, decay, scalars, pool, zero_gradient)
    else:
        adamw_reference(state, decay, scalars, zero_gradient)


def _adamw_on_cpu(
    state: AdamWBuffers, decay: float, scalars: AdamWScalars, pool: Pool, zero_gradient: bool
) -> None:
    gradient = state.gradient
    weights = state.weights
    if scalars.values[SKIP]:
        if zero_gradient:
            gradient.zero_()
        return
    master, moment1, moment2 = map(address_of, (state.master, state.moment1, state.moment2))
    to_read = (address_of(gradient), CODES[gradient.dtype], zero_gradient)
    to_write = (0, FP32) if weights is None else (address_of(weights), CODES[weights.dtype])
    arguments = (master, moment1, moment2, *to_read, *to_write, decay, scalars.values.numpy())

    def run_slice(start: int, stop: int) -> None:
        _adamw(*arguments, start, stop)

    pool.run(run_slice, state.master.numel())
