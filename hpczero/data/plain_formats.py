"""Files of tokens that others made: where their tokens and the ends of their documents lie.

A file may come from anywhere: what it says of itself is compared with its size.
"""

import os
import struct
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from hpczero import safe_files
from hpczero.errors import InputError
from hpczero.text import printable

_LOOKED_AT = 64  # sequences of an index


@dataclass(frozen=True)
class Run:
    """Tokens that lie one after the other in a file."""

    path: Path
    offset: int  # bytes
    count: int


@dataclass(frozen=True)
class Found:
    """The kind and the extent of files, before anything of their tokens is read."""

    form: str
    dtype: np.dtype
    runs: Sequence[Run]
    ends: Sequence[int] = ()  # the tokens up to the end of each document; none: unknown


def is_plain(path: Path) -> bool:
    """Return True for a path that names files of others, by its name alone."""
    known = (".npy", ".bin", ".idx", ".ds")
    return path.is_dir() or path.suffix in known or _index(path).exists()


def find_tokens(path: Path) -> Found:
    """Tell the kind of the files; InputError if they are damaged or of none."""
    if path.is_dir():
        return _datatrove(path, sorted(one for one in path.iterdir() if one.suffix == ".ds"))
    if path.suffix == ".ds":
        return _datatrove(path, [path])
    if path.suffix == ".npy":
        return _numpy(path)
    return _megatron(path)


class Numbers(Sequence[int]):
    """Whole numbers of 4 or 8 bytes in a file, which is opened for each that is asked for."""

    def __init__(self, path: Path, offset: int, count: int, width: int = 8) -> None:
        self._path = path
        self._offset = offset
        self._count = count
        self._width = width

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, at: Any) -> Any:
        at = at + self._count if at < 0 else at
        if not 0 <= at < self._count:
            raise IndexError(at)
        place = self._offset + at * self._width
        with _file(self._path) as file:
            read = os.pread(file.fileno(), self._width, place)
        if len(read) < self._width:
            raise IndexError(at)
        return int.from_bytes(read, "little", signed=True)


# -- numpy

_ARRAY_HEADERS = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}


def _numpy(path: Path) -> Found:
    with _file(path) as file:
        size = os.fstat(file.fileno()).st_size
        try:
            version = np.lib.format.read_magic(file)
            if version not in _ARRAY_HEADERS:
                raise ValueError(f"version {version}")
            shape, _, dtype = _ARRAY_HEADERS[version](file)
        except Exception as error:  # numpy evaluates the header: there is nothing narrower
            why = printable(str(error), 200)
            raise InputError(f"{path} ({size:,} bytes) is no array of numpy: {why}") from error
        offset = file.tell()
    if len(shape) != 1 or shape[0] < 0 or dtype.kind not in "iu":
        raise InputError(
            f"{path} holds {printable(str(dtype), 60)} in the shape {shape}: "
            "tokens are whole numbers in one dimension"
        )
    _refuse_short(path, size, offset + shape[0] * dtype.itemsize, f"{shape[0]:,} tokens")
    return Found("numpy", dtype, [Run(path, offset, shape[0])])


def _file(path: Path) -> BinaryIO:
    """Open a regular file, or a link to one: opening a pipe would block."""
    return os.fdopen(safe_files.open_to_read(path), "rb", buffering=0)


def _refuse_short(path: Path, size: int, needed: int, what: str) -> None:
    if needed > size:
        raise InputError(
            f"{path} has {size:,} bytes, and {what} are {needed:,}: it was cut short, copy it again"
        )


# -- datatrove and Nanotron

_DS_INDEX, _DS_FACTS = ".index", ".metadata"
_MOST_FACTS = 1 << 16  # bytes


def _datatrove(folder: Path, files: Sequence[Path]) -> Found:
    if not files:
        raise InputError(f"{folder} has no *.ds, the files of tokens of datatrove and Nanotron")
    ends = [_ends_of(path) for path in files]
    counts = [of_file[-1] if of_file else 0 for of_file in ends]
    widths = set()
    for path, count in zip(files, counts, strict=True):
        size = path.stat().st_size
        width = _token_size(path, size, count)
        if count * width != size:
            raise InputError(
                f"{path} has {size:,} bytes, and its index says {count:,} tokens of {width} bytes: "
                "copy both again"
            )
        if count:
            widths.add(width)
    if len(widths) > 1:
        raise InputError(f"{folder} has tokens of {sorted(widths)} bytes: all must have as many")
    runs = [Run(path, 0, count) for path, count in zip(files, counts, strict=True) if count]
    dtype = np.dtype(f"<u{widths.pop()}" if widths else "<u2")
    return Found("datatrove", dtype, runs, _Joined(ends, counts))


