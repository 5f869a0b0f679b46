"""Memory by lifetime: what lives as long as the run comes from few large blocks, taken once, in order; nothing is freed, so nothing fragments.

A block's pages are touched by whoever writes them first, so memory is used (and placed on a NUMA node) only then.
"""

from collections.abc import Mapping
from math import prod

import torch

from hpczero.device import CPU

_ALIGNMENT = 64  # bytes


class Arena:
    """One block a kind ("weights", "moments", ...). `blocks` are given from outside (a node's shared window); the others are allocated on the
    device of this name.
    """

    def __init__(self, sizes: Mapping[str, int], blocks: Mapping[str, torch.Tensor] | None = None, place: torch.device = CPU.torch) -> None:
        self.sizes = dict(sizes)
        self._blocks = dict(blocks or {})
        for kind, size in sizes.items():
            if kind not in self._blocks:
                self._blocks[kind] = torch.empty(size, dtype=torch.uint8, device=place)
        self._taken = dict.fromkeys(sizes, 0)

    def take(self, kind: str, shape: int | tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        elements = shape if isinstance(shape, int) else prod(shape)
        start = self._taken[kind]
        size = elements * dtype.itemsize
        assert start + size <= self.sizes[kind], f"the arena's block for {kind} has {self.sizes[kind]} bytes, {start} are taken, {size} are asked for"
        self._taken[kind] = start + room(size)
        return self._blocks[kind][start : start + size].view(dtype).view(shape)


def room(size: int) -> int:
    """What a buffer of `size` bytes takes of its block."""
    return -(-size // _ALIGNMENT) * _ALIGNMENT
