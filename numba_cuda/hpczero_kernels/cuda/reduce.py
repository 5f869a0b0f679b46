"""Sum of k pieces of a gradient (`hpczero_kernels.reduce`).

A block of threads has one block of squares, so that the cut of a buffer changes no result.
"""

from collections.abc import Sequence
from math import inf
from typing import NamedTuple

import torch
from numba import float32, uint32, uint64

from hpczero_kernels.cpu import BLOCK, CODES, FP32
from hpczero_kernels.cuda.intrinsics import block_sum, inner, moved
from hpczero_kernels.cuda.launch import ADDRESS, CODE, COUNT, THREADS, aligned, blocks, kernel
from hpczero_kernels.cuda.target import cuda
from hpczero_kernels.cuda.vectors import EIGHT, load, narrow, put, put_element, whole_number, widen

_VECTORS = BLOCK // (THREADS * EIGHT)  # of a thread
_RUNS = 3  # pieces of the ranks before this one, this rank's piece, and those of the ranks after it
_WRAP = 2**64


class Run(NamedTuple):
    """Pieces at equal distances.

    `start`: bytes from the first of all pieces to the first of these; `stride`: bytes between
    these. Both are modulo 2^64, as a piece may lie before the first.
    """

    start: int
    stride: int
    pieces: int


def runs(addresses: Sequence[int]) -> list[Run]:
    """Return the pieces as runs, in their order."""
    result: list[Run] = []
    for address in addresses:
        start = (address - addresses[0]) % _WRAP
        if result:
            last = result[-1]
            distance = (start - last.start) % _WRAP
            stride = distance if last.pieces == 1 else last.stride
            if distance == (stride * last.pieces) % _WRAP:
                result[-1] = Run(last.start, stride, last.pieces + 1)
                continue
        result.append(Run(start, 0, 1))
    return result


@inner
def _distance(
    number, table, has_table, first_stride, first_count, start, stride, count, last_start,
    last_stride,
):  # fmt: skip
    """Return the bytes from the first piece to piece `number`."""
    if has_table:
        return whole_number(table, uint64(number))
    if number < first_count:
        return uint64(number) * first_stride
    if number < first_count + count:
        return start + uint64(number - first_count) * stride
    return last_start + uint64(number - first_count - count) * last_stride


@kernel(
    ADDRESS, CODE, CODE, ADDRESS, CODE, COUNT, CODE, COUNT, COUNT, CODE, COUNT, COUNT,
    ADDRESS, CODE, CODE, ADDRESS, CODE, ADDRESS, CODE, COUNT, CODE,
)  # fmt: skip
def add(
    first, pieces, precision, table, has_table, first_stride, first_count, start, stride, run_count,
    last_start, last_stride,
    out, out_precision, accumulate, squares, has_squares, bad, has_bad, count, is_aligned,
):  # fmt: skip
    """Add up pieces that lie in three runs, given by value, or at distances that a table gives."""
    words = cuda.local.array(EIGHT, uint32)
    numbers = cuda.local.array(EIGHT, float32)
    total = cuda.local.array(EIGHT, float32)
    square = float32(0.0)
    finite = True
    for vector in range(_VECTORS):
        in_block = (uint64(vector * THREADS) + uint64(cuda.threadIdx.x)) * uint64(EIGHT)
        index = uint64(cuda.blockIdx.x) * uint64(BLOCK) + in_block
        if index < count:
            left = count - index
            load(total, first, precision, index, left, is_aligned)
            for piece in range(1, pieces):
                distance = _distance(
                    piece, table, has_table, first_stride, first_count, start, stride, run_count,
                    last_start, last_stride,
                )  # fmt: skip
                load(numbers, moved(first, distance), precision, index, left, is_aligned)
                for i in range(EIGHT):
                    total[i] += numbers[i]
            if accumulate:
                load(numbers, out, out_precision, index, left, is_aligned)
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


def sum_pieces(
    pieces: Sequence[torch.Tensor],
    out: torch.Tensor,
    accumulate: bool,
    squares: torch.Tensor | None,
    bad: torch.Tensor | None,
) -> None:
    """Carry out hpczero_kernels.reduce.sum_pieces on a GPU."""
    count = out.numel()
    addresses = [piece.data_ptr() for piece in pieces]
    all_runs = runs(addresses)
    table = _table(addresses, out.device) if len(all_runs) > _RUNS else None
    one, two, three = (all_runs + [_NO_PIECES] * _RUNS)[:_RUNS]
    add.launch(
        (blocks(count, BLOCK), 1), THREADS,
        addresses[0], len(pieces), CODES[pieces[0].dtype],
        0 if table is None else table.data_ptr(), table is not None,
        one.stride, one.pieces, two.start, two.stride, two.pieces, three.start, three.stride,
        out.data_ptr(), CODES[out.dtype], accumulate,
        0 if squares is None else squares.data_ptr(), squares is not None,
        0 if bad is None else bad.data_ptr(), bad is not None, count, aligned(*pieces, out),
    )  # fmt: skip


_NO_PIECES = Run(0, 0, 0)


def _table(addresses: Sequence[int], device: torch.device) -> torch.Tensor:
    """Return the pieces' distances on the device, for pieces in more runs than the kernel takes.

    hpczero's communication never brings such pieces. The copy is from pinned memory, so that the
    host does not wait.
    """
    distances = [address - addresses[0] for address in addresses]
    if device.type == "cpu":
        return torch.tensor(distances, dtype=torch.int64)
    return torch.tensor(distances, dtype=torch.int64, pin_memory=True).to(device, non_blocking=True)