class _Joined(Sequence[int]):
    """The ends of documents of some files, one after the other."""

    def __init__(self, ends: Sequence[Numbers], counts: Sequence[int]) -> None:
        self._ends = ends
        self._tokens = [0, *accumulate(counts)]
        self._documents = [0, *accumulate(map(len, ends))]

    def __len__(self) -> int:
        return self._documents[-1]

    def __getitem__(self, at: Any) -> Any:
        if not 0 <= at < len(self):
            raise IndexError(at)
        file = bisect_right(self._documents, at) - 1
        return self._tokens[file] + self._ends[file][at - self._documents[file]]


def _ends_of(path: Path) -> Numbers:
    """Return where the documents of a file end, as its index says."""
    index = path.with_name(path.name + _DS_INDEX)
    with _file(index) as file:
        size = os.fstat(file.fileno()).st_size
    if size % 8:
        raise InputError(f"{index} has {size:,} bytes, no whole number of 64-bit numbers")
    return Numbers(index, 0, size // 8)


def _token_size(path: Path, size: int, count: int) -> int:
    """Return the bytes of a token: as the metadata say, else as size and index do."""
    facts = path.with_name(path.name + _DS_FACTS)
    if facts.exists():
        said = safe_files.read_small(facts, _MOST_FACTS).decode("utf-8", errors="replace")
        width = said.partition("\n")[0].rpartition("|")[2]
        if width in ("2", "4"):
            return int(width)
    if count and size // count not in (2, 4):
        raise InputError(f"{path} has {size:,} bytes for {count:,} tokens: not 2 or 4 for each")
    return size // count if count else 2


# -- Megatron-LM

_MAGIC = b"MMIDIDX\x00\x00"
_HEAD = struct.Struct("<9sQBQQ")  # magic, version, kind of number, sequences, ends of documents
_KINDS = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}


def _index(path: Path) -> Path:
    """Return the index of a pair that is named by either of them, or without an ending."""
    if path.suffix in (".bin", ".idx"):
        return path.with_suffix(".idx")
    return path.with_name(path.name + ".idx")


def _megatron(path: Path) -> Found:
    index = _index(path)
    tokens = index.with_suffix(".bin")
    with _file(tokens) as opened:
        size = os.fstat(opened.fileno()).st_size
    with _file(index) as file:
        there = os.fstat(file.fileno()).st_size
        head = file.read(_HEAD.size)
    if len(head) < _HEAD.size or not head.startswith(_MAGIC):
        raise InputError(f"{index} ({there:,} bytes) is no index of Megatron-LM")
    _, version, kind, sequences, ends = _HEAD.unpack(head)
    if version != 1 or kind not in _KINDS:
        raise InputError(
            f"{index} has version {version} and numbers of kind {kind}; hpczero reads version 1 "
            f"and the kinds {', '.join(map(str, _KINDS))}"
        )
    needed = _HEAD.size + 12 * sequences + 8 * ends
    _refuse_short(index, there, needed, f"{sequences:,} sequences and {ends:,} ends of documents")
    dtype = np.dtype(_KINDS[kind])
    lengths = Numbers(index, _HEAD.size, sequences, 4)
    pointers = Numbers(index, _HEAD.size + 4 * sequences, sequences)
    documents = Numbers(index, _HEAD.size + 12 * sequences, ends)
    last = sequences - 1
    count = (pointers[last] // dtype.itemsize + lengths[last]) if sequences else 0
    _refuse_gaps(index, lengths, pointers, dtype.itemsize)
    _refuse_short(tokens, size, count * dtype.itemsize, f"the {count:,} tokens of {index}")

    found_ends = _MegatronEnds(documents, pointers, dtype.itemsize, count)
    return Found("Megatron", dtype, [Run(tokens, 0, count)], found_ends)


@dataclass(frozen=True)
class _MegatronEnds(Sequence[int]):
    """The ends of documents, of which the index knows the sequences."""

    documents: Numbers  # the first sequence of each, and behind the last
    pointers: Numbers  # bytes before each sequence
    width: int
    total: int  # tokens

    def __len__(self) -> int:
        return max(0, len(self.documents) - 1)

    def __getitem__(self, at: Any) -> Any:
        if not 0 <= at < len(self):
            raise IndexError(at)
        sequence = self.documents[at + 1]
        return (
            self.total if sequence == len(self.pointers) else self.pointers[sequence] // self.width
        )


def _refuse_gaps(index: Path, lengths: Numbers, pointers: Numbers, width: int) -> None:
    """Raise InputError unless each of some sequences ends where the next one begins."""
    last = len(pointers) - 1
    for sequence in (
        {number * last // _LOOKED_AT for number in range(_LOOKED_AT)} if last > 0 else ()
    ):
        end = pointers[sequence] + lengths[sequence] * width
        if end != pointers[sequence + 1] or lengths[sequence] < 0:
            raise InputError(
                f"{index}: sequence {sequence:,} ends at byte {end:,}, and the next one begins at "
                f"byte {pointers[sequence + 1]:,}: hpczero reads pairs without gaps"
            )
    if last >= 0 and (pointers[0] or lengths[last] < 0):
        raise InputError(f"{index} is damaged: its first sequence begins at byte {pointers[0]:,}")
