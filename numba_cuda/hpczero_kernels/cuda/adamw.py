"""AdamW in one pass (`hpczero_kernels.adamw` has the formula).

It moves 28 bytes per element with a half-precision gradient and weights.
"""

import torch
from numba import float32, uint32

from hpczero_kernels.cpu import (
    BETA1,
    BETA2,
    CODES,
    EPS,
    FP32,
    GRADIENT_SCALE,
    LR,
    MOMENT2_SCALE,
    ONE_MINUS_BETA1,
    ONE_MINUS_BETA2,
    SKIP,
    STEP_SIZE,
)
from hpczero_kernels.cuda.intrinsics import sqrt
from hpczero_kernels.cuda.launch import (
    ADDRESS,
    CODE,
    COUNT,
    NUMBER,
    THREADS,
    aligned,
    blocks,
    kernel,
)
from hpczero_kernels.cuda.target import cuda
from hpczero_kernels.cuda.vectors import (
    EIGHT,
    NO_WEIGHTS,
    fetch,
    own_column,
    put,
    scalar,
    store,
    to_write,
    widen,
)


@kernel(ADDRESS, ADDRESS, ADDRESS, ADDRESS, CODE, ADDRESS, CODE, ADDRESS, NUMBER, COUNT, CODE, CODE)
def step(
    master, moment1, moment2, gradient, gradient_precision, weights, weights_precision, scalars,
    decay, count, is_aligned, zeroes,
):  # fmt: skip
    """Update eight elements per thread; `scalars` is the buffer of AdamWScalars."""
    index = own_column()
    if index >= count:
        return
    left = count - index
    words = cuda.local.array(EIGHT, uint32)
    m_words = cuda.local.array(EIGHT, uint32)
    v_words = cuda.local.array(EIGHT, uint32)
    w_words = cuda.local.array(EIGHT, uint32)
    g = cuda.local.array(EIGHT, float32)
    m = cuda.local.array(EIGHT, float32)
    v = cuda.local.array(EIGHT, float32)
    w = cuda.local.array(EIGHT, float32)
    fetch(words, gradient, gradient_precision, index, left, is_aligned)
    fetch(m_words, moment1, FP32, index, left, is_aligned)
    fetch(v_words, moment2, FP32, index, left, is_aligned)
    fetch(w_words, master, FP32, index, left, is_aligned)
    s = cuda.local.array(SKIP, float32)
    for number in range(SKIP):
        s[number] = scalar(scalars, number)
    widen(g, words, gradient_precision)
    widen(m, m_words, FP32)
    widen(v, v_words, FP32)
    widen(w, w_words, FP32)
    if zeroes:
        for i in range(EIGHT):
            words[i] = uint32(0)
        put(words, gradient, gradient_precision, index, left, is_aligned)
    if scalar(scalars, SKIP) != float32(0.0):
        return
    keep = float32(1.0) - s[LR] * decay
    for i in range(EIGHT):
        scaled = g[i] * s[GRADIENT_SCALE]
        m[i] = s[BETA1] * m[i] + s[ONE_MINUS_BETA1] * scaled
        v[i] = s[BETA2] * v[i] + s[ONE_MINUS_BETA2] * scaled * scaled
        denominator = sqrt(v[i] * s[MOMENT2_SCALE]) + s[EPS]
        w[i] = keep * w[i] - s[STEP_SIZE] * m[i] / denominator
    store(m, moment1, FP32, index, left, is_aligned)
    store(v, moment2, FP32, index, left, is_aligned)
    store(w, master, FP32, index, left, is_aligned)
    if weights_precision != NO_WEIGHTS:
        store(w, weights, weights_precision, index, left, is_aligned)


def adamw(
    master: torch.Tensor,
    moment1: torch.Tensor,
    moment2: torch.Tensor,
    gradient: torch.Tensor,
    weights: torch.Tensor | None,
    scalars: torch.Tensor,
    decay: float,
    zero_gradient: bool,
) -> None:
    """Carry out hpczero_kernels.adamw.adamw on a GPU; `scalars` are the values of AdamWScalars."""
    count = master.numel()
    step.launch(
        (blocks(count, THREADS * EIGHT), 1), THREADS,
        master.data_ptr(), moment1.data_ptr(), moment2.data_ptr(), gradient.data_ptr(),
        CODES[gradient.dtype], *to_write(weights), scalars.data_ptr(), decay, count,
        aligned(master, moment1, moment2, gradient, weights), zero_gradient,
    )  # fmt: skip
