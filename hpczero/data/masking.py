"""Samples of BERT: text between special tokens, some of it masked (Devlin et al. 2019; pure).

    [CLS] text [SEP]                  or, of two sentences,     [CLS] first [SEP] second [SEP]

Of the text's tokens a share is to be predicted, the same number in each sample: most are replaced
by [MASK], one in ten by a random token, one in ten by itself. With `whole_words` the tokens of a
word go together, as many words as fit into that number.

Two sentences are a window of text, cut somewhere in its middle half. In every second sample, on
average, the second one does not follow the first: it is cut from the sample before ("next"), or the
two are swapped ("order").

Each choice is a hash of (seed, split, sample), so that neither the layout nor a restart changes it,
and another epoch masks other tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hpczero.data.hashes import Hashes, below, mix_all
from hpczero.data.tokenizer import Tokenizer
from hpczero.hashing import MASK, mix
from hpczero.spec.model import Model

Tokens = np.ndarray[Any, np.dtype[np.int64]]

_SALT = {"train": 0x6D61736B, "validation": 0x76616C69}
_AS_MASK, _AS_ANY = 0.8, 0.9  # shares of the masked tokens: up to it [MASK], up to it any token
_ORDER, _KIND, _TOKEN, _PAIR = range(4)  # what a hash is drawn for
_SCALE = 2.0**64


MARKS = ["[CLS]", "[SEP]", "[MASK]"]


@dataclass(frozen=True)
class SpecialIds:
    """The ids of the three `MARKS`."""

    begin: int
    separator: int
    mask: int

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> "SpecialIds":
        """Return those of a tokenizer, or the ids after its vocabulary."""
        known = [one for name in MARKS if (one := tokenizer.token_to_id(name)) is not None]
        if len(known) == len(MARKS):
            return cls(*known)
        first = tokenizer.vocabulary
        return cls(first, first + 1, first + 2)

    def largest(self) -> int:
        return max(self.begin, self.separator, self.mask)


@dataclass(frozen=True)
class Masked:
    """Samples [samples, seq] with their targets [samples, targets]; as in `model.batch`."""

    tokens: Tokens
    targets: Tokens
    places: Tokens
    weights: np.ndarray[Any, np.dtype[np.float32]]
    segments: Tokens
    labels: Tokens | None


class Masking:
    """How the samples of a run are made of text."""

    def __init__(
        self,
        model: Model,
        seq_len: int,
        seed: int,
        ids: SpecialIds,
        vocabulary: int,
        continues: np.ndarray[Any, np.dtype[np.bool_]] | None = None,
    ) -> None:
        """`vocabulary`: random tokens are below. `continues`: id -> is no beginning of a word."""
        self._seq_len = seq_len
        self._text = model.text_len(seq_len)
        self._most = model.target_count(seq_len)
        self._share = model.masked
        self._sentences = model.sentences
        self._seed = seed
        self._ids = ids
        self._vocabulary = vocabulary
        self._continues = continues

    def second_samples(self, split: str, samples: range) -> list[int]:
        """Return, for each sample, the sample whose text its second sentence is cut from."""
        if self._sentences != "next":
            return list(samples)
        apart = self._is_apart(split, samples)
        # the first sample has none before it
        return [max(0, at - 1) if alone else at for at, alone in zip(samples, apart, strict=True)]

    def samples(self, split: str, samples: range, texts: Tokens, seconds: Tokens) -> Masked:
        """Return the samples of these texts [samples, text].

        `seconds`: the texts of `second_samples`.
        """
        tokens, segments = self._marked(split, samples, texts, seconds)
        labels = None
        if self._sentences == "next":
            others = np.array(self.second_samples(split, samples), np.int64)
            labels = (others != np.arange(samples.start, samples.stop)).astype(np.int64)
        elif self._sentences == "order":
            labels = self._is_apart(split, samples).astype(np.int64)
        places, used = self._places(split, samples, tokens)
        targets = np.take_along_axis(tokens, places, 1)
        self._replace(split, samples, tokens, places, used)
        return Masked(tokens, targets, places, used.astype(np.float32), segments, labels)

    def _marked(
        self, split: str, samples: range, texts: Tokens, seconds: Tokens
    ) -> tuple[Tokens, Tokens]:
        """Return the texts between special tokens, and the segment of each position."""
        shape = len(samples), self._seq_len
        tokens, segments = np.empty(shape, np.int64), np.zeros(shape, np.int64)
        tokens[:, 0] = self._ids.begin
        tokens[:, -1] = self._ids.separator
        if self._sentences == "none":
            tokens[:, 1:-1] = texts
            return tokens, segments
        margin = self._text // 4
        draws = self._draws(split, samples, _PAIR, 2)[:, 1]
        lengths = margin + below(draws, max(1, self._text - 2 * margin + 1))
        swapped = self._is_apart(split, samples) & (self._sentences == "order")
        for row, segment, length, text, other, swap in zip(
            tokens, segments, lengths.tolist(), texts, seconds, swapped, strict=True
        ):
            pair = text[:length], other[length:]
            first, second = reversed(pair) if swap else pair
            row[1:-1] = np.concatenate([first, [self._ids.separator], second])
            segment[len(first) + 2 :] = 1
        return tokens, segments

    def _places(
        self, split: str, samples: range, tokens: Tokens
    ) -> tuple[Tokens, np.ndarray[Any, np.dtype[np.bool_]]]:
        """Return the places to predict, in order, and which are used; one that is not is 0."""
        ids = self._ids
        maskable = (tokens != ids.begin) & (tokens != ids.separator) & (tokens != ids.mask)
        maskable[:, [0, -1]] = False
        wanted = np.rint(self._share * maskable.sum(1)).astype(np.int64)
        wanted = np.minimum(np.clip(wanted, 1, self._most), maskable.sum(1))
        draws = self._draws(split, samples, _ORDER, self._seq_len)
        # one bit less, so that those that may not be masked come last
        draws = np.where(maskable, draws >> np.uint64(1), np.uint64(MASK))
        if self._continues is None:
            order = np.argsort(draws, 1, kind="stable")[:, : self._most]
            used = np.arange(self._most) < wanted[:, None]
        else:
            order = np.zeros((len(samples), self._most), np.int64)
            used = np.zeros(order.shape, np.bool_)
            for sample, most in enumerate(wanted.tolist()):
                found = self._words(tokens[sample], maskable[sample], draws[sample], most)
                order[sample, : len(found)] = found
                used[sample, : len(found)] = True
        places = np.sort(np.where(used, order, self._seq_len), 1)
        used = places < self._seq_len
        return np.where(used, places, 0), used

    def _words(
        self, tokens: Tokens, maskable: np.ndarray[Any, Any], draws: Hashes, most: int
    ) -> list[int]:
        """Return the positions of whole words, no more than `most`."""
        assert self._continues is not None
        is_part = self._continues[np.minimum(tokens, len(self._continues) - 1)]
        begins = np.flatnonzero(maskable & ~(is_part & np.roll(maskable, 1)))
        ends = np.append(begins[1:], len(tokens))
        found: list[int] = []
        for word in np.argsort(draws[begins], kind="stable").tolist():
            at = np.arange(begins[word], ends[word])
            inside = at[maskable[at]].tolist()
            if len(found) + len(inside) <= most:
                found += inside
            if len(found) == most:
                break
        return found

    def _replace(
        self, split: str, samples: range, tokens: Tokens, places: Tokens,
        used: np.ndarray[Any, Any],
    ) -> None:  # fmt: skip
        before = np.take_along_axis(tokens, places, 1)
        kinds = self._draws(split, samples, _KIND, self._most).astype(np.float64) / _SCALE
        others = below(self._draws(split, samples, _TOKEN, self._most), self._vocabulary)
        after = np.where(kinds < _AS_ANY, others, before)
        after = np.where(kinds < _AS_MASK, self._ids.mask, after)
        np.put_along_axis(tokens, places, np.where(used, after, before), 1)

    def _is_apart(self, split: str, samples: range) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """Return for which samples the second sentence does not follow the first."""
        return self._draws(split, samples, _PAIR, 1)[:, 0] >> np.uint64(63) > 0

    def _draws(self, split: str, samples: Sequence[int], use: int, count: int) -> Hashes:
        """Return hashes [samples, count] for one use."""
        key = mix(mix(self._seed & MASK) ^ _SALT[split] ^ use << 32)
        numbers = mix_all(np.array(samples, np.uint64) ^ np.uint64(key))
        return mix_all(numbers[:, None] ^ np.arange(count, dtype=np.uint64))
