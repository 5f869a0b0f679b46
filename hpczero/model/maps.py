"""Linear maps and embeddings of hpczero's own models, which a context can hand to somebody else.

The ZeRO engine uses it to write weight gradients straight into its buffers
(`parallel.zero.weight_gradients`). In other models it must intercept every torch operation.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional


class LinearMaps(Protocol):
    def linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor: ...

    def embedding(self, input: Tensor, weight: Tensor) -> Tensor: ...

    def gradient_of(self, weight: Tensor, into: Callable[[Tensor], None]) -> Tensor | None:
        """Return the gradient of a weight for autograd; `into` writes it. None: not known."""


_redirected: ContextVar[LinearMaps | None] = ContextVar("redirected", default=None)


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    maps = _redirected.get()
    return maps.linear(input, weight, bias) if maps else functional.linear(input, weight, bias)


def embedding(tokens: Tensor, vectors: Tensor) -> Tensor:
    maps = _redirected.get()
    return maps.embedding(tokens, vectors) if maps else functional.embedding(tokens, vectors)


def redirected() -> LinearMaps | None:
    """Return what carries out the maps here."""
    return _redirected.get()


def gradient_of(maps: LinearMaps | None, weight: Tensor, into: Callable[[Tensor], None]) -> Tensor:
    """Return the gradient of a weight, as autograd takes it in a backward; `into` writes it."""
    found = maps.gradient_of(weight, into) if maps else None
    if found is None:
        found = torch.empty(weight.shape, dtype=weight.dtype, device=weight.device)
        into(found)
    return found


def of_positions(vectors: Tensor, seq_len: int, positions: Tensor | None) -> Tensor:
    """Return the vectors of these positions, or of 0 .. seq_len - 1."""
    return vectors[:seq_len] if positions is None else functional.embedding(positions, vectors)


def of_segments(vectors: Tensor, segments: Tensor) -> Tensor:
    """Return the first vector where a segment is 0, and the second elsewhere.

    The gradient of a vector is a sum over most positions: a lookup would round it at each of them.
    """
    return torch.where(segments.unsqueeze(-1) > 0, vectors[1], vectors[0])


@contextmanager
def redirect_linear_maps(maps: LinearMaps) -> Iterator[None]:
    """Let `maps` carry out the linear maps and embeddings of this context."""
    before = _redirected.set(maps)
    try:
        yield
    finally:
        _redirected.reset(before)
