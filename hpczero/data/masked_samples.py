"""Samples of text that a family's training masks: their tensors, and the text they are made of."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from hpczero.data.token_source import TokenSource

Tokens = np.ndarray[Any, np.dtype[np.int64]]
Flags = np.ndarray[Any, np.dtype[np.bool_]]


@dataclass(frozen=True)
class Masked:
    """The tensors of a micro-batch that samples make, as `model.batch` has them, or None."""

    tokens: Tokens
    targets: Tokens
    target_positions: Tokens | None = None
    weights: np.ndarray[Any, np.dtype[np.float32]] | None = None
    segments: Tokens | None = None
    labels: Tokens | None = None


class Objective(Protocol):
    """How the samples of a run are made of text."""

    def samples(self, source: TokenSource, split: str, samples: range) -> Masked: ...


def read_texts(source: TokenSource, split: str, windows: Sequence[int], text_len: int) -> Tokens:
    """Return the texts [windows, text_len] of windows, which have a token more."""
    rows = np.empty((len(windows), text_len + 1), np.int64)
    for row, window in zip(rows, windows, strict=True):
        source.fill(split, window, row)
    return rows[:, :-1]
