"""Normally distributed initial values by address: element i of a parameter depends on its key and i alone.

Box-Muller on pairs of Philox words: words 2j and 2j+1 give elements 2j (cosine) and 2j+1 (sine).
"""

from math import cos, log, pi, sin, sqrt

import numpy as np
import torch
from numba import njit, uint64

from hpczero_kernels.philox import block_of_words, words_reference
from hpczero_kernels.sources import named_by_sources

_UNIT = 2.0**-32


def normal_reference(key: int, first: int, count: int, std: float) -> torch.Tensor:
    """Elements first .. first + count - 1, in fp32 (computed in fp64)."""
    start, stop = first // 2 * 2, (first + count + 1) // 2 * 2
    pairs = words_reference(key, 0, start, stop - start).double().view(-1, 2)
    radius = torch.sqrt(-2.0 * torch.log((pairs[:, 0] + 1.0) * _UNIT))
    angle = 2.0 * pi * pairs[:, 1] * _UNIT
    values = torch.stack([radius * torch.cos(angle), radius * torch.sin(angle)], dim=1).flatten() * std
    return values[first - start : first - start + count].float()


@njit("void(uint64, uint64, float64, float32[::1])", nogil=True, cache=True)
@named_by_sources
def _fill_normal(key, first, std, out):
    block, words = uint64(0xFFFFFFFFFFFFFFFF), block_of_words(key, uint64(0), uint64(0))
    for index in range(out.size):
        position = first + uint64(index)
        if position >> uint64(2) != block:
            block = position >> uint64(2)
            words = block_of_words(key, uint64(0), block)
        pair = (position & uint64(3)) >> uint64(1)
        radius = sqrt(-2.0 * log((words[2 * pair] + 1.0) * _UNIT))
        angle = 2.0 * pi * words[2 * pair + 1] * _UNIT
        out[index] = std * radius * (sin(angle) if position & uint64(1) else cos(angle))


def fill_normal(out: torch.Tensor, key: int, first: int, std: float) -> None:
    """out (fp32, contiguous) becomes elements first .. first + out.numel() - 1 of the key's values."""
    _fill_normal(np.uint64(key), np.uint64(first), std, out.view(-1).numpy())
