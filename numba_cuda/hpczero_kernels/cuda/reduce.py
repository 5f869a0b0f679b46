"""The sum of k pieces of a gradient (`hpczero_kernels.reduce`): a block of threads for each block of squares, so that the cut changes nothing."""

from collections.abc import Sequence
from functools import lru_cache
from math import inf

import torch
from numba import float32, uint32, uint64

from hpczero_kernels.cuda.intrinsics import block_sum, inner, moved
from hpczero_kernels.cuda.launch import ADDRESS, CODE, COUNT, THREADS, aligned, blocks, kernel
from hpczero_kernels.cuda.target import cuda
from hpczero_kernels.cuda.vectors import EIGHT, fetch, narrow, put, put_element, whole_number, widen
from hpczero_kernels.pool import BLOCK
from hpczero_kernels.precision import CODES, FP32

_EACH = BLOCK // (THREADS * EIGHT)  # vectors of a thread


@inner
def _piece(first, distances, number):
    return moved(first, whole_number(distances, uint64(number - 1)))


@kernel(ADDRESS, ADDRESS, CODE, CODE, ADDRESS, CODE, CODE, ADDRESS, CODE, ADDRESS, CODE, COUNT, CODE)
def add(first, distances, pieces, precision, out, out_precision, accumulate, squares, has_squares, bad, has_bad, count, is_aligned):
    """`distances` in bytes from the first piece to the others."""
    words, numbers, total = cuda.local.array(EIGHT, uint32), cuda.local.array(EIGHT, float32), cuda.local.array(EIGHT, float32)
    square, finite = float32(0.0), True
    for part in range(_EACH):
        index = uint64(cuda.blockIdx.x) * uint64(BLOCK) + (uint64(part * THREADS) + uint64(cuda.threadIdx.x)) * uint64(EIGHT)
        if index < count:
            left = count - index
            fetch(words, first, precision, index, left, is_aligned)
            widen(total, words, precision)
            for piece in range(1, pieces):
                fetch(words, _piece(first, distances, piece), precision, index, left, is_aligned)
                widen(numbers, words, precision)
                for i in range(EIGHT):
                    total[i] += numbers[i]
            if accumulate:
                fetch(words, out, out_precision, index, left, is_aligned)
                widen(numbers, words, out_precision)
                for i in range(EIGHT):
                    total[i] = numbers[i] + total[i]
            narrow(words, total, out_precision)
            put(words, out, out_precision, index, left, is_aligned)
            widen(total, words, out_precision)  # as stored
            for i in range(EIGHT):
                square += total[i] * total[i]
                finite = finite and abs(total[i]) < float32(inf)
    if has_squares:
        square = block_sum(square)
        if cuda.threadIdx.x == 0:
            put_element(squares, FP32, uint64(cuda.blockIdx.x), square)
    if has_bad and not finite:
        put_element(bad, FP32, uint64(0), float32(1.0))


def sum_pieces(pieces: Sequence[torch.Tensor], out: torch.Tensor, accumulate: bool, squares: torch.Tensor | None, bad: torch.Tensor | None) -> None:
    """As hpczero_kernels.reduce.sum_pieces, on a device."""
    count, first = out.numel(), pieces[0].data_ptr()
    distances = _table(tuple(piece.data_ptr() - first for piece in pieces[1:]), out.device)
    add.launch(
        (blocks(count, BLOCK), 1), THREADS,
        first, distances.data_ptr(), len(pieces), CODES[pieces[0].dtype], out.data_ptr(), CODES[out.dtype], accumulate,
        0 if squares is None else squares.data_ptr(), squares is not None, 0 if bad is None else bad.data_ptr(), bad is not None,
        count, aligned(*pieces, out),
    )  # fmt: skip


@lru_cache(maxsize=4096)
def _table(numbers: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """On the device; buffers of an engine stay where they are, so that a step copies none."""
    return torch.tensor(numbers, dtype=torch.int64, device=device)
