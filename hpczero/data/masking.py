"""Samples of BERT: text between special tokens, some of it masked (Devlin et al. 2019; pure).

    [CLS] text [SEP]                  or, of two sentences,     [CLS] first [SEP] second [SEP]

A share of a sample's text is to be predicted: most of these tokens are replaced by [MASK], one in
ten by a random token, one in ten by itself. With whole words they are as many words as fit into
that number of tokens.

Two sentences are a window of text, cut somewhere in its middle half. In every second sample, on
average, the second one does not follow the first: it is cut from any other window of the same
source ("next"), or the two are swapped ("order").

Each choice is a hash of (seed, split, sample), so that neither the layout nor a restart changes it,
and another epoch masks other tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from hpczero.data.hashes import Hashes, below, draws
from hpczero.data.masked_samples import Flags, Masked, Tokens, read_texts
from hpczero.data.token_source import TokenSource
from hpczero.hashing import MASK
from hpczero.spec.model import Model

_AS_MASK, _AS_ANY = 0.8, 0.9  # shares of the masked tokens: up to it [MASK], up to it any token
_CHOICE, _KIND, _TOKEN, _APART, _CUT, _OTHER = range(6)  # what a hash is drawn for
_SCALE = 2.0**64


class SpecialIds(NamedTuple):
    """The ids of [CLS], [SEP] and [MASK]."""

    begin: int
    separator: int
    mask: int


@dataclass(frozen=True)
class Masking:
    """How the samples of a run are made of text.

    `vocabulary`: random tokens are below. `continues`: id -> goes on with the word before it; None:
    single tokens are masked.
    """

    model: Model
    seq_len: int
    seed: int
    ids: SpecialIds
    vocabulary: int
    continues: Flags | None = None

    @property
    def most(self) -> int:
        """The most targets of a sample."""
        return self.model.target_count(self.seq_len)

    def samples(self, source: TokenSource, split: str, samples: range) -> Masked:
        windows = source.chosen(split, self.seed, samples)
        labels = self._labels(source, split, samples, windows)
        tokens, segments = self._texts(source, split, samples, windows, labels)
        positions, used = self._chosen(split, samples, tokens)
        targets = np.take_along_axis(tokens, positions, 1)
        self._replace(split, samples, tokens, positions, used)
        return Masked(tokens, targets, positions, used.astype(np.float32), segments, labels)

    def _labels(
        self, source: TokenSource, split: str, samples: range, windows: Sequence[int]
    ) -> Tokens | None:
        """Return 1 where the second sentence does not follow the first; None: there is one."""
        if self.model.sentences == "none":
            return None
        apart = self._draws(split, samples, _APART, 1)[:, 0] >> np.uint64(63) > 0
        if self.model.sentences == "next":
            has_other = [len(source.windows_beside(split, window)) > 1 for window in windows]
            apart &= np.array(has_other, np.bool_)
        return apart.astype(np.int64)

    def _texts(
        self,
        source: TokenSource,
        split: str,
        samples: range,
        windows: Sequence[int],
        labels: Tokens | None,
    ) -> tuple[Tokens, Tokens]:
        """Return texts between special tokens, and the segment of each position."""
        shape = len(samples), self.seq_len
        tokens, segments = np.empty(shape, np.int64), np.zeros(shape, np.int64)
        tokens[:, 0] = self.ids.begin
        tokens[:, -1] = self.ids.separator
        text = self.model.text_len(self.seq_len)
        texts = read_texts(source, split, windows, text)
        if labels is None:
            tokens[:, 1:-1] = texts
            return tokens, segments
        apart = np.flatnonzero(labels)
        seconds = texts.copy()
        if self.model.sentences == "next":
            hashes = self._draws(split, samples, _OTHER, 1)[:, 0]
            others = [
                _another(source.windows_beside(split, windows[at]), windows[at], hashes[at])
                for at in apart.tolist()
            ]
            seconds[apart] = read_texts(source, split, others, text)
        margin = text // 4
        cuts = margin + below(self._draws(split, samples, _CUT, 1)[:, 0], text - 2 * margin + 1)
        swaps = labels * (self.model.sentences == "order")
        for row, segment, cut, first, second, swap in zip(
            tokens, segments, cuts.tolist(), texts, seconds, swaps, strict=True
        ):
            pair = [first[:cut], second[cut:]]
            if swap:
                pair.reverse()
            row[1:-1] = np.concatenate([pair[0], [self.ids.separator], pair[1]])
            segment[len(pair[0]) + 2 :] = 1
        return tokens, segments

    def _chosen(self, split: str, samples: range, tokens: Tokens) -> tuple[Tokens, Flags]:
        """Return the positions of targets, ascending, and which are used; one that is not is 0."""
        maskable = ~np.isin(tokens, self.ids)
        maskable[:, [0, -1]] = False
        wanted = np.rint(self.model.masked_fraction * maskable.sum(1)).astype(np.int64)
        wanted = np.minimum(np.clip(wanted, 1, self.most), maskable.sum(1))
        hashes = self._draws(split, samples, _CHOICE, self.seq_len)
        # one bit less, so that those that may not be masked come last
        hashes = np.where(maskable, hashes >> np.uint64(1), np.uint64(MASK))
        if self.continues is None:
            chosen = np.argsort(hashes, 1, kind="stable")[:, : self.most]
            used = np.arange(self.most) < wanted[:, None]
        else:
            chosen = np.zeros((len(samples), self.most), np.int64)
            used = np.zeros(chosen.shape, np.bool_)
            for sample, most in enumerate(wanted.tolist()):
                found = self._words(tokens[sample], maskable[sample], hashes[sample], most)
                chosen[sample, : len(found)] = found
                used[sample, : len(found)] = True
        positions = np.sort(np.where(used, chosen, self.seq_len), 1)
        used = positions < self.seq_len
        return np.where(used, positions, 0), used

    def _words(self, tokens: Tokens, maskable: Flags, hashes: Hashes, most: int) -> list[int]:
        """Return the positions of whole words, no more than `most`; or of the beginning of one."""
        assert self.continues is not None
        known = tokens < len(self.continues)
        goes_on = self.continues[np.where(known, tokens, 0)] & known & np.roll(maskable, 1)
        begins = np.flatnonzero(maskable & ~goes_on)
        ends = np.append(begins[1:], len(tokens))
        found: list[int] = []
        for word in np.argsort(hashes[begins], kind="stable").tolist():
            at = np.arange(begins[word], ends[word])
            inside = at[maskable[at]].tolist()
            if len(found) + len(inside) <= most:
                found += inside
            if len(found) == most:
                break
        if not found and len(begins):  # each word is longer
            first = int(begins[np.argmin(hashes[begins])])
            found = list(range(first, first + most))
        return found

    def _replace(
        self, split: str, samples: range, tokens: Tokens, positions: Tokens, used: Flags
    ) -> None:
        before = np.take_along_axis(tokens, positions, 1)
        kinds = self._draws(split, samples, _KIND, self.most).astype(np.float64) / _SCALE
        others = below(self._draws(split, samples, _TOKEN, self.most), self.vocabulary)
        after = np.where(kinds < _AS_ANY, others, before)
        after = np.where(kinds < _AS_MASK, self.ids.mask, after)
        np.put_along_axis(tokens, positions, np.where(used, after, before), 1)

    def _draws(self, split: str, samples: range, use: int, count: int) -> Hashes:
        return draws(self.seed, split, samples, use, count)


def _another(windows: range, but: int, drawn: np.uint64) -> int:
    """Return one of at least two windows, and not this one."""
    further = (int(drawn) >> 32) * (len(windows) - 1) >> 32  # as `below` of many
    return windows[(but - windows.start + 1 + further) % len(windows)]
