"""Dropout by address: what is dropped depends on (key, sample, index in the sample), so it is the same on every layout and need not be kept
for backward.

x is [samples, rows, columns]: a piece of the logical activation [samples, all rows, all columns] that begins at (first_row, first_column).
An element's index in its sample is row * all_columns + column; it is dropped where its Philox word is below p * 2^32.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numba import njit, uint32, uint64

from hpczero_kernels.philox import block_of_words, words_reference


@dataclass(frozen=True)
class Place:
    """Where a piece lies in the logical activation."""

    all_columns: int
    first_row: int = 0
    first_column: int = 0


def keep_reference(key: int, probability: float, samples: torch.Tensor, shape: tuple[int, int, int], place: Place) -> torch.Tensor:
    """Which elements stay: bool [samples, rows, columns]."""
    _, rows, columns = shape
    kept = torch.empty(shape, dtype=torch.bool)
    for number, sample in enumerate(samples.tolist()):
        for row in range(rows):
            first = (place.first_row + row) * place.all_columns + place.first_column
            kept[number, row] = words_reference(key, sample, first, columns) >= threshold(probability)
    return kept


def threshold(probability: float) -> int:
    return int(probability * 2**32)


@njit("void(uint64, uint32, int64[::1], uint64, uint64, uint64, uint8[:,:,::1])", nogil=True, cache=True, error_model="numpy")
def _fill_keep(key, limit, samples, all_columns, first_row, first_column, out):
    for number in range(out.shape[0]):
        stream = uint64(samples[number])
        for row in range(out.shape[1]):
            start = (first_row + uint64(row)) * all_columns + first_column
            column = 0
            while column < out.shape[2]:
                position = start + uint64(column)
                words = block_of_words(key, stream, position >> uint64(2))
                lane = position & uint64(3)
                while lane < uint64(4) and column < out.shape[2]:
                    out[number, row, column] = words[lane] >= limit
                    lane += uint64(1)
                    column += 1


def keep(key: int, probability: float, samples: torch.Tensor, shape: tuple[int, int, int], place: Place) -> torch.Tensor:
    """As keep_reference, by the numba kernel."""
    out = np.empty(shape, np.uint8)
    _fill_keep(
        np.uint64(key), uint32(threshold(probability)), samples.numpy(), np.uint64(place.all_columns), np.uint64(place.first_row),
        np.uint64(place.first_column), out,
    )  # fmt: skip
    return torch.from_numpy(out).view(torch.bool)


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: torch.Tensor, probability: float, key: int, samples: torch.Tensor, place: Place) -> torch.Tensor:
        context.arguments = (key, probability, samples, tuple(x.shape), place)
        return x * keep(*context.arguments) * (1.0 / (1.0 - probability))

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        _, probability, *_ = context.arguments
        return gradient * keep(*context.arguments) * (1.0 / (1.0 - probability)), None, None, None, None


def dropout(x: torch.Tensor, probability: float, key: int, samples: torch.Tensor, place: Place | None = None) -> torch.Tensor:
    """x [samples, rows, columns] with each element dropped with the given probability, the others scaled up; `samples` is int64 [samples]."""
    return _Dropout.apply(x, probability, key, samples, place or Place(all_columns=x.shape[-1]))
