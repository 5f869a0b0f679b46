"""The windows of tokens that others made (`plain_tokens`)."""

from pathlib import Path
from typing import Any

import numpy as np

from hpczero.data.documents import Cut, cut_after
from hpczero.data.plain_tokens import PlainTokens, open_plain_tokens
from hpczero.data.token_source import TokenSource
from hpczero.errors import InputError
from hpczero.spec.schema import Spec


class PlainSource(TokenSource):
    """A `token_source.TokenSource` of packed or masked documents."""

    def __init__(
        self, tokens: PlainTokens, seq_len: int, vocabulary: int, documents: str = "packed"
    ) -> None:
        self._tokens = tokens
        self._seq_len = seq_len
        self._documents = documents
        self.vocabulary = vocabulary  # of the model

    def of_length(self, seq_len: int) -> "PlainSource":
        return PlainSource(self._tokens, seq_len, self.vocabulary, self._documents)

    def windows(self, split: str) -> int:
        return max(0, len(self._tokens.splits[split]) - 1) // self._seq_len

    def targets(self, split: str) -> int:
        targets = self.windows(split) * self._seq_len
        if self._documents == "packed":
            return targets
        return targets - self._tokens.splits[split].documents(targets)

    def fill(self, split: str, window: int, out: np.ndarray) -> Cut | None:
        assert 0 <= window < self.windows(split), (split, window)
        start = window * self._seq_len
        out[:] = self._tokens.splits[split].read(start, start + self._seq_len + 1)
        if out.view(np.uint64).max() >= self.vocabulary:  # one below 0, too
            wrong = next(token for token in out if not 0 <= token < self.vocabulary)
            raise InputError(
                f"{self._tokens.path}: window {window} of {split} holds token {wrong}, and "
                f"model.vocab is {self.vocabulary}"
            )
        end = self._tokens.end_of_document
        return cut_after(out, end) if self._documents == "masked" and end is not None else None

    def unigram_entropy(self, split: str) -> float:
        return self._tokens.entropy()

    def describe(self) -> dict[str, Any]:
        return self._tokens.describe()


def open_plain_source(path: Path, spec: Spec) -> PlainSource:
    """Open files that others made; InputError if the model cannot be trained on them."""
    tokens = open_plain_tokens(path, spec.data.validation_fraction)
    refuse_unfit_tokens(tokens, spec)
    return plain_source(tokens, spec)


def plain_source(tokens: PlainTokens, spec: Spec) -> PlainSource:
    return PlainSource(tokens, spec.text_len, spec.model.vocab, spec.data.documents)


def refuse_unfit_tokens(tokens: PlainTokens, spec: Spec) -> None:
    refuse_unreadable_tokens(tokens, spec)
    path = tokens.path
    length = "data.seq_len" if spec.data.seq_len else "model.seq_len"
    needs = f"a sequence needs {spec.text_len + 1} for {length} = {spec.seq_len}"
    train, validation = (len(tokens.splits[split]) for split in ("train", "validation"))
    if train <= spec.text_len:
        raise InputError(
            f"{path} has {train:,} tokens to train on, {needs}: use more text, "
            f"or a shorter {length}"
        )
    if spec.train.eval_batches and validation <= spec.text_len:
        raise InputError(
            f"{path} has {validation:,} tokens for validation, {needs}: set a larger "
            "data.validation_fraction, or train.eval_batches = 0 "
            f"(it is {spec.train.eval_batches})"
        )


def refuse_unreadable_tokens(tokens: PlainTokens, spec: Spec) -> None:
    """Raise InputError if the model cannot read them, however many there are."""
    path = tokens.path
    documents = spec.data.documents
    if tokens.largest >= spec.model.vocab:
        raise InputError(
            f"model.vocab = {spec.model.vocab} is too small: {path} holds token {tokens.largest}: "
            "set model.vocab to the number of ids of the tokenizer that made it"
        )
    if documents == "padded":
        raise InputError(
            f'data.documents = "padded" reads token files of hpczero alone, and {path} is of '
            f'{tokens.form}: set it to "packed"'
            + (', or "masked"' if tokens.end_of_document is not None else "")
        )
    if documents == "masked" and tokens.end_of_document is None:
        raise InputError(
            f'data.documents = "masked" needs documents that end with one token, and those of '
            f'{path} ({tokens.form}) do not, or are not known: set it to "packed"'
        )
