"""Windows of tokens, as a run reads them from whatever they are stored in (pure)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from hpczero.data.documents import Cut
from hpczero.data.samples import window
from hpczero.data.tokenizer import Tokenizer

NO_TOKENIZER = "none"  # of random tokens


@dataclass(frozen=True)
class Part:
    """A source of a mixture, its name, and its share of the samples (all of them add up to 1)."""

    name: str
    weight: float
    source: "TokenSource"


class TokenSource(Protocol):
    """Windows of seq_len + 1 tokens.

    Window w starts at token w * seq_len, so every token but the first is predicted once; with
    "padded" documents it is a piece of one of them.
    """

    vocabulary: int  # ids are 0 .. vocabulary - 1

    def of_length(self, seq_len: int) -> "TokenSource":
        """Return the same text in windows of this length."""

    def windows(self, split: str) -> int:
        """Return the number of windows."""

    def windows_beside(self, split: str, window: int) -> range:
        """Return the windows of the same source, of those that a mixture has."""
        return range(self.windows(split))

    def chosen(self, split: str, seed: int, samples: range) -> list[int]:
        """Return the windows that a run reads as these of its samples: by hash, in every epoch."""
        windows = self.windows(split)
        return [window(seed, windows, sample) for sample in samples]

    def samples_of_sources(self, samples: int) -> dict[str, int]:
        """Return how many of a run's first samples are of each source of a mixture, by its name."""
        return {}

    def targets(self, split: str) -> int:
        """Return the number of targets in all windows."""

    def fill(self, split: str, window: int, out: np.ndarray) -> Cut | None:
        """Write the window's tokens into `out` (int64 [seq_len + 1]), from any thread.

        Return its documents; None if it counts as one.
        """

    def unigram_entropy(self, split: str) -> float:
        """Nats per token of the split's distribution of ids.

        A model with a lower loss has learned something about the order of tokens.
        """

    def describe(self) -> dict[str, Any]:
        """Facts for the run's record."""

    def tokenizer(self) -> Tokenizer | None:
        """Return the tokenizer of the text; None if it is not known, or there is no text."""
        return None

    def parts(self) -> Sequence[Part]:
        """Return the sources of a mixture; a single one is its only part, without a name."""
        return [Part("", 1.0, self)]
