"""Given texts as a source of samples, and the samples that each number of ranks reads."""

from typing import Any

import numpy as np
import torch

from hpczero.data.token_source import TokenSource
from hpczero.spec.schema import Spec
from hpczero.train.batches import Batches


class Texts(TokenSource):
    """Windows of given texts, each of which a sample with its number reads."""

    vocabulary = 1000

    def __init__(self, texts: np.ndarray) -> None:
        self._texts = texts

    def windows(self, split: str) -> int:
        return len(self._texts)

    def chosen(self, split: str, seed: int, samples: range) -> list[int]:
        return [sample % len(self._texts) for sample in samples]

    def fill(self, split: str, window: int, out: np.ndarray) -> None:
        out[:-1], out[-1] = self._texts[window], 0


def texts(count: int, length: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 1000, (count, length))


def samples_of_ranks(
    spec: Spec, source: TokenSource, ranks: int, read: Any
) -> list[tuple[bytes, ...]]:
    """Return the tensors of each sample in the batches that `read` returns of each rank's."""
    return [
        tuple(
            value[at].numpy().tobytes()
            for name, value in vars(batch).items()
            if isinstance(value, torch.Tensor) and name != "samples"
        )
        for rank in range(ranks)
        for batch in read(Batches(spec, source, rank, ranks))
        for at in range(len(batch.samples))
    ]
