"""AdamW in one pass (`hpczero_kernels.adamw` has the formula): 28 bytes an element with a half-precision gradient and weights."""

from numba import float32, uint32, uint64

from hpczero_kernels.adamw import AdamWBuffers, AdamWScalars
from hpczero_kernels.cpu import CODES, FP32
from hpczero_kernels.cuda.intrinsics import inner, load4, number_of, sqrt
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
from hpczero_kernels.cuda.vectors import EIGHT, fetch, narrow, own_column, put, widen

_NOTHING = -1  # the precision of weights that are not there


@inner
def _scalar(scalars, number):
    return number_of(load4(scalars, uint64(4 * number)))


@kernel(ADDRESS, ADDRESS, ADDRESS, ADDRESS, CODE, ADDRESS, CODE, ADDRESS, NUMBER, COUNT, CODE, CODE)
def step(
    master,
    moment1,
    moment2,
    gradient,
    gradient_precision,
    weights,
    weights_precision,
    scalars,
    decay,
    count,
    is_aligned,
    zeroes,
):
    index = own_column()
    if index >= count:
        return
    left = count - index
    words, of_moment1, of_moment2 = (
        cuda.local.array(EIGHT, uint32),
        cuda.local.array(EIGHT, uint32),
        cuda.local.array(EIGHT, uint32),
    )
    of_master = cuda.local.array(EIGHT, uint32)
    g, m = cuda.local.array(EIGHT, float32), cuda.local.array(EIGHT, float32)
    v, w = cuda.local.array(EIGHT, float32), cuda.local.array(EIGHT, float32)
    fetch(words, gradient, gradient_precision, index, left, is_aligned)
    fetch(of_moment1, moment1, FP32, index, left, is_aligned)
    fetch(of_moment2, moment2, FP32, index, left, is_aligned)
    fetch(of_master, master, FP32, index, left, is_aligned)
    scale, beta1, rest1, beta2, rest2 = (
        _scalar(scalars, 0),
        _scalar(scalars, 1),
        _scalar(scalars, 2),
        _scalar(scalars, 3),
        _scalar(scalars, 4),
    )
    eps, keep, length, spread = (
        _scalar(scalars, 5),
        float32(1.0) - _scalar(scalars, 6) * decay,
        _scalar(scalars, 7),
        _scalar(scalars, 8),
    )
    widen(g, words, gradient_precision)
    widen(m, of_moment1, FP32)
    widen(v, of_moment2, FP32)
    widen(w, of_master, FP32)
    if zeroes:
        for i in range(EIGHT):
            words[i] = uint32(0)
        put(words, gradient, gradient_precision, index, left, is_aligned)
    if _scalar(scalars, 9) != float32(0.0):
        return
    for i in range(EIGHT):
        scaled = g[i] * scale
        m[i] = beta1 * m[i] + rest1 * scaled
        v[i] = beta2 * v[i] + rest2 * scaled * scaled
        w[i] = keep * w[i] - length * m[i] / (sqrt(v[i] * spread) + eps)
    narrow(words, m, FP32)
    put(words, moment1, FP32, index, left, is_aligned)
    narrow(words, v, FP32)
    put(words, moment2, FP32, index, left, is_aligned)
    narrow(words, w, FP32)
    put(words, master, FP32, index, left, is_aligned)
    if weights_precision != _NOTHING:
        narrow(words, w, weights_precision)
        put(words, weights, weights_precision, index, left, is_aligned)


def adamw(state: AdamWBuffers, decay: float, scalars: AdamWScalars, zero_gradient: bool) -> None:
    """As hpczero_kernels.adamw.adamw, on a device."""
    master, moment1, moment2, gradient, weights = (
        state.master,
        state.moment1,
        state.moment2,
        state.gradient,
        state.weights,
    )
    count = master.numel()
    to_write = (0, _NOTHING) if weights is None else (weights.data_ptr(), CODES[weights.dtype])
    step.launch(
        (blocks(count, THREADS * EIGHT), 1), THREADS,
        master.data_ptr(), moment1.data_ptr(), moment2.data_ptr(), gradient.data_ptr(), CODES[gradient.dtype], *to_write,
        scalars.values.data_ptr(), decay, count, aligned(master, moment1, moment2, gradient, weights), zero_gradient,
    )  # fmt: skip
