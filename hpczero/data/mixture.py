"""Several sources as one: its samples are shared out among them by their weights.

The source that is furthest behind its share is next (`source_order`); which of its windows that
is, is a hash, as with a single source. One that has been read `epochs` times takes no part any
more.
"""

import json
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import accumulate
from math import inf
from typing import Any

import numpy as np
import xxhash

from hpczero.data.documents import Cut
from hpczero.data.plain_tokens import UNKNOWN
from hpczero.data.samples import window
from hpczero.data.source_order import SourceOrder, shares_of
from hpczero.data.token_source import Part, TokenSource
from hpczero.data.tokenizer import Tokenizer
from hpczero.errors import InputError
from hpczero.spec.schema import Spec
from hpczero.text import printable

_SPLITS = ("train", "validation")
_NOT_KNOWN = {UNKNOWN, "none"}  # tokenizers


@dataclass(frozen=True)
class Ingredient:
    """A source of a mixture; `epochs`: how often it may be read (0: without end)."""

    name: str
    source: TokenSource
    weight: float
    epochs: float = 0.0

    @property
    def fingerprint(self) -> str:
        return str(self.source.describe()["fingerprint"])

    @property
    def most(self) -> int:
        """The most samples that are read of it; 0: without end."""
        return int(self.epochs * self.source.windows("train"))


