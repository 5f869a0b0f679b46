"""LAMB (You et al. 2020) on flat buffers, in two passes; between them norms are added up.

    first:   g, m, v as in AdamW;  u = (m / correction1) / (sqrt(v / correction2) + eps) + decay w
             squares[b] = sums of w^2 and of u^2 over block b
    second:  w = w - lr ratio u                               (ratio: |w| / |u| of the parameter)

u is made twice: to keep it would take a buffer, and as many bytes. `weights`, where given, is the
half-precision copy of the master weights; the second pass writes it. Where the step is skipped,
neither pass changes anything (the first one leaves the squares as they are).
"""

from math import sqrt

import numpy as np
import torch
from numba import float32, njit, uint64
from torch import Tensor

from hpczero_kernels.adamw import AdamWBuffers, AdamWScalars
from hpczero_kernels.cpu import (
    BETA1,
    BETA2,
    BLOCK,
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


def block_count(elements: int) -> int:
    """Return the rows of `squares` for so many elements."""
    return -(-elements // BLOCK)


def lamb_moments_reference(
    state: AdamWBuffers, decay: float, scalars: AdamWScalars, squares: Tensor
) -> None:
    values = scalars.values.tolist()
    if values[SKIP]:
        return
    for number in range(len(squares)):
        part = slice(number * BLOCK, (number + 1) * BLOCK)
        gradient = state.gradient[part].float() * values[GRADIENT_SCALE]
        state.moment1[part].mul_(values[BETA1]).add_(gradient, alpha=values[ONE_MINUS_BETA1])
        moment2 = state.moment2[part].mul_(values[BETA2])
        moment2.addcmul_(gradient, gradient, value=values[ONE_MINUS_BETA2])
        squares[number, 0] = state.master[part].square().sum()
        squares[number, 1] = _direction(state, part, decay, values).square().sum()


def lamb_step_reference(
    state: AdamWBuffers, decay: float, scalars: AdamWScalars, ratio: Tensor
) -> None:
    values = scalars.values.tolist()
    if values[SKIP]:
        return
    size = values[LR] * float(ratio)
    for start in range(0, state.master.numel(), BLOCK):
        part = slice(start, start + BLOCK)
        master = state.master[part].sub_(_direction(state, part, decay, values), alpha=size)
        if state.weights is not None:
            state.weights[part].copy_(master)


def _direction(state: AdamWBuffers, part: slice, decay: float, values: list[float]) -> Tensor:
    """Return u."""
    denominator = (state.moment2[part] * values[MOMENT2_SCALE]).sqrt_().add_(values[EPS])
    direction = (state.moment1[part] * values[MOMENT1_SCALE]).div_(denominator)
    return direction.add_(state.master[part], alpha=decay)


@inner
def _direction_of(weight, mean, square, decay, scalars):
    denominator = sqrt(square * scalars[MOMENT2_SCALE]) + scalars[EPS]
    return mean * scalars[MOMENT1_SCALE] / denominator + decay * weight


@inner
def _moments(master, moment1, moment2, stretch, size, decay, scalars):
    """Update the moments of a stretch, which holds the gradient before and u after."""
    for i in range(size):
        scaled = stretch[i] * scalars[GRADIENT_SCALE]
        mean = scalars[BETA1] * moment1[i] + scalars[ONE_MINUS_BETA1] * scaled
        square = scalars[BETA2] * moment2[i] + scalars[ONE_MINUS_BETA2] * scaled * scaled
        moment1[i] = mean
        moment2[i] = square
        stretch[i] = _direction_of(master[i], mean, square, decay, scalars)


@inner
def _directions(master, moment1, moment2, stretch, size, decay, scalars):
    for i in range(size):
        stretch[i] = _direction_of(master[i], moment1[i], moment2[i], decay, scalars)


@inner
def _step(master, stretch, size, length):
    """Step a stretch, which holds u before and the new weights after."""
    for i in range(size):
        weight = master[i] - length * stretch[i]
        master[i] = stretch[i] = weight


@njit(error_model="numpy", nogil=True, fastmath={"reassoc", "contract"})
def _squared(values, size):
    """Return the sum of squares; the compiler chooses an order, the same in all calls."""
    total = float32(0.0)
    for i in range(size):
        total += values[i] * values[i]
    return total


@kernel(
    "void(uint64, uint64, uint64, uint64, int64, uint64, float32, float32[::1], uint64, uint64)"
)
def _lamb_moments(
    master, moment1, moment2, gradient, precision, squares, decay, scalars, start, stop
):  # fmt: skip
    """Do the first pass over elements start .. stop - 1; `start` begins a block."""
    stretch = np.empty(STRETCH, np.float32)
    rows = pointer(squares, float32)
    of_weights = of_steps = float32(0.0)
    while start < stop:
        size = min(stop - start, uint64(STRETCH))
        single = uint64(4) * start
        weights = pointer(master + single, float32)
        states = (pointer(moment1 + single, float32), pointer(moment2 + single, float32))
        load(stretch, size, gradient, precision, start)
        _moments(weights, *states, stretch, size, decay, scalars)
        if start % uint64(BLOCK) == 0:
            of_weights = of_steps = float32(0.0)
        of_weights += _squared(weights, size)
        of_steps += _squared(stretch, size)
        row = uint64(2) * (start // uint64(BLOCK))
        rows[row] = of_weights
        rows[row + uint64(1)] = of_steps
        start += uint64(STRETCH)


@kernel(
    "void(uint64, uint64, uint64, uint64, int64, float32, float32, float32[::1], uint64, uint64)"
)
def _lamb_step(
    master, moment1, moment2, weights, precision, decay, length, scalars, start, stop
):  # fmt: skip
    """Do the second pass over elements start .. stop - 1 (weights 0: none)."""
    stretch = np.empty(STRETCH, np.float32)
    while start < stop:
        size = min(stop - start, uint64(STRETCH))
        single = uint64(4) * start
        own = pointer(master + single, float32)
        states = (pointer(moment1 + single, float32), pointer(moment2 + single, float32))
        _directions(own, *states, stretch, size, decay, scalars)
        _step(own, stretch, size, length)
        if weights:
            store(stretch, size, weights, precision, start)
        start += uint64(STRETCH)


def lamb_moments(
    state: AdamWBuffers, decay: float, scalars: AdamWScalars, squares: Tensor, pool: Pool = INLINE
) -> None:
    """Update the moments; write the sums of squares of each block (fp32 [blocks, 2])."""
    count = state.master.numel()
    fp32 = (state.master, state.moment1, state.moment2)
    for buffer in fp32:
        assert buffer.dtype == torch.float32
        assert buffer.numel() == count
        assert buffer.is_contiguous()
    assert state.gradient.numel() == count
    assert state.gradient.is_contiguous()
    assert squares.shape == (block_count(count), 2), (squares.shape, count)
    assert squares.dtype == torch.float32, squares.dtype
    assert squares.is_contiguous()
    implementation = choose("lamb", state.master)
    if implementation == CUDA:
        from hpczero_kernels.cuda import lamb

        lamb.moments(*fp32, state.gradient, scalars.values, decay, squares)
    elif implementation == NUMBA:
        if scalars.values[SKIP]:
            return
        to_read = (address_of(state.gradient), CODES[state.gradient.dtype])
        values = scalars.values.numpy()
        arguments = (*_addresses(state), *to_read, address_of(squares), decay, values)

        def run_slice(start: int, stop: int) -> None:
            _lamb_moments(*arguments, start, stop)

        pool.run(run_slice, count)
    else:
        lamb_moments_reference(state, decay, scalars, squares)


def lamb_step(
    state: AdamWBuffers, decay: float, scalars: AdamWScalars, ratio: Tensor, pool: Pool = INLINE
) -> None:
    """Step the weights; `ratio`: one fp32 number on their device."""
    count = state.master.numel()
    weights = state.weights
    fp32 = (state.master, state.moment1, state.moment2)
    for buffer in fp32:
        assert buffer.is_contiguous()
        assert buffer.numel() == count
    assert weights is None or (weights.numel() == count and weights.is_contiguous())
    assert ratio.numel() == 1
    assert ratio.dtype == torch.float32, ratio.dtype
    implementation = choose("lamb", state.master)
    if implementation == CUDA:
        from hpczero_kernels.cuda import lamb

        lamb.step(*fp32, weights, scalars.values, decay, ratio)
    elif implementation == NUMBA:
        if scalars.values[SKIP]:
            return
        to_write = (0, FP32) if weights is None else (address_of(weights), CODES[weights.dtype])
        values = scalars.values.numpy()
        length = values[LR] * ratio.item()
        arguments = (*_addresses(state), *to_write, decay, length, values)

        def run_slice(start: int, stop: int) -> None:
            _lamb_step(*arguments, start, stop)

        pool.run(run_slice, count)
    else:
        lamb_step_reference(state, decay, scalars, ratio)


def _addresses(state: AdamWBuffers) -> tuple[int, int, int]:
    return address_of(state.master), address_of(state.moment1), address_of(state.moment2)
