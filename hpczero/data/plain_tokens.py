"""Tokens in files that others made, read where they lie.

    NAME.bin, NAME.idx   of Megatron-LM: tokens, and the lengths of sequences
    FOLDER               of datatrove, which Nanotron reads: *.ds, with *.ds.index and *.ds.metadata
    NAME.npy             of numpy: an array of one dimension

Such files say neither how large their vocabulary is nor which token ends a document, and have no
checksums. The last documents are for validation. Nothing is mapped into memory.
"""

import os
import threading
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import xxhash

from hpczero.data.plain_formats import Found, Run, find_tokens
from hpczero.errors import InputError
from hpczero.text import printable

UNKNOWN = "unknown"  # tokenizer
_MOST_OPEN = 256  # files
_SAMPLES = 64  # pieces of the text that are looked at when it is opened
_SAMPLE = 4096  # tokens in each


class RunReader:
    """Tokens of runs as if they were one, for any number of threads."""

    def __init__(self, runs: Sequence[Run], dtype: np.dtype) -> None:
        self._runs = runs
        self._dtype = dtype
        self._starts = [0, *accumulate(run.count for run in runs)]
        self._files: dict[Path, BinaryIO] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return self._starts[-1]

    def read(self, start: int, stop: int) -> np.ndarray:
        """Return tokens start .. stop - 1."""
        at = bisect_right(self._starts, start) - 1
        if start < stop <= self._starts[at + 1]:  # as nearly always
            return self._of_run(self._runs[at], start - self._starts[at], stop - self._starts[at])
        parts = [np.empty(0, self._dtype)]
        while start < stop:
            first, behind = self._starts[at], self._starts[at + 1]
            end = min(stop, behind)
            if end > start:
                parts.append(self._of_run(self._runs[at], start - first, end - first))
                start = end
            at += 1
        return np.concatenate(parts)

    def _of_run(self, run: Run, start: int, stop: int) -> np.ndarray:
        width = self._dtype.itemsize
        size = (stop - start) * width
        with self._lock:
            file = self._files.pop(run.path, None) or run.path.open("rb", buffering=0)
            self._files[run.path] = file  # the newest one is the last
            read = os.pread(file.fileno(), size, run.offset + start * width)
            if len(self._files) > _MOST_OPEN:
                self._files.pop(next(iter(self._files))).close()
        if len(read) < size:
            raise InputError(
                f"{run.path} was cut short while it was in use: it ends before byte "
                f"{run.offset + stop * width}; copy it again"
            )
        return np.frombuffer(read, self._dtype)


class SplitReader:
    """A part of the tokens."""

    def __init__(self, tokens: RunReader, ends: Sequence[int], start: int, stop: int) -> None:
        self._tokens = tokens
        self._ends = ends
        self._start = start
        self._size = stop - start

    def __len__(self) -> int:
        return self._size

    def read(self, start: int, stop: int) -> np.ndarray:
        assert 0 <= start <= stop <= self._size, (start, stop, self._size)
        return self._tokens.read(self._start + start, self._start + stop)

    def documents(self, tokens: int) -> int:
        """Return the number of documents that end in the first so many tokens; 0: unknown."""
        before = bisect_right(self._ends, self._start)
        return bisect_right(self._ends, self._start + tokens) - before


@dataclass(frozen=True)
class PlainTokens:
    """Files of tokens that others made.

    `end_of_document` is None where documents are not known to end with a token of their own.
    `largest` and `counts` are those of a sample of the text.
    """

    path: Path
    form: str
    splits: dict[str, SplitReader]
    end_of_document: int | None
    largest: int
    counts: np.ndarray
    fingerprint: str

    tokenizer = UNKNOWN

    def entropy(self) -> float:
        """Nats per token of the sample's distribution of ids."""
        shares = self.counts[self.counts > 0] / max(1, self.counts.sum())
        return float(-(shares * np.log(shares)).sum()) + 0.0

    def describe(self) -> dict[str, Any]:
        return {
            "path": str(self.path),
            "tokenizer": self.tokenizer,
            "vocabulary": self.largest + 1,
            "tokens": {name: len(split) for name, split in self.splits.items()},
            "documents": {name: split.documents(len(split)) for name, split in self.splits.items()},
            "fingerprint": self.fingerprint,
        }


def open_plain_tokens(path: Path, validation_fraction: float) -> PlainTokens:
    """Open files that others made; InputError if they are missing, damaged or of another kind."""
    try:
        found = find_tokens(path)
        return _opened(path, found, validation_fraction)
    except IndexError as error:
        raise InputError(f"{path}: its index is damaged; copy it again") from error
    except OSError as error:
        named = printable(str(error.filename or path))
        raise InputError(f"{named} cannot be read: {error.strerror}") from error


def _opened(path: Path, found: Found, validation_fraction: float) -> PlainTokens:
    tokens = RunReader(found.runs, found.dtype)
    if not len(tokens):
        raise InputError(f"{path} has no tokens, as files of {found.form}: copy or make it again")
    samples = list(_samples(tokens))
    digest = xxhash.xxh3_128(f"{found.form} {found.dtype.str}".encode())
    for run in found.runs:
        digest.update(b"%d " % run.count)
    for sample in samples:
        digest.update(sample.tobytes())
    sample = np.concatenate(samples)
    if int(sample.min()) < 0:
        raise InputError(f"{path} holds the number {int(sample.min())}, which is no token")
    largest = int(sample.max())
    if largest >= 2**32:
        raise InputError(f"{path} holds the number {largest:,}: a token is less than 2**32")
    total = len(tokens)
    boundary = total - round(total * validation_fraction)
    if found.ends and 0 < boundary < total:
        boundary = found.ends[bisect_right(found.ends, boundary)]
        if not 0 <= boundary <= total:
            raise IndexError(boundary)
    _, counts = np.unique(sample, return_counts=True)
    return PlainTokens(
        path,
        found.form,
        {
            "train": SplitReader(tokens, found.ends, 0, boundary),
            "validation": SplitReader(tokens, found.ends, boundary, total),
        },
        _end_of_document(tokens, found.ends),
        largest,
        counts,
        digest.hexdigest(),
    )


def _samples(tokens: RunReader) -> Iterator[np.ndarray]:
    """Yield pieces from all over the text; all of a short one."""
    total = len(tokens)
    if total <= _SAMPLES * _SAMPLE:
        yield tokens.read(0, total)
        return
    for number in range(_SAMPLES):
        start = number * (total - _SAMPLE) // (_SAMPLES - 1)
        yield tokens.read(start, start + _SAMPLE)


def _end_of_document(tokens: RunReader, ends: Sequence[int]) -> int | None:
    """Return the token that ends all documents looked at, and is nowhere else in them; or None."""
    numbers = sorted({number * len(ends) // _SAMPLES for number in range(_SAMPLES)} if ends else ())
    last, inside = set[int](), set[int]()
    for number in numbers:
        begin, end = ends[number - 1] if number else 0, ends[number]
        if not 0 <= begin <= end <= len(tokens):
            raise IndexError(number)
        text = tokens.read(max(begin, end - _SAMPLE), end)
        last.update(map(int, text[-1:]))
        inside.update(map(int, text[:-1]))
    is_one = len(last) == 1 and len(numbers) > 1 and not last & inside
    return last.pop() if is_one else None
