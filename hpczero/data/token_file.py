"""Token files: one HDF5 file holds a corpus as tokens (docs/data.md describes the format).

A file may come from anywhere, so `open_token_file` trusts nothing in it. It checks types, shapes,
offsets and sizes, and reads nothing outside the file (no links, no external or virtual storage). It
does not use the HDF5 library, which a crafted file can crash. Tokens are memory-mapped.
"""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from hpczero import safe_files
from hpczero.data.raw_files import BLOCK, Blocks, blocks_of
from hpczero.data.tokenizer import (
    FILES,
    MOST_BYTES,
    ByteTokenizer,
    Tokenizer,
    from_files,
    tokenizer,
)
from hpczero.errors import InputError
from hpczero.hdf5.reader import Dataset, NotPlain, UntrustedFile
from hpczero.text import printable

FORMAT = "hpczero-tokens"
VERSION = 1
SPLITS = ("train", "validation")
TOKENIZER = "tokenizer"  # group: the tokenizer's files, as bytes; none of the byte tokenizer
CHECKSUMS = "checksums"  # dataset: of the blocks of a split's tokens; older files have none
_LARGEST_VOCABULARY = 2**32
_LONGEST_TEXT = 100  # characters of an attribute
CHUNK = 2**22  # bytes read at a time: many blocks
_ATTRIBUTES = {
    "tokenizer": str,
    "vocabulary": int,
    "end_of_document": int,
    "validation_fraction": float,
    "builder": int,
    "inputs": str,
    "fingerprint": str,
}
_BAD_RECORDS = "bad_records"  # attribute of files of which some were left out


@dataclass(frozen=True)
class Split:
    tokens: np.ndarray  # [tokens], memory-mapped
    counts: np.ndarray  # [vocabulary]: occurrences of each id
    ends: np.ndarray  # [documents + 1], memory-mapped: 0, then the end of each document
    largest: int  # the largest id that occurs; -1 if there are no tokens
    checksums: np.ndarray | None  # of the blocks of the tokens (`raw_files`)

    @property
    def documents(self) -> int:
        return len(self.ends) - 1

    def entropy(self) -> float:
        """Nats per token: the loss of a model that knows the ids' frequencies and nothing else."""
        shares = self.counts[self.counts > 0] / max(1, len(self.tokens))
        return float(-(shares * np.log(shares)).sum()) + 0.0


