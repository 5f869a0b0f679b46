"""Linear maps and lookups of the models here, which somebody may do in another way for a time: who knows where gradients are to lie
(`parallel.direct`). Other modules have to be watched for that, at each of their operations.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol

from torch import Tensor
from torch.nn import functional


class LinearMaps(Protocol):
    def linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor: ...

    def embedding(self, input: Tensor, weight: Tensor) -> Tensor: ...


_way: ContextVar[LinearMaps | None] = ContextVar("way", default=None)


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    way = _way.get()
    return way.linear(input, weight, bias) if way else functional.linear(input, weight, bias)


def embedding(tokens: Tensor, vectors: Tensor) -> Tensor:
    way = _way.get()
    return way.embedding(tokens, vectors) if way else functional.embedding(tokens, vectors)


@contextmanager
def done_by(way: LinearMaps) -> Iterator[None]:
    before = _way.set(way)
    try:
        yield
    finally:
        _way.reset(before)
