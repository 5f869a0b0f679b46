"""Kernels of cross-entropy: `statistics` before the reductions over ranks, `gradient` after.

`hpczero_kernels.cross_entropy` has the formulas. A block of threads has a row. Rows of an odd
length do not begin at multiples of 16 bytes: the elements before the first such multiple (the head)
and after the last vector (the tail) are read one by one.
"""

from math import inf

import torch
from numba import float32, uint32, uint64

from hpczero_kernels.cpu import CODES, FP32
from hpczero_kernels.cross_entropy import IGNORED
from hpczero_kernels.cuda.intrinsics import block_max, block_sum, exp, inner, moved
from hpczero_kernels.cuda.launch import ADDRESS, CODE, COUNT, kernel
from hpczero_kernels.cuda.target import cuda
from hpczero_kernels.cuda.vectors import (
    EIGHT,
    element,
    fetch,
    load,
    put_element,
    store,
    threads_for,
    whole_number,
    widen,
)

_MOST_THREADS = 512
_IGNORED = uint64(IGNORED % 2**64)
_ZERO, _LEAST = float32(0.0), float32(-inf)


@inner
def _scaled_to(sum, most, new):
    """Return the sum of exp(x - new) for that of exp(x - most)."""
    return sum if most == new else sum * exp(most - new)


@inner
def _shift(most):
    """Return the number to subtract; -inf would give NaN where the sum has a value."""
    return _ZERO if most == _LEAST else most


@inner
def _head(address, start, columns, size):
    """Return the number of elements of a row before the first multiple of 16 bytes."""
    return min(columns, (uint64(16) - (address + start * size) % uint64(16)) % uint64(16) // size)


@kernel(ADDRESS, COUNT, ADDRESS, CODE, COUNT, COUNT, ADDRESS, ADDRESS, ADDRESS)
def statistics(
    logits, address, targets, precision, columns, first, most_of, sum_of, target_logits
):  # fmt: skip
    """Write each row's largest logit, sum and target's logit; `address`: logits', as a number."""
    words = cuda.local.array(EIGHT, uint32)
    numbers = cuda.local.array(EIGHT, float32)
    row = uint64(cuda.blockIdx.x)
    thread = uint64(cuda.threadIdx.x)
    threads = uint64(cuda.blockDim.x)
    start = row * columns
    size = uint64(4) if precision == FP32 else uint64(2)
    head = _head(address, start, columns, size)
    vectors = (columns - head) // uint64(EIGHT)
    most = _LEAST
    total = _ZERO
    if thread < head:
        most = element(logits, precision, start + thread)
        total = exp(most - _shift(most))
    tail = head + vectors * uint64(EIGHT) + thread
    if tail < columns:
        number = element(logits, precision, start + tail)
        new = max(most, number)
        total = _scaled_to(total, most, new) + exp(number - _shift(new))
        most = new
    from_head = moved(logits, (start + head) * size)
    vector = thread
    while vector < vectors:
        # `load` instead would keep the compiler from unrolling the loop.
        fetch(words, from_head, precision, vector * uint64(EIGHT), uint64(EIGHT), 1)
        widen(numbers, words, precision)
        new = most
        for i in range(EIGHT):
            new = max(new, numbers[i])
        total = _scaled_to(total, most, new)
        for i in range(EIGHT):
            total += exp(numbers[i] - _shift(new))
        most = new
        vector += threads
    row_most = block_max(most)
    total = block_sum(_scaled_to(total, most, row_most))
    if thread == uint64(0):
        put_element(most_of, FP32, row, row_most)
        put_element(sum_of, FP32, row, total)
        target = whole_number(targets, row) - first
        logit = element(logits, precision, start + target) if target < columns else _ZERO
        put_element(target_logits, FP32, row, logit)


@kernel(ADDRESS, COUNT, ADDRESS, CODE, COUNT, COUNT, ADDRESS, ADDRESS, ADDRESS, CODE)
def gradient(
    logits, address, targets, precision, columns, first, most_of, sum_of, scales, of_rows
):  # fmt: skip
    """Write the gradient over the logits; `address`: logits', as a number.

    `scales` has a number for each row if `of_rows`, else one for all.
    """
    numbers = cuda.local.array(EIGHT, float32)
    row = uint64(cuda.blockIdx.x)
    thread = uint64(cuda.threadIdx.x)
    threads = uint64(cuda.blockDim.x)
    start = row * columns
    size = uint64(4) if precision == FP32 else uint64(2)
    head = _head(address, start, columns, size)
    vectors = (columns - head) // uint64(EIGHT)
    wanted = whole_number(targets, row)
    target = wanted - first
    most = element(most_of, FP32, row)
    scale = _ZERO if wanted == _IGNORED else element(scales, FP32, row if of_rows else uint64(0))
    factor = scale / element(sum_of, FP32, row)
    if thread < head:
        number = exp(element(logits, precision, start + thread) - most) * factor
        number = number - scale if thread == target else number
        put_element(logits, precision, start + thread, number)
    tail = head + vectors * uint64(EIGHT) + thread
    if tail < columns:
        number = exp(element(logits, precision, start + tail) - most) * factor
        number = number - scale if tail == target else number
        put_element(logits, precision, start + tail, number)
    from_head = moved(logits, (start + head) * size)
    vector = thread
    while vector < vectors:
        load(numbers, from_head, precision, vector * uint64(EIGHT), uint64(EIGHT), 1)
        column = head + vector * uint64(EIGHT)
        for i in range(EIGHT):
            numbers[i] = exp(numbers[i] - most) * factor
            if column + uint64(i) == target:
                numbers[i] -= scale
        store(numbers, from_head, precision, vector * uint64(EIGHT), uint64(EIGHT), 1)
        vector += threads


def shard_statistics(
    logits: torch.Tensor, targets: torch.Tensor, first: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rows, columns = logits.shape
    most, sums, target_logits = (logits.new_empty(rows, dtype=torch.float32) for _ in range(3))
    statistics.launch(
        (rows, 1), threads_for(columns, _MOST_THREADS),
        logits.data_ptr(), logits.data_ptr(), targets.data_ptr(), CODES[logits.dtype], columns,
        first, most.data_ptr(), sums.data_ptr(), target_logits.data_ptr(),
    )  # fmt: skip
    return most, sums, target_logits


def shard_gradient_(
    logits: torch.Tensor,
    targets: torch.Tensor,
    first: int,
    most: torch.Tensor,
    sums: torch.Tensor,
    scale: torch.Tensor,
) -> None:
    rows, columns = logits.shape
    scale = scale.float().contiguous()
    gradient.launch(
        (rows, 1), threads_for(columns, _MOST_THREADS),
        logits.data_ptr(), logits.data_ptr(), targets.data_ptr(), CODES[logits.dtype], columns,
        first, most.data_ptr(), sums.data_ptr(), scale.data_ptr(), int(scale.numel() > 1),
    )  # fmt: skip