@dataclass(frozen=True)
class TokenFile:
    path: Path
    tokenizer: str
    vocabulary: int
    end_of_document: int
    validation_fraction: float
    builder: int  # version of the code that made it
    inputs: str  # digest of the input files' names and sizes
    fingerprint: str  # xxh3 of the tokens
    splits: dict[str, Split]
    tokenizer_files: Mapping[str, np.ndarray] = field(default_factory=dict)
    bad_records: int = 0  # of the text that were left out; older files do not say it

    def made_with(self) -> Tokenizer:
        """Return the tokenizer; InputError if it is not in the file, or is not the one named."""
        files = {name: content.tobytes() for name, content in self.tokenizer_files.items()}
        if not files and self.tokenizer != ByteTokenizer.name:
            raise InputError(
                f"{printable(str(self.path))} does not hold its tokenizer ({self.tokenizer})"
            )
        made = from_files(files, self.end_of_document)
        if made.name != self.tokenizer or made.vocabulary != self.vocabulary:
            raise InputError(
                f"{printable(str(self.path))}: its tokenizer is {made.name} with "
                f"{made.vocabulary:,} ids, its tokens are of {self.tokenizer} with "
                f"{self.vocabulary:,}: it is damaged, or was put together of two"
            )
        return made

    @property
    def has_checksums(self) -> bool:
        """Return False for a file of an older version, which has only a fingerprint."""
        return all(split.checksums is not None for split in self.splits.values())

    def blocks(self) -> dict[str, Blocks]:
        """Return readers of each split's tokens that verify the checksums."""
        return {
            name: Blocks(self.path, name, split.tokens, split.checksums)
            for name, split in self.splits.items()
        }

    def damages(self) -> Iterator[str]:
        """Read the whole file and yield a line for each part that is not as it was written."""
        digest = xxhash.xxh3_128()
        for name, blocks in self.blocks().items():
            split = self.splits[name]
            counts = np.zeros(self.vocabulary, np.int64)
            for chunk in blocks.verify(CHUNK // BLOCK):
                yield from chunk.damaged
                digest.update(chunk.content)
                tokens = np.frombuffer(chunk.content, split.tokens.dtype)
                counts += np.bincount(tokens[tokens < self.vocabulary], minlength=self.vocabulary)
            if not np.array_equal(counts, split.counts):
                yield f"/{name}/counts are not those of its tokens"
            if not self._ends_fit(split):
                yield f"/{name}/documents do not end with token {self.end_of_document}"
            blocks.close()
        if digest.hexdigest() != self.fingerprint:
            actual = digest.hexdigest()
            yield f"the tokens have the fingerprint {actual}, and {self.fingerprint} was written"

    def _ends_fit(self, split: Split) -> bool:
        """Return True if the end-of-document token stands at the end of each document only."""
        ends = np.asarray(split.ends)
        if not len(split.tokens):
            return not split.documents
        if (ends[1:] <= ends[:-1]).any() or split.counts[self.end_of_document] != split.documents:
            return False
        return bool((split.tokens[ends[1:] - 1] == self.end_of_document).all())

    def describe(self) -> dict[str, Any]:
        return {
            "path": str(self.path),
            "tokenizer": self.tokenizer,
            "vocabulary": self.vocabulary,
            "tokens": {name: len(split.tokens) for name, split in self.splits.items()},
            "documents": {name: split.documents for name, split in self.splits.items()},
            "fingerprint": self.fingerprint,
        }


def tokenizer_at(source: str, end_of_document: str | None = None) -> Tokenizer:
    """Return the tokenizer that a token file keeps, that in a file of its own, or "byte"."""
    if Path(source).suffix in (".h5", ".hdf5"):
        return open_token_file(Path(source)).made_with()
    return tokenizer(source, end_of_document)


def open_token_file(path: Path) -> TokenFile:
    """Open a token file and map its tokens.

    InputError if it is missing, of another format or version, truncated or damaged.
    """
    descriptor = _opened(path)
    try:
        return _read(path, descriptor)
    except NotPlain as error:
        size = os.fstat(descriptor).st_size
        if os.pread(descriptor, 4, 0) != b"\x89HDF":
            raise InputError(
                f"{path} is not a token file (not HDF5, {size} bytes): "
                "make one with `hpczero data build -o NAME.h5 TEXT...`"
            ) from error
        why = printable(str(error))
        raise InputError(
            f"{path} ({size} bytes) is truncated or damaged: {why}; copy or build it again"
        ) from error
    except (OSError, ValueError, MemoryError) as error:
        raise InputError(
            f"{path} cannot be read: {printable(str(error))}; copy or build it again"
        ) from error
    finally:
        os.close(descriptor)


def _opened(path: Path) -> int:
    """Open a regular file, or a link to one: opening a pipe would block."""
    try:
        return safe_files.open_to_read(path)
    except OSError as error:
        raise InputError(f"token file {path} cannot be read: {error.strerror}") from error


def _read(path: Path, descriptor: int) -> TokenFile:
    file = UntrustedFile(descriptor)
    if _attribute(file, "format", str) != FORMAT:
        raise InputError(
            f"{path} is an HDF5 file, but not a token file (no attribute format = '{FORMAT}'): "
            "make one with `hpczero data build`"
        )
    version = _attribute(file, "version", int)
    if version != VERSION:
        raise InputError(
            f"{path} has version {version} of the token file's format, "
            f"this hpczero reads version {VERSION}: use the hpczero that made it, or build it again"
        )
    facts = {name: _attribute(file, name, kind) for name, kind in _ATTRIBUTES.items()}
    missing = [name for name, value in facts.items() if value is None]
    if missing:
        raise NotPlain(f"attribute {', '.join(missing)} is missing or of another type")
    if not 0 < facts["vocabulary"] <= _LARGEST_VOCABULARY:
        raise NotPlain(f"a vocabulary of {facts['vocabulary']} ids")
    if not 0 <= facts["end_of_document"] < facts["vocabulary"]:
        raise NotPlain(f"documents that end with token {facts['end_of_document']}")
    for name in ("tokenizer", "inputs", "fingerprint"):
        if len(facts[name]) > _LONGEST_TEXT:
            raise NotPlain(f"attribute {name} has more than {_LONGEST_TEXT} characters")
    bad = _attribute(file, _BAD_RECORDS, int) or 0
    splits = {name: _read_split(file, descriptor, name, facts["vocabulary"]) for name in SPLITS}
    kept = _read_tokenizer(file, descriptor)
    return TokenFile(path=path, splits=splits, tokenizer_files=kept, bad_records=bad, **facts)


def _read_tokenizer(file: UntrustedFile, descriptor: int) -> dict[str, np.ndarray]:
    if TOKENIZER not in file.names(""):
        return {}
    kept = {}
    for name in file.names(TOKENIZER):
        dataset = _dataset(file, TOKENIZER, name, np.dtype("<u1"))
        if name not in FILES or dataset.size > MOST_BYTES:
            raise NotPlain(f"/{TOKENIZER}/{printable(name, 60)}, of {dataset.size:,} bytes")
        kept[name] = _mapped(descriptor, dataset)
    return kept


def _attribute(file: UntrustedFile, name: str, kind: type) -> Any:
    """Return the attribute's value, or None if it is missing, an array, or of another type."""
    value = file.attributes.get(name)
    if isinstance(value, str):
        value = printable(value)
    return value if type(value) is kind else None


def _read_split(file: UntrustedFile, descriptor: int, split: str, vocabulary: int) -> Split:
    tokens = _mapped(descriptor, _dataset(file, split, "tokens", token_dtype(vocabulary)))
    documents = _mapped(descriptor, _dataset(file, split, "documents", np.dtype("<i8")))
    counts = _dataset(file, split, "counts", np.dtype("<i8"))
    if len(documents) == 0 or documents[0] != 0 or documents[-1] != len(tokens):
        raise NotPlain(f"/{split}/documents does not run from 0 to the {len(tokens)} tokens")
    occurrences = file.values(counts) if counts.size == vocabulary else np.full(1, -1)
    if (occurrences < 0).any() or _sum(occurrences) != len(tokens):
        raise NotPlain(
            f"/{split}/counts does not add up to the {len(tokens)} tokens over {vocabulary} ids"
        )
    checksums = None
    if CHECKSUMS in file.names(split):
        stored = _dataset(file, split, CHECKSUMS, np.dtype("<u8"))
        if stored.size != blocks_of(tokens.nbytes):
            raise NotPlain(f"/{split}/{CHECKSUMS} are not those of {tokens.nbytes} bytes")
        checksums = file.values(stored)
    largest = int(np.flatnonzero(occurrences)[-1]) if len(tokens) else -1
    return Split(tokens, occurrences, documents, largest, checksums)


def _sum(counts: np.ndarray) -> int:
    """Return the exact sum of int64 values that may overflow 64 bits together."""
    high = (counts >> 32).sum(dtype=np.int64)
    low = (counts & 0xFFFFFFFF).sum(dtype=np.uint64)
    return (int(high) << 32) + int(low)


def _dataset(file: UntrustedFile, split: str, name: str, dtype: np.dtype) -> Dataset:
    dataset = file.dataset(f"{split}/{name}")
    if len(dataset.shape) != 1 or dataset.dtype != dtype:
        shape = f"shape ({', '.join(map(str, dataset.shape[:8]))})"
        raise NotPlain(
            f"/{split}/{name} has type {dataset.dtype} and {shape}, not {dtype} and one dimension"
        )
    return dataset


def _mapped(descriptor: int, dataset: Dataset) -> np.ndarray:
    """Map the dataset's values read-only."""
    if not dataset.size:
        return np.empty(0, dataset.dtype)
    with os.fdopen(os.dup(descriptor), "rb") as file:
        return np.memmap(file, dataset.dtype, "r", dataset.place, dataset.shape)


def token_dtype(vocabulary: int) -> np.dtype:
    """Return the smallest unsigned integer type (little-endian) that holds every id."""
    for code in ("<u1", "<u2", "<u4"):
        if vocabulary <= 2 ** (8 * np.dtype(code).itemsize):
            return np.dtype(code)
    raise InputError(f"a vocabulary of {vocabulary} ids is more than a token file holds (2**32)")
