"""Calls of block-sparse attention with drawn layouts, and how far results are from exact ones.

Legend: q [samples, heads, seq, head_dim], k and v with kv_heads, a bias [heads, 2 seq - 1].
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hpczero_kernels.block_layout import BlockLayout


@dataclass(frozen=True)
class Case:
    """One call: shapes, a layout drawn by `seed`, and what else a query may not see."""

    seq: int = 77
    block: int = 16
    causal: bool = True
    heads: int = 2
    kv_heads: int = 2
    samples: int = 1
    head_dim: int = 8
    density: float = 0.5
    patterns: int = 1
    documents: tuple[tuple[int, ...], ...] | None = None
    cap: float = 0.0
    scale: float | None = None
    seed: int = 1
    biased: bool = False

    def layout(self) -> BlockLayout:
        draw = random.Random(self.seed)
        blocks = -(-self.seq // self.block)

        def row(number: int) -> tuple[int, ...]:
            most = number + 1 if self.causal else blocks
            return tuple(one for one in range(most) if draw.random() < self.density)

        patterns = tuple(tuple(map(row, range(blocks))) for _ in range(self.patterns))
        return BlockLayout(
            self.block, self.causal, patterns,
            tuple(head % self.patterns for head in range(self.heads)),
        )  # fmt: skip

    def tensors(self) -> list[Tensor]:
        """Return q, k, v, the bias if there is one, and the gradient of the output."""
        draw = torch.Generator().manual_seed(self.seed)
        heads = self.heads, self.kv_heads, self.kv_heads, self.heads
        shapes = [(self.samples, count, self.seq, self.head_dim) for count in heads]
        *parts, above = [torch.randn(shape, generator=draw) for shape in shapes]
        if self.biased:
            parts.append(torch.randn((self.heads, 2 * self.seq - 1), generator=draw))
        return [*parts, above]

    def carried_out(
        self, how: Callable[..., Tensor], dtype: torch.dtype = torch.float32, parts: Any = None
    ) -> list[Tensor]:
        """Return the output and the gradients of all inputs."""
        *parts, above = [one.to(dtype) for one in parts or self.tensors()]
        parts = [part.detach().requires_grad_() for part in parts]
        given = self.layout(), self.documents, self.cap, self.scale
        out = how(*parts[:3], *given, *parts[3:])
        return [out.detach(), *torch.autograd.grad(out, parts, above)]


def distances(found: list[Tensor], exact: list[Tensor]) -> list[float]:
    """Return the largest errors, relative to the largest values.

    Sums that cancel to nearly nothing still have the rounding of their terms.
    """
    for one, right in zip(found, exact, strict=True):
        assert one.shape == right.shape
        assert one.isfinite().all()
    return [
        float((one.double() - right.double()).abs().max() / right.abs().max().clamp(min=0.1))
        if right.numel()
        else 0.0
        for one, right in zip(found, exact, strict=True)
    ]
