"""The safetensors format, read and written.

A file is 8 bytes with the length of a header, the header in JSON, the tensors' data
(https://github.com/huggingface/safetensors). It is read and written by hand, tensor after tensor
and stretch after stretch: the package `safetensors` wants a whole file's tensors in memory.
"""

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from hpczero.checkpoint import limits
from hpczero.checkpoint.shard_file import Array
from hpczero.errors import InputError
from hpczero.safe_files import open_to_read, read_at, written_durably
from hpczero.text import printable

_DTYPES = {
    "F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2", "BOOL": "?",
    "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1",
    "U64": "<u8", "U32": "<u4", "U16": "<u2", "U8": "u1",
}  # fmt: skip
FLOATS = ("F64", "F32", "F16", "BF16")
WHOLE_NAME, INDEX_NAME = "model.safetensors", "model.safetensors.index.json"
BUFFERS = "hpczero.buffers"  # in the metadata: which of the tensors are buffers
_LONGEST_HEADER = 32 << 20  # bytes: some hundred for each of the tensors that a checkpoint can have
_MOST_SIGNS = 4 * limits.MOST_TENSORS + 10_000  # colons of a header, one for each key


@dataclass(frozen=True)
class Entry:
    """A tensor in a file, at bytes begin .. end - 1 behind the header."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int = 0

    @property
    def numpy(self) -> np.dtype[Any]:
        """The dtype for numpy, which has no BF16: its bits, as whole numbers."""
        return np.dtype(_DTYPES[self.dtype])

    @property
    def size(self) -> int:
        return prod(self.shape)

    @property
    def end(self) -> int:
        return self.begin + self.size * self.numpy.itemsize


def dtype_of(values: Array) -> str:
    """Return the name of a dtype that a checkpoint can hold."""
    names = (name for name, dtype in _DTYPES.items() if np.dtype(dtype) == values.dtype)
    return next(name for name in names if name != "BF16")


def placed(entries: Iterable[Entry]) -> list[Entry]:
    """Place entries one after the other, each at a multiple of its width: the widest come first."""
    result = []
    begin = 0
    for entry in sorted(entries, key=lambda entry: -entry.numpy.itemsize):
        result.append(replace(entry, begin=begin))
        begin = result[-1].end
    return result


def write(
    path: Path, entries: Sequence[Entry], metadata: Mapping[str, str], data: Iterable[Array]
) -> None:
    """Write a file; `data`: of the entries, one after the other.

    It has all of it and is on the disk, or does not exist under this name.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    for entry in entries:
        offsets = [entry.begin, entry.end]
        described = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": offsets}
        header[entry.name] = described
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    with written_durably(path) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for values in data:
            file.write(values.data.cast("B"))
        assert file.tell() == 8 + len(text) + max((entry.end for entry in entries), default=0)


class SafetensorsFile:
    """A file open for reading; InputError: it is no safetensors file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = os.fdopen(open_to_read(path), "rb")
            self._size = os.fstat(self._file.fileno()).st_size
            length = int.from_bytes(self._file.read(8), "little")
            if not 2 <= length <= min(_LONGEST_HEADER, self._size - 8):
                raise self._wrong(f"a header of {length:,} bytes in a file of {self._size:,}")
            text = self._file.read(length)
            if (signs := max(text.count(sign) for sign in (b":", b"{", b"["))) > _MOST_SIGNS:
                raise self._wrong(f"a header that has a sign of JSON {signs:,} times")
            header = json.loads(text, object_pairs_hook=_each_once)
        except OSError as error:
            raise InputError(f"{printable(str(path))}: {error.strerror}") from error
        except (ValueError, RecursionError) as error:
            raise self._wrong("its header is no JSON, or says something twice") from error
        if not isinstance(header, dict):
            raise self._wrong("its header is no table")
        self._data = 8 + length
        metadata = header.pop("__metadata__", {})
        if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
            raise self._wrong("its metadata is no table of texts")
        self.metadata = metadata
        self.entries = [self._entry(name, described) for name, described in header.items()]
        self._refuse_gaps()

    def stretches(
        self, entry: Entry, length: int, first: int = 0, last: int | None = None
    ) -> Iterator[Array]:
        """Yield elements first .. last - 1 of a tensor in memory order, flat, so many at a time."""
        last = entry.size if last is None else last
        for start in range(first, last, length):
            values = np.empty(min(length, last - start), entry.numpy)
            offset = self._data + entry.begin + start * entry.numpy.itemsize
            if read_at(self._file.fileno(), values.data.cast("B"), offset) < values.nbytes:
                raise self._wrong("it became shorter")
            yield values

    def _entry(self, name: str, described: Any) -> Entry:
        match described:
            case {
                "dtype": str(dtype),
                "shape": list(shape),
                "data_offsets": [int(begin), int(end)],
                **more,
            } if dtype in _DTYPES and not more and not limits.problem({"any": shape}, {}):
                entry = Entry(name, dtype, tuple(shape), begin)
                are_numbers = type(begin) is int and type(end) is int  # and neither true nor false
                if are_numbers and begin >= 0 and entry.end == end <= self._size - self._data:
                    return entry
        said = f"{printable(name, 100)} cannot be: {printable(str(described), 100)}"
        raise self._wrong(f"what it says of {said}")

    def _refuse_gaps(self) -> None:
        """Refuse tensors that do not follow each other from the header to the end of the file."""
        end = 0
        size = self._size - self._data
        for entry in sorted(self.entries, key=lambda entry: (entry.begin, entry.end)):
            if entry.begin != end:
                where = f"is at byte {entry.begin:,} of the data"
                name = printable(entry.name, 100)
                raise self._wrong(f"{name} {where}, and the tensors before end at {end:,}")
            end = entry.end
        if end != size:
            raise self._wrong(f"its tensors have {end:,} bytes, and it has {size:,}")

    def _wrong(self, what: str) -> InputError:
        name = printable(str(self.path))
        return InputError(f"{name} is no safetensors file, or is damaged: {what}")

    def __enter__(self) -> "SafetensorsFile":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) < len(pairs):
        raise ValueError("a key is there twice")
    return table


def from_float32(values: Array, dtype: str) -> Array:
    """Round to the nearest number of a dtype, ties to even."""
    if dtype == "BF16":
        bits = values.view(np.uint32)
        rounded = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16
        return np.where(np.isnan(values), (bits >> 16) | 0x40, rounded).astype(np.uint16)
    with np.errstate(over="ignore"):
        return values.astype(_DTYPES[dtype], copy=False)


def to_float32(values: Array, dtype: str) -> Array:
    if dtype == "BF16":
        return (values.astype(np.uint32) << 16).view(np.float32)
    with np.errstate(over="ignore"):
        return values.astype(np.float32, copy=False)
