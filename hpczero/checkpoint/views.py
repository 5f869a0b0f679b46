"""Tensors of other programs' files as ranges of a checkpoint's (pure)."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class Part:
    """Elements start .. stop - 1 of a parameter, in memory order."""

    parameter: str
    start: int
    stop: int


@dataclass(frozen=True)
class View:
    """A tensor of a file: the parts one after the other.

    `transposed`: they are a matrix [columns, rows], which the file has as [rows, columns].
    """

    name: str
    shape: tuple[int, ...]
    parts: tuple[Part, ...]
    transposed: bool = False


@dataclass(frozen=True)
class ViewRange:
    """Elements start .. stop - 1 of a view, which are a part of a parameter."""

    view: View
    start: int
    stop: int


def as_they_are(shapes: Mapping[str, tuple[int, ...]]) -> list[View]:
    return [View(name, shape, (Part(name, 0, prod(shape)),)) for name, shape in shapes.items()]


def sources(views: Iterable[View]) -> dict[str, Sequence[ViewRange]]:
    """Return of each parameter the parts of views that it is made of, in memory order."""
    found: dict[str, list[tuple[int, ViewRange]]] = {}
    for view in views:
        begin = 0
        for part in view.parts:
            source = ViewRange(view, begin, begin + part.stop - part.start)
            found.setdefault(part.parameter, []).append((part.start, source))
            begin = source.stop
    return {
        name: [source for _, source in sorted(parts, key=lambda part: part[0])]
        for name, parts in found.items()
    }


def transposed(matrix: Array, elements: int) -> Iterator[Array]:
    """Yield the transposed matrix in memory order, flat, about so many elements at a time."""
    rows = max(1, elements // matrix.shape[0])
    for first in range(0, matrix.shape[1], rows):
        yield np.ascontiguousarray(matrix[:, first : first + rows].T).reshape(-1)
