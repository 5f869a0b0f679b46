"""Cross-entropy's two kernels (`hpczero_kernels.cross_entropy`): before and after what ranks that share a vocabulary tell each other.

A block of threads has a row. Rows of an odd length do not begin at multiples of 16 bytes: what lies before the first such place and after
the last vector is taken one by one.
"""

from math import inf

import torch
from numba import float32, uint32, uint64

from hpczero_kernels.cpu import CODES, FP32
from hpczero_kernels.cross_entropy import IGNORED
from hpczero_kernels.cuda.intrinsics import WARP, block_max, block_sum, exp, inner, moved
from hpczero_kernels.cuda.launch import ADDRESS, CODE, COUNT, blocks, kernel
from hpczero_kernels.cuda.target import cuda
from hpczero_kernels.cuda.vectors import (
    EIGHT,
    element,
    fetch,
    narrow,
    put,
    put_element,
    whole_number,
    widen,
)

_MOST = 512  # threads
_IGNORED = uint64(IGNORED % 2**64)
_NONE, _LEAST = float32(0.0), float32(-inf)


@inner
def _scaled_to(sum, most, new):
    """The sum of exp(x - most) as one of exp(x - new)."""
    return sum if most == new else sum * exp(most - new)


@inner
def _shift(most):
    """What is subtracted: infinite ones would give NaN where the sum has a value."""
    return _NONE if most == _LEAST else most


@inner
def _before_vectors(address, start, columns, size):
    """How many elements of a row lie before the first multiple of 16 bytes."""
    return min(columns, (uint64(16) - (address + start * size) % uint64(16)) % uint64(16) // size)


@kernel(ADDRESS, COUNT, ADDRESS, CODE, COUNT, COUNT, ADDRESS, ADDRESS, ADDRESS)
def statistics(logits, address, targets, precision, columns, first, most_of, sum_of, target_of):
    """`address`: logits', as a number."""
    words, numbers = cuda.local.array(EIGHT, uint32), cuda.local.array(EIGHT, float32)
    row, thread, threads = (
        uint64(cuda.blockIdx.x),
        uint64(cuda.threadIdx.x),
        uint64(cuda.blockDim.x),
    )
    start, size = row * columns, uint64(4) if precision == FP32 else uint64(2)
    head = _before_vectors(address, start, columns, size)
    body = (columns - head) // uint64(EIGHT)
    most, total = _LEAST, _NONE
    if thread < head:
        most = element(logits, precision, start + thread)
        total = exp(most - _shift(most))
    rest = head + body * uint64(EIGHT) + thread
    if rest < columns:
        number = element(logits, precision, start + rest)
        new = max(most, number)
        total = _scaled_to(total, most, new) + exp(number - _shift(new))
        most = new
    from_head, vector = moved(logits, (start + head) * size), thread
    while vector < body:
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
    of_row = block_max(most)
    total = block_sum(_scaled_to(total, most, of_row))
    if thread == uint64(0):
        put_element(most_of, FP32, row, of_row)
        put_element(sum_of, FP32, row, total)
        own = whole_number(targets, row) - first
        put_element(
            target_of,
            FP32,
            row,
            element(logits, precision, start + own) if own < columns else _NONE,
        )


@kernel(ADDRESS, COUNT, ADDRESS, CODE, COUNT, COUNT, ADDRESS, ADDRESS, ADDRESS)
def gradient(logits, address, targets, precision, columns, first, most_of, sum_of, scales):
    """Written over the logits; `scales`: one number."""
    words, numbers = cuda.local.array(EIGHT, uint32), cuda.local.array(EIGHT, float32)
    row, thread, threads = (
        uint64(cuda.blockIdx.x),
        uint64(cuda.threadIdx.x),
        uint64(cuda.blockDim.x),
    )
    start, size = row * columns, uint64(4) if precision == FP32 else uint64(2)
    head = _before_vectors(address, start, columns, size)
    body = (columns - head) // uint64(EIGHT)
    wanted = whole_number(targets, row)
    most, scale, own = element(most_of, FP32, row), element(scales, FP32, uint64(0)), wanted - first
    if wanted == _IGNORED:
        scale = _NONE
    factor = scale / element(sum_of, FP32, row)
    if thread < head:
        number = exp(element(logits, precision, start + thread) - most) * factor
        put_element(logits, precision, start + thread, number - scale if thread == own else number)
    rest = head + body * uint64(EIGHT) + thread
    if rest < columns:
        number = exp(element(logits, precision, start + rest) - most) * factor
        put_element(logits, precision, start + rest, number - scale if rest == own else number)
    from_head, vector = moved(logits, (start + head) * size), thread
    while vector < body:
        fetch(words, from_head, precision, vector * uint64(EIGHT), uint64(EIGHT), 1)
        widen(numbers, words, precision)
        column = head + vector * uint64(EIGHT)
        for i in range(EIGHT):
            numbers[i] = exp(numbers[i] - most) * factor
            if column + uint64(i) == own:
                numbers[i] -= scale
        narrow(words, numbers, precision)
        put(words, from_head, precision, vector * uint64(EIGHT), uint64(EIGHT), 1)
        vector += threads


def part_statistics(
    logits: torch.Tensor, targets: torch.Tensor, first: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rows, columns = logits.shape
    most, sums, of_targets = (logits.new_empty(rows, dtype=torch.float32) for _ in range(3))
    statistics.launch(
        (rows, 1), _threads(columns),
        logits.data_ptr(), logits.data_ptr(), targets.data_ptr(), CODES[logits.dtype], columns, first, most.data_ptr(), sums.data_ptr(),
        of_targets.data_ptr(),
    )  # fmt: skip
    return most, sums, of_targets


def part_gradient_(
    logits: torch.Tensor,
    targets: torch.Tensor,
    first: int,
    most: torch.Tensor,
    sums: torch.Tensor,
    scale: torch.Tensor,
) -> None:
    rows, columns = logits.shape
    scale = scale.float()
    gradient.launch(
        (rows, 1), _threads(columns),
        logits.data_ptr(), logits.data_ptr(), targets.data_ptr(), CODES[logits.dtype], columns, first, most.data_ptr(), sums.data_ptr(),
        scale.data_ptr(),
    )  # fmt: skip


def _threads(columns: int) -> int:
    return min(_MOST, WARP * blocks(max(1, columns), WARP * EIGHT))
