"""Rotary embedding (Su et al. 2021) turns pairs of a head's elements by an angle.

Element i goes with element pairs + i; elements from 2 pairs on stay as they are:

    y = [a cos - b sin, b cos + a sin, rest] for x = [a, b, rest]

Legend: x [samples, positions, heads, head_dim]; cosines and sines fp32 [positions, pairs], or
[samples, positions, pairs] where each sample has positions of its own.
"""

from functools import partial
from typing import Any

import numpy as np
import torch
from numba import float32, uint16, uint64
from torch import Tensor
from torch.autograd.function import once_differentiable

from hpczero_kernels.cpu import (
    CODES,
    FP32,
    STRETCH,
    address_of,
    inner,
    kernel,
    load,
    pointer,
    pool_of_torch,
    store,
)
from hpczero_kernels.dispatch import TORCH, choose, empty_contiguous, operator, upcast_half


def angles(positions: Tensor, head_dim: int, base: float = 10000.0) -> tuple[Tensor, Tensor]:
    """Return the cosines and sines for these positions (int64)."""
    even = torch.arange(0, head_dim, 2, dtype=torch.float64, device=positions.device)
    frequencies = base ** (-even / head_dim)
    turned = positions.double()[..., None] * frequencies
    return turned.cos().float(), turned.sin().float()


def turn_reference(x: Tensor, cosines: Tensor, sines: Tensor, back: bool) -> Tensor:
    """Turn the pairs; `back` turns by the opposite angle, which is forward's backward."""
    pairs = pairs_of(x, cosines)
    low, high, rest = x.split([pairs, pairs, x.shape[-1] - 2 * pairs], -1)
    low, high = upcast_half(low), upcast_half(high)
    cosines = cosines.unsqueeze(-2)
    sines = (-sines if back else sines).unsqueeze(-2)
    turned = (low * cosines - high * sines, high * cosines + low * sines)
    return torch.cat([*(part.to(x.dtype) for part in turned), rest], -1)


def pairs_of(x: Tensor, cosines: Tensor) -> int:
    """Return the number of pairs that are turned, all of them within a head."""
    pairs, head_dim = cosines.shape[-1], x.shape[-1]
    assert 2 * pairs <= head_dim, f"{pairs} pairs do not fit into a head of {head_dim} elements"
    return pairs


@inner
def _copy(x, y, precision, index, size):
    """Copy elements as they are."""
    if precision == FP32:
        singles, copies = (
            pointer(x + uint64(4) * index, float32),
            pointer(y + uint64(4) * index, float32),
        )
        for i in range(size):
            copies[i] = singles[i]
    else:
        halves, others = (
            pointer(x + uint64(2) * index, uint16),
            pointer(y + uint64(2) * index, uint16),
        )
        for i in range(size):
            others[i] = halves[i]


@kernel(
    "void(uint64, uint64, uint64, uint64, int64, uint64, uint64, uint64, uint64, uint64, boolean,"
    " uint64, uint64)"
)
def _turn_rows(
    x, cosines, sines, y, precision, positions, heads, head_dim, pairs, of_sample, back, start, stop
):
    """Turn the heads of rows start .. stop - 1; a row is a position of a sample.

    x, y and the tables are addresses; a sample's angles lie `of_sample` after those of the one
    before.
    """
    low = np.empty(STRETCH, np.float32)
    high = np.empty(STRETCH, np.float32)
    sign = float32(-1.0) if back else float32(1.0)
    while start < stop:
        sample = start // positions
        row = sample * of_sample + (start - sample * positions) * pairs
        for head in range(heads):
            first = (start * heads + uint64(head)) * head_dim
            column = uint64(0)
            while column < pairs:
                size = min(pairs - column, uint64(STRETCH))
                c = pointer(cosines + uint64(4) * (row + column), float32)
                s = pointer(sines + uint64(4) * (row + column), float32)
                load(low, size, x, precision, first + column)
                load(high, size, x, precision, first + pairs + column)
                for i in range(size):
                    a = low[i]
                    sine = sign * s[i]
                    low[i] = a * c[i] - high[i] * sine
                    high[i] = high[i] * c[i] + a * sine
                store(low, size, y, precision, first + column)
                store(high, size, y, precision, first + pairs + column)
                column += size
            turned = uint64(2) * pairs
            _copy(x, y, precision, first + turned, head_dim - turned)
        start += uint64(1)


def turn_on_cpu(x: Tensor, cosines: Tensor, sines: Tensor, back: bool) -> Tensor:
    if x.dtype not in CODES:
        return turn_reference(x, cosines, sines, back)
    x = x.contiguous()
    cosines = cosines.contiguous()
    sines = sines.contiguous()
    samples, positions, heads, head_dim = x.shape
    pairs = cosines.shape[-1]
    of_sample = positions * pairs if cosines.dim() == 3 else 0
    y = torch.empty_like(x)
    shape = (positions, heads, head_dim, pairs, of_sample)
    arguments = (*map(address_of, (x, cosines, sines, y)), CODES[x.dtype], *shape, back)
    turn = partial(_turn_rows, *arguments)
    pool_of_torch().run_rows(turn, samples * positions, heads * head_dim)
    return y


_turn = operator(
    "rotary(Tensor x, Tensor cosines, Tensor sines, bool back) -> Tensor",
    turn_reference, "rotary:rotary", lambda x, cosines, sines, back: empty_contiguous(x),
    turn_on_cpu,
)  # fmt: skip


class Rotary(torch.autograd.Function):
    """Rotary embedding that keeps its tables alone."""

    @staticmethod
    def forward(context: Any, x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        context.save_for_backward(cosines, sines)
        return _turn(x, cosines, sines, False)

    @staticmethod
    @once_differentiable
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return _turn(gradient, *context.saved_tensors, True), None, None


def rotary(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Return x with the pairs turned that the tables have; other elements stay as they are."""
    pairs = pairs_of(x, cosines)
    fits = x.dim() == 4 and all(_is_table(x, table, pairs) for table in (cosines, sines))
    if choose("rotary", x, fits) != TORCH:
        return Rotary.apply(x, cosines, sines)
    return rotary_reference(x, cosines, sines)


def _is_table(x: Tensor, table: Tensor, pairs: int) -> bool:
    """Return True if the table has an angle of each pair for each position of x."""
    return (
        table.shape in ((x.shape[1], pairs), (*x.shape[:2], pairs))
        and table.dtype == torch.float32
        and table.device == x.device
    )


def rotary_reference(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    return turn_reference(x, cosines, sines, False)
