"""RMSNorm on CPUs (`norm`): a row is read once, and stays in a core's nearest cache.

Backward adds up the gradient of the weight for groups of rows, and then the groups, in one order
for any number of threads.
"""

from functools import partial
from math import sqrt

import numpy as np
import torch
from numba import float32, njit, uint64
from torch import Tensor

from hpczero_kernels.cpu import (
    CODES,
    FP32,
    address_of,
    inner,
    kernel,
    load,
    pointer,
    pool_of_torch,
    store,
)

_GROUP = 64  # rows whose gradients of the weight are added up one after the other
# The compiler chooses the order of a sum, the same in all calls, so that it can vectorise it.
_sums = njit(error_model="numpy", nogil=True, fastmath={"reassoc", "contract"})


@_sums
def _sum_of_squares(values, size):
    total = float32(0.0)
    for i in range(size):
        total += values[i] * values[i]
    return total


@inner
def _weights(weight, precision, columns, offset):
    """Return offset + weight in fp32."""
    weights = np.empty(columns, np.float32)
    load(weights, columns, weight, precision, uint64(0))
    for i in range(columns):
        weights[i] += offset
    return weights


@kernel("void(uint64, uint64, uint64, uint64, int64, uint64, float32, float32, uint64, uint64)")
def _rms_forward(x, weight, y, inverses, precision, columns, eps, offset, start, stop):
    """Set rows start .. stop - 1 of y and their inverse deviations; tensors are addresses."""
    weights = _weights(weight, precision, columns, offset)
    values = np.empty(columns, np.float32)
    share = float32(1.0) / float32(columns)
    while start < stop:
        first = start * columns
        load(values, columns, x, precision, first)
        inverse = float32(1.0) / sqrt(_sum_of_squares(values, columns) * share + eps)
        pointer(inverses, float32)[start] = inverse
        for i in range(columns):
            values[i] *= inverse * weights[i]
        store(values, columns, y, precision, first)
        start += uint64(1)


@_sums
def _gather(normal, g, weights, sums, inverse, size):
    """Set normal to x * inverse and g to g * weight; return the sum of their products.

    Add g * normal to sums.
    """
    along = float32(0.0)
    for i in range(size):
        normal[i] *= inverse
        part = g[i] * normal[i]
        sums[i] += part
        along += part * weights[i]
        g[i] *= weights[i]
    return along


@kernel(
    "void(uint64, uint64, uint64, uint64, uint64, uint64, int64, uint64, float32, uint64, uint64)"
)
def _rms_backward(
    gradient, x, weight, inverses, grad_x, groups, precision, columns, offset, start, stop
):
    """Set rows start .. stop - 1 of grad_x, and the weight's gradient of each group of rows.

    `start` begins a group; tensors are addresses, `groups` of fp32 [groups, columns].
    """
    weights = _weights(weight, precision, columns, offset)
    normal = np.empty(columns, np.float32)
    g = np.empty(columns, np.float32)
    sums = np.empty(columns, np.float32)
    share = float32(1.0) / float32(columns)
    while start < stop:
        end = min(start + uint64(_GROUP), stop)
        sums[:] = float32(0.0)
        group = start // uint64(_GROUP)
        while start < end:
            first = start * columns
            inverse = pointer(inverses, float32)[start]
            load(normal, columns, x, precision, first)
            load(g, columns, gradient, precision, first)
            along = _gather(normal, g, weights, sums, inverse, columns) * share
            for i in range(columns):
                g[i] = inverse * (g[i] - normal[i] * along)
            store(g, columns, grad_x, precision, first)
            start += uint64(1)
        store(sums, columns, groups, FP32, group * columns)


def rms_forward(x: Tensor, weight: Tensor, eps: float, offset: float) -> tuple[Tensor, Tensor]:
    """Return y and each row's inverse deviation."""
    x = x.contiguous()
    weight = weight.contiguous()  # named, so that it lives as long as its address is used
    columns = x.shape[-1]
    rows = x.numel() // columns
    y = torch.empty_like(x)
    inverses = x.new_empty(rows, dtype=torch.float32)
    addresses = map(address_of, (x, weight, y, inverses))
    arguments = (*addresses, CODES[x.dtype], columns, eps, offset)
    pool_of_torch().run_rows(partial(_rms_forward, *arguments), rows, columns)
    return y, inverses


def rms_backward(
    gradient: Tensor, x: Tensor, weight: Tensor, inverses: Tensor, offset: float
) -> tuple[Tensor, Tensor]:
    """Return the gradients of x and weight."""
    gradient = gradient.contiguous()
    x = x.contiguous()
    weight = weight.contiguous()  # named, so that it lives as long as its address is used
    columns = x.shape[-1]
    rows = x.numel() // columns
    grad_x = torch.empty_like(x)
    groups = x.new_empty(-(-rows // _GROUP), columns, dtype=torch.float32)
    addresses = map(address_of, (gradient, x, weight, inverses, grad_x, groups))
    arguments = (*addresses, CODES[x.dtype], columns, offset)
    pool_of_torch().run_rows(partial(_rms_backward, *arguments), rows, columns, _GROUP)
    return grad_x, groups.sum(0).to(weight.dtype)
