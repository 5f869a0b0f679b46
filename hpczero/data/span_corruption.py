"""Samples of T5: text of which spans are taken out (Raffel et al. 2020, section 3.1.4; pure).

    text             one two three four five six seven
    encoder          one two <0> five six <1> </s>
    decoder reads    <pad> <0> three four <1> seven
    and predicts     <0> three four <1> seven </s>

A text is cut into as many masked spans as unmasked ones, in turn, of which an unmasked one is the
first. All divisions of the masked tokens into so many spans are equally likely, and so are those of
the unmasked ones (`random_spans_noise_mask` of T5). Each cut is a hash of (seed, split, sample), so
that neither the layout nor a restart changes it, and another epoch masks other spans.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from hpczero.data.hashes import draws
from hpczero.data.masked_samples import Masked, Tokens, read_texts
from hpczero.data.token_source import TokenSource
from hpczero.spec.spans import SpanLengths

_UNMASKED, _MASKED = range(2)  # what a hash is drawn for


class SpanIds(NamedTuple):
    """The ids of special tokens; sentinel k has the id `sentinel` - k."""

    begin: int
    end: int
    sentinel: int


@dataclass(frozen=True)
class SpanCorruption:
    """How the samples of a run are made of text."""

    lengths: SpanLengths
    seed: int
    ids: SpanIds

    def samples(self, source: TokenSource, split: str, samples: range) -> Masked:
        text, masked, _ = self.lengths
        windows = source.chosen(split, self.seed, samples)
        texts = read_texts(source, split, windows, text)
        unmasked_spans = self._divided(split, samples, _UNMASKED, text - masked)
        masked_spans = self._divided(split, samples, _MASKED, masked)
        lengths = np.stack([unmasked_spans, masked_spans], 2)  # [samples, spans, 2]
        is_masked = np.repeat(np.arange(lengths.size) % 2 == 1, lengths.flatten())
        is_masked = is_masked.reshape(texts.shape)
        left = texts[~is_masked].reshape(len(samples), text - masked)
        taken = texts[is_masked].reshape(len(samples), masked)
        # a sentinel comes after each unmasked span, and before each masked one
        encoder = self._marked(left, unmasked_spans.cumsum(1))
        targets = self._marked(taken, masked_spans.cumsum(1) - masked_spans)
        begin = np.full((len(samples), 1), self.ids.begin, np.int64)
        return Masked(np.concatenate([encoder, begin, targets[:, :-1]], 1), targets)

    def _divided(self, split: str, samples: range, use: int, tokens: int) -> Tokens:
        """Return the lengths [samples, spans] of spans that have so many tokens together."""
        hashes = draws(self.seed, split, samples, use, tokens - 1)  # one for each place of a cut
        first = np.argsort(hashes, 1, kind="stable")[:, : self.lengths.spans - 1]
        return np.diff(np.sort(first, 1) + 1, axis=1, prepend=0, append=tokens)

    def _marked(self, tokens: Tokens, places: Tokens) -> Tokens:
        """Return tokens with a sentinel before each of these places, and the end after them."""
        count = self.lengths.spans
        marked = np.full((len(tokens), tokens.shape[1] + count + 1), self.ids.end, np.int64)
        is_text = np.ones(marked.shape, np.bool_)
        is_text[:, -1] = False
        at = places + np.arange(count)
        np.put_along_axis(is_text, at, False, 1)
        np.put_along_axis(marked, at, self.ids.sentinel - np.arange(count)[None, :], 1)
        marked[is_text] = tokens.flatten()
        return marked
