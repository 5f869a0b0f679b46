"""Lion in one pass (`hpczero_kernels.lion` has the formula).

It moves 20 bytes per element with a half-precision gradient and weights.
"""

import torch
from numba import float32

from hpczero_kernels.cpu import (
    BETA1,
    BETA2,
    CODES,
    FP32,
    GRADIENT_SCALE,
    LR,
    ONE_MINUS_BETA1,
    ONE_MINUS_BETA2,
    SKIP,
)
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
    load,
    own_column,
    scalar,
    store,
    to_write,
)


@kernel(ADDRESS, ADDRESS, ADDRESS, CODE, ADDRESS, CODE, ADDRESS, NUMBER, COUNT, CODE)
def update(
    master, moment, gradient, gradient_precision, weights, weights_precision, scalars, decay, count,
    is_aligned,
):  # fmt: skip
    """Update eight elements per thread; `scalars` is the buffer of AdamWScalars."""
    index = own_column()
    if index >= count or scalar(scalars, SKIP) != float32(0.0):
        return
    left = count - index
    g = cuda.local.array(EIGHT, float32)
    m = cuda.local.array(EIGHT, float32)
    w = cuda.local.array(EIGHT, float32)
    load(g, gradient, gradient_precision, index, left, is_aligned)
    load(m, moment, FP32, index, left, is_aligned)
    load(w, master, FP32, index, left, is_aligned)
    scale, lr = scalar(scalars, GRADIENT_SCALE), scalar(scalars, LR)
    beta1, rest1 = scalar(scalars, BETA1), scalar(scalars, ONE_MINUS_BETA1)
    beta2, rest2 = scalar(scalars, BETA2), scalar(scalars, ONE_MINUS_BETA2)
    keep = float32(1.0) - lr * decay
    for i in range(EIGHT):
        scaled = g[i] * scale
        mixed = beta1 * m[i] + rest1 * scaled
        length = lr if mixed > float32(0.0) else float32(0.0)
        length = -lr if mixed < float32(0.0) else length
        w[i] = keep * w[i] - length
        m[i] = beta2 * m[i] + rest2 * scaled
    store(m, moment, FP32, index, left, is_aligned)
    store(w, master, FP32, index, left, is_aligned)
    if weights_precision != NO_WEIGHTS:
        store(w, weights, weights_precision, index, left, is_aligned)


def lion(
    master: torch.Tensor,
    moment: torch.Tensor,
    gradient: torch.Tensor,
    weights: torch.Tensor | None,
    scalars: torch.Tensor,
    decay: float,
) -> None:
    """Carry out hpczero_kernels.lion.lion on a GPU; `scalars` are the values of AdamWScalars."""
    count = master.numel()
    update.launch(
        (blocks(count, THREADS * EIGHT), 1), THREADS,
        master.data_ptr(), moment.data_ptr(), gradient.data_ptr(), CODES[gradient.dtype],
        *to_write(weights), scalars.data_ptr(), decay, count,
        aligned(master, moment, gradient, weights),
    )  # fmt: skip
