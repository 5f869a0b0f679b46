"""Lion (Chen et al. 2023) on flat buffers: one read and one write of everything.

    g = gradient * gradient_scale                       (unscale and clip)
    w = w (1 - lr decay) - lr sign(beta1 m + (1 - beta1) g)
    m = beta2 m + (1 - beta2) g

It keeps one moment. The master weights and the moment are fp32; the gradient may be half precision.
`weights`, where given, is the half-precision copy of the master weights; the step writes it.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numba import float32, uint64
from torch import Tensor

from hpczero_kernels.adamw import AdamWScalars
from hpczero_kernels.cpu import (
    BETA1,
    BETA2,
    CODES,
    FP32,
    GRADIENT_SCALE,
    INLINE,
    LR,
    ONE_MINUS_BETA1,
    ONE_MINUS_BETA2,
    SKIP,
    STRETCH,
    Pool,
    address_of,
    inner,
    kernel,
    load,
    pointer,
    store,
)
from hpczero_kernels.dispatch import CUDA, NUMBA, choose

_CHUNK = 1 << 15  # elements: some buffers of these stay in a core's cache


@dataclass(frozen=True)
class LionBuffers:
    """Flat buffers of a range of parameters, all of one length."""

    master: Tensor
    moment: Tensor
    gradient: Tensor
    weights: Tensor | None


def lion_reference(state: LionBuffers, decay: float, scalars: AdamWScalars) -> None:
    values = scalars.values.tolist()
    if values[SKIP]:
        return
    for start in range(0, state.master.numel(), _CHUNK):
        part = slice(start, start + _CHUNK)
        master, moment = state.master[part], state.moment[part]
        gradient = state.gradient[part].float() * values[GRADIENT_SCALE]
        mixed = (moment * values[BETA1]).add_(gradient, alpha=values[ONE_MINUS_BETA1])
        master.mul_(1.0 - values[LR] * decay).sub_(mixed.sign_(), alpha=values[LR])
        moment.mul_(values[BETA2]).add_(gradient, alpha=values[ONE_MINUS_BETA2])
        if state.weights is not None:
            state.weights[part].copy_(master)


@inner
def _update(master, moment, stretch, size, keep, scalars):
    """Update a stretch, which holds the gradient before and the new weights after."""
    lr = scalars[LR]
    for i in range(size):
        scaled = stretch[i] * scalars[GRADIENT_SCALE]
        mixed = scalars[BETA1] * moment[i] + scalars[ONE_MINUS_BETA1] * scaled
        length = lr if mixed > float32(0.0) else float32(0.0)
        length = -lr if mixed < float32(0.0) else length
        weight = keep * master[i] - length
        moment[i] = scalars[BETA2] * moment[i] + scalars[ONE_MINUS_BETA2] * scaled
        master[i] = stretch[i] = weight


@kernel("void(uint64, uint64, uint64, int64, uint64, int64, float32, float32[::1], uint64, uint64)")
def _lion(
    master, moment, gradient, gradient_precision, weights, weights_precision, decay, scalars, start,
    stop,
):  # fmt: skip
    """Update elements start .. stop - 1; the buffers are addresses (weights 0: none)."""
    stretch = np.empty(STRETCH, np.float32)
    keep = float32(1.0) - scalars[LR] * decay
    while start < stop:
        size = min(stop - start, uint64(STRETCH))
        single = uint64(4) * start
        states = (pointer(master + single, float32), pointer(moment + single, float32))
        load(stretch, size, gradient, gradient_precision, start)
        _update(*states, stretch, size, keep, scalars)
        if weights:
            store(stretch, size, weights, weights_precision, start)
        start += uint64(STRETCH)


def lion(state: LionBuffers, decay: float, scalars: AdamWScalars, pool: Pool = INLINE) -> None:
    """Update the state in place, as lion_reference does up to the rounding of fp32."""
    count = state.master.numel()
    weights = state.weights
    fp32 = (state.master, state.moment)
    for buffer in fp32:
        assert buffer.dtype == torch.float32
        assert buffer.numel() == count
        assert buffer.is_contiguous()
    assert state.gradient.numel() == count
    assert state.gradient.is_contiguous()
    assert weights is None or (weights.numel() == count and weights.is_contiguous())
    implementation = choose("lion", state.master)
    if implementation == CUDA:
        from hpczero_kernels.cuda import lion

        lion.lion(*fp32, state.gradient, weights, scalars.values, decay)
    elif implementation == NUMBA:
        if scalars.values[SKIP]:
            return
        gradient = state.gradient
        states = (address_of(state.master), address_of(state.moment))
        to_read = (address_of(gradient), CODES[gradient.dtype])
        to_write = (0, FP32) if weights is None else (address_of(weights), CODES[weights.dtype])
        arguments = (*states, *to_read, *to_write, decay, scalars.values.numpy())

        def run_slice(start: int, stop: int) -> None:
            _lion(*arguments, start, stop)

        pool.run(run_slice, count)
    else:
        lion_reference(state, decay, scalars)
