"""AdamW whose second moment is frozen (`hpczero_kernels.frozen_adamw` has the formulas).

With a half-precision gradient the first pass moves 18 bytes per element, the second 24.
"""

from numba import float32, uint32
from torch import Tensor

from hpczero_kernels.cpu import CODES, FP32
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
from hpczero_kernels.cuda.vectors import EIGHT, fetch, own_column, store, widen


@kernel(
    ADDRESS, ADDRESS, CODE, ADDRESS, ADDRESS, NUMBER, NUMBER, NUMBER, NUMBER, COUNT, CODE
)  # fmt: skip
def own(
    moment, gradient, precision, variance, steps, beta1, factor, scale, eps, count, is_aligned
):  # fmt: skip
    index = own_column()
    if index >= count:
        return
    left = count - index
    m_words = cuda.local.array(EIGHT, uint32)
    g_words = cuda.local.array(EIGHT, uint32)
    v_words = cuda.local.array(EIGHT, uint32)
    m = cuda.local.array(EIGHT, float32)
    g = cuda.local.array(EIGHT, float32)
    v = cuda.local.array(EIGHT, float32)
    fetch(m_words, moment, FP32, index, left, is_aligned)
    fetch(g_words, gradient, precision, index, left, is_aligned)
    fetch(v_words, variance, FP32, index, left, is_aligned)
    widen(m, m_words, FP32)
    widen(g, g_words, precision)
    widen(v, v_words, FP32)
    for i in range(EIGHT):
        m[i] = beta1 * m[i] + factor * g[i]
        step = m[i] / (sqrt(v[i] * scale) + eps)
        g[i] = step if v[i] != float32(0.0) else float32(0.0)
    store(m, moment, FP32, index, left, is_aligned)
    store(g, steps, FP32, index, left, is_aligned)


@kernel(ADDRESS, ADDRESS, ADDRESS, ADDRESS, NUMBER, NUMBER, NUMBER, NUMBER, COUNT, CODE)
def take(steps, variance, moment, master, keep, size, scale, eps, count, is_aligned):
    index = own_column()
    if index >= count:
        return
    left = count - index
    u_words = cuda.local.array(EIGHT, uint32)
    v_words = cuda.local.array(EIGHT, uint32)
    w_words = cuda.local.array(EIGHT, uint32)
    u = cuda.local.array(EIGHT, float32)
    v = cuda.local.array(EIGHT, float32)
    w = cuda.local.array(EIGHT, float32)
    fetch(u_words, steps, FP32, index, left, is_aligned)
    fetch(v_words, variance, FP32, index, left, is_aligned)
    fetch(w_words, master, FP32, index, left, is_aligned)
    widen(u, u_words, FP32)
    widen(v, v_words, FP32)
    widen(w, w_words, FP32)
    for i in range(EIGHT):
        w[i] = keep * w[i] - size * u[i]
        u[i] = u[i] * (sqrt(v[i] * scale) + eps)
    store(u, moment, FP32, index, left, is_aligned)
    store(w, master, FP32, index, left, is_aligned)


def own_steps(
    moment: Tensor,
    gradient: Tensor,
    variance: Tensor,
    steps: Tensor,
    *scalars: float,
) -> None:
    """Carry out hpczero_kernels.frozen_adamw.own_steps on a GPU."""
    count = moment.numel()
    own.launch(
        (blocks(count, THREADS * EIGHT), 1), THREADS,
        moment.data_ptr(), gradient.data_ptr(), CODES[gradient.dtype], variance.data_ptr(),
        steps.data_ptr(), *scalars, count, aligned(moment, gradient, variance, steps),
    )  # fmt: skip


def take_steps(
    steps: Tensor, variance: Tensor, moment: Tensor, master: Tensor, *scalars: float
) -> None:
    """Carry out hpczero_kernels.frozen_adamw.take_steps on a GPU."""
    tensors = (steps, variance, moment, master)
    count = moment.numel()
    take.launch(
        (blocks(count, THREADS * EIGHT), 1), THREADS,
        *(tensor.data_ptr() for tensor in tensors), *scalars, count, aligned(*tensors),
    )  # fmt: skip
