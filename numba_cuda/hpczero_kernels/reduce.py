"""Sum of k pieces of a gradient in fp32, in the order given.

The same pass gives sums of squares over fixed blocks, and tells whether any element is infinite or
NaN.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numba import float32, uint64

from hpczero_kernels.cpu import (
    BF16,
    BLOCK,
    CODES,
    INLINE,
    STRETCH,
    Pool,
    add,
    address_of,
    inner,
    kernel,
    load,
    load_sum,
    pointer,
    store_and_square,
)
from hpczero_kernels.dispatch import CUDA, NUMBA, choose


def sum_pieces_reference(
    pieces: Sequence[torch.Tensor],
    out: torch.Tensor,
    accumulate: bool,
    squares: torch.Tensor | None,
    bad: torch.Tensor | None = None,
) -> None:
    """Set out = [out +] the sum of the pieces."""
    total = pieces[0].float()
    for piece in pieces[1:]:
        total = total + piece
    out.copy_(out + total if accumulate else total)
    if squares is not None:
        for number in range(squares.numel()):
            squares[number] = out[number * BLOCK : (number + 1) * BLOCK].float().square().sum()
    if bad is not None:
        bad.copy_(torch.where(out.isfinite().all(), bad, 1.0))


@inner
def _sum_stretches(pieces, precision, out, out_precision, accumulate, squares, start, stop):
    """Do the work of `_sum`; a block's squares are complete after its last stretch."""
    total = np.empty(STRETCH, np.float32)
    squared = float32(0.0)
    while start < stop:
        size = min(stop - start, uint64(STRETCH))
        if pieces.size == 1:
            load(total, size, pieces[0], precision, start)
        else:  # two at once are read faster than one after the other
            load_sum(total, size, pieces[0], pieces[1], precision, start)
        for number in range(2, pieces.size):
            add(total, size, pieces[number], precision, start)
        if accumulate:
            add(total, size, out, out_precision, start)
        if start % uint64(BLOCK) == 0:
            squared = float32(0.0)
        squared += store_and_square(total, size, out, out_precision, start)
        if squares:
            pointer(squares, float32)[start // uint64(BLOCK)] = squared
        start += uint64(STRETCH)


@kernel("void(uint64[::1], int64, uint64, int64, boolean, uint64, uint64, uint64)")
def _sum(pieces, precision, out, out_precision, accumulate, squares, start, stop):
    """Sum elements start .. stop - 1; `start` begins a block.

    pieces, out and squares (0: none) are addresses.
    """
    if precision == out_precision == BF16:
        # With constants the usual case is compiled for itself: a twentieth faster.
        _sum_stretches(pieces, BF16, out, BF16, accumulate, squares, start, stop)
    else:
        _sum_stretches(pieces, precision, out, out_precision, accumulate, squares, start, stop)


def sum_pieces(
    pieces: Sequence[torch.Tensor],
    out: torch.Tensor,
    accumulate: bool,
    squares: torch.Tensor | None,
    pool: Pool = INLINE,
    bad: torch.Tensor | None = None,
) -> None:
    """Sum the pieces into `out`, bit for bit as sum_pieces_reference does.

    Every piece is read once and `out` is written once. The pieces are flat and of one precision;
    `out` may be one of them, and must not overlap with them otherwise. squares[b] (fp32) becomes
    the sum of squares of block b of `out` as stored. bad[0] (fp32) becomes 1 if an element is
    infinite or NaN, and keeps its value otherwise.
    """
    count = out.numel()
    precision = pieces[0].dtype
    assert all(
        piece.numel() == count and piece.dtype == precision and piece.is_contiguous()
        for piece in pieces
    )
    assert out.is_contiguous()
    assert squares is None or (
        squares.numel() == -(-count // BLOCK) and squares.dtype == torch.float32
    )
    implementation = choose("sum", out)
    if implementation == CUDA:
        from hpczero_kernels.cuda import reduce

        reduce.sum_pieces(pieces, out, accumulate, squares, bad)
    elif implementation == NUMBA:
        _sum_pieces(pieces, out, accumulate, squares, pool)
        _note_bad(out, squares, bad)
    else:
        sum_pieces_reference(pieces, out, accumulate, squares, bad)


def _sum_pieces(
    pieces: Sequence[torch.Tensor],
    out: torch.Tensor,
    accumulate: bool,
    squares: torch.Tensor | None,
    pool: Pool,
) -> None:
    addresses = np.array([address_of(piece) for piece in pieces], np.uint64)
    kinds = (CODES[pieces[0].dtype], address_of(out), CODES[out.dtype])
    squares_address = 0 if squares is None else address_of(squares)

    def run_slice(start: int, stop: int) -> None:
        _sum(addresses, *kinds, accumulate, squares_address, start, stop)

    pool.run(run_slice, out.numel())


def _note_bad(out: torch.Tensor, squares: torch.Tensor | None, bad: torch.Tensor | None) -> None:
    """Set `bad` if an element is not finite.

    Finite squares prove finite elements; squares that are not finite may come from large elements.
    """
    if bad is None or (squares is not None and bool(squares.isfinite().all())):
        return
    if not bool(out.isfinite().all()):
        bad.fill_(1.0)