@dataclass(frozen=True)
class MixtureRecord:
    """A mixture in a checkpoint, and where its order began.

    Sources are known by the fingerprints of their tokens. `first` is a sample, `counts` are those
    of each source before it, `most` those that are read of it at all, `windows` those of an epoch
    (of a source that is gone, when it was read); they have the longest sequences.
    """

    names: Mapping[str, str]
    weights: Mapping[str, float]
    most: Mapping[str, int]
    windows: Mapping[str, int]
    first: int = 0
    counts: Mapping[str, int] = field(default_factory=dict)

    def order(self, pieces: int = 1) -> SourceOrder:
        """Return the order of the sources; `pieces`: sequences that are made of one sample."""
        return SourceOrder(
            shares_of(list(self.weights.values())),
            [self.most[key] * pieces or inf for key in self.weights],
            self.first * pieces,
            [self.counts.get(key, 0) * pieces for key in self.weights],
        )

    def counts_at(self, sample: int) -> dict[str, int]:
        """Return the samples of each source before a sample, also of those that are gone.

        ValueError if the record begins behind the sample, or ends before it.
        """
        if not self.first <= sample <= self.order().end:
            raise ValueError(f"a mixture from sample {self.first} on, and {sample} have been read")
        counts = dict(zip(self.weights, self.order().counts_at(sample), strict=True))
        return {**self.counts, **counts}

    def as_text(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> "MixtureRecord":
        """Return what a checkpoint holds; ValueError if it is nothing of the kind."""
        values = json.loads(text)
        tables = ("names", "weights", "most", "windows", "counts")
        if not isinstance(values, dict) or {*values} != {*tables, "first"}:
            raise ValueError(f"no record of a mixture: {printable(text, 100)}")
        kinds = dict(zip(tables, ((str,), (int, float), (int,), (int,), (int,)), strict=True))
        for name, kind in kinds.items():
            table = values[name]
            if not isinstance(table, dict) or not all(
                isinstance(value, kind) and not isinstance(value, bool) for value in table.values()
            ):
                raise ValueError(f"the {name} of a mixture: {printable(str(table), 100)}")
        record = cls(**values)
        numbers = [
            *(*record.most.values(), *record.windows.values(), *record.counts.values()),
            record.first,
        ]
        if (
            not isinstance(record.first, int)
            or not record.weights
            or not (record.weights.keys() == record.names.keys() == record.most.keys())
            or not record.weights.keys() <= record.windows.keys()
            or min(record.weights.values()) <= 0
            or not all(0 <= number < 2**62 for number in numbers)
        ):
            raise ValueError(f"no record of a mixture: {printable(text, 100)}")
        return record


def mixture_of(spec: Spec, sources: Sequence[TokenSource]) -> "Mixture":
    """Return the mixture of `data.sources`; InputError if it cannot be one."""
    ingredients = [
        Ingredient(said.path, source, said.weight, said.epochs)
        for said, source in zip(spec.data.sources, sources, strict=True)
    ]
    _refuse_unmixable(ingredients)
    return Mixture(ingredients, spec.text_len, recorded(ingredients))


def _refuse_unmixable(ingredients: Sequence[Ingredient]) -> None:
    """Raise InputError if the sources have other tokenizers, or one stands there twice."""
    facts = {one.name: one.source.describe() for one in ingredients}
    named = {name: one["tokenizer"] for name, one in facts.items()}
    known = {name: one for name, one in named.items() if one not in _NOT_KNOWN}
    if len(set(known.values())) > 1:
        listed = "; ".join(f"{name}: {one}" for name, one in known.items())
        raise InputError(
            f"the sources of the mixture are tokens of several tokenizers, so that one number "
            f"means several things: {listed}"
        )
    seen: dict[str, str] = {}
    for name, one in facts.items():
        if other := seen.get(one["fingerprint"]):
            raise InputError(f"the sources {other} and {name} are the same tokens: leave one out")
        seen[one["fingerprint"]] = name
    for part in ingredients:
        if part.epochs and not part.most:
            raise InputError(
                f"{part.name}: {part.epochs:g} epochs of its {part.source.windows('train'):,} "
                "sequences are none: more epochs, or leave it out"
            )


def recorded(ingredients: Sequence[Ingredient]) -> MixtureRecord:
    """Return what a checkpoint holds of a mixture that begins now."""
    return MixtureRecord(
        {one.fingerprint: one.name for one in ingredients},
        {one.fingerprint: one.weight for one in ingredients},
        {one.fingerprint: one.most for one in ingredients},
        {one.fingerprint: one.source.windows("train") for one in ingredients},
    )


class Mixture(TokenSource):
    """A `TokenSource` of several; its windows are those of the first, then of the second, ..."""

    def __init__(
        self,
        ingredients: Sequence[Ingredient],
        seq_len: int,
        record: MixtureRecord,
        pieces: int = 1,
    ) -> None:
        """`pieces`: sequences of this length that are made of one of the longest."""
        self.ingredients = ingredients
        self.vocabulary = max(one.source.vocabulary for one in ingredients)
        self.record = record
        self._seq_len = seq_len
        self._pieces = pieces
        self._order = record.order(pieces)
        self._starts = {
            split: [0, *accumulate(one.source.windows(split) for one in ingredients)]
            for split in _SPLITS
        }

    def with_record(self, record: MixtureRecord) -> "Mixture":
        """Return the mixture as a checkpoint has it, or one that was changed there."""
        return Mixture(self.ingredients, self._seq_len, record, self._pieces)

    @property
    def end(self) -> float:
        """The first sample that there is none of."""
        return self._order.end

    def of_length(self, seq_len: int) -> "Mixture":
        pieces = self._pieces * self._seq_len // seq_len
        shorter = [replace(one, source=one.source.of_length(seq_len)) for one in self.ingredients]
        return Mixture(shorter, seq_len, self.record, pieces)

    def windows(self, split: str) -> int:
        return self._starts[split][-1]

    def windows_beside(self, split: str, window: int) -> range:
        starts = self._starts[split]
        source = self._source_of(split, window)
        return range(starts[source], starts[source + 1])

    def _source_of(self, split: str, window: int) -> int:
        return bisect_right(self._starts[split], window) - 1

    def chosen(self, split: str, seed: int, samples: range) -> list[int]:
        assert split == "train", "the sources of a mixture are evaluated one by one"
        if samples.stop > self.end:
            raise InputError(
                f"the sources of the mixture have been read as often as their epochs allow after "
                f"{self.end} samples: more epochs, or fewer steps"
            )
        starts = self._starts[split]
        return [
            starts[source] + window(seed, starts[source + 1] - starts[source], number)
            for source, number in self._order.of_samples(samples.start, len(samples))
        ]

    def samples_of_sources(self, samples: int) -> dict[str, int]:
        counts = self.record.counts_at(samples)
        return {name: counts[key] for key, name in self.record.names.items()}

    def targets(self, split: str) -> int:
        return sum(one.source.targets(split) for one in self.ingredients)

    def fill(self, split: str, window: int, out: np.ndarray) -> Cut | None:
        source = self._source_of(split, window)
        inside = window - self._starts[split][source]
        return self.ingredients[source].source.fill(split, inside, out)

    def unigram_entropy(self, split: str) -> float:
        """Nats per token of a model that knows the frequencies of ids in each source."""
        return sum(part.weight * part.source.unigram_entropy(split) for part in self.parts())

    def describe(self) -> dict[str, Any]:
        facts = [one.source.describe() for one in self.ingredients]
        named = {one["tokenizer"] for one in facts} - _NOT_KNOWN
        return {
            "path": ", ".join(one.name for one in self.ingredients),
            "tokenizer": named.pop() if len(named) == 1 else UNKNOWN,
            "vocabulary": max(one["vocabulary"] for one in facts),
            "tokens": {name: sum(one["tokens"][name] for one in facts) for name in _SPLITS},
            "documents": {name: sum(one["documents"][name] for one in facts) for name in _SPLITS},
            "fingerprint": xxhash.xxh3_128_hexdigest(self.record.as_text().encode()),
            "sources": facts,
        }

    def tokenizer(self) -> Tokenizer | None:
        known = (one.source.tokenizer() for one in self.ingredients)
        return next((one for one in known if one), None)

    def parts(self) -> list[Part]:
        total = sum(one.weight for one in self.ingredients)
        return [Part(one.name, one.weight / total, one.source) for one in self.ingredients]
