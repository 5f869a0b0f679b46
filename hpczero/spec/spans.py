"""Lengths of T5's samples: text of which spans are taken out (Raffel et al. 2020; pure).

A sample has the encoder's and the decoder's tokens, side by side: `data/span_corruption.py` has an
example.
"""

from bisect import bisect_right
from functools import lru_cache
from typing import NamedTuple

FEWEST_SENTINELS = 100  # as many as T5 has, after a vocabulary that lacks them


class SpanLengths(NamedTuple):
    text: int  # tokens
    masked: int  # of them
    spans: int  # that the masked ones form

    @property
    def encoder(self) -> int:
        """Tokens of the encoder: text, a sentinel for each span, the end."""
        return self.text - self.masked + self.spans + 1

    @property
    def decoder(self) -> int:
        """Tokens of the decoder: a sentinel before each span, the end."""
        return self.masked + self.spans + 1

    @property
    def sample(self) -> int:
        return self.encoder + self.decoder


def lengths_of(text: int, fraction: float, span: float) -> SpanLengths:
    """Return the lengths of a sample of so much text, as T5's own data has them."""
    masked = min(max(1, round(text * fraction)), text - 1)
    return SpanLengths(text, masked, min(max(1, round(masked / span)), masked, text - masked))


@lru_cache(maxsize=4096)
def lengths_within(sample: int, fraction: float, span: float) -> SpanLengths:
    """Return the lengths of the longest sample that is not longer than `sample` tokens.

    They are those of the shortest text where `sample` is too short for any.
    """
    texts = range(2, max(3, sample))  # a longer text never makes a shorter sample

    def length_with(text: int) -> int:
        return lengths_of(text, fraction, span).sample

    fitting = bisect_right(texts, sample, key=length_with)
    return lengths_of(texts[max(0, fitting - 1)], fraction, span)
