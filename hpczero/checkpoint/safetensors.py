"""The safetensors format (https://github.com/huggingface/safetensors): 8 bytes with the length of a header in JSON, the header, the tensors' data.

Written and read by hand, tensor after tensor and stretch after stretch: the package `safetensors` wants a whole file's tensors in memory.
"""

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import xxhash

from hpczero.checkpoint import manifest
from hpczero.checkpoint.load import Checkpoint
from hpczero.checkpoint.shard_file import SLOTS, Advance, Array
from hpczero.errors import InputError
from hpczero.safe_files import open_to_read, written_durably
from hpczero.text import printable

_DTYPES = {
    "F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2", "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1", "U64": "<u8", "U32": "<u4",
    "U16": "<u2", "U8": "u1", "BOOL": "?",
}  # fmt: skip
FLOATS = ("F64", "F32", "F16", "BF16")
_LONGEST_HEADER = 32 << 20  # bytes: some hundred for each of the tensors that a checkpoint can have
_MOST_SIGNS = 4 * manifest.MOST_TENSORS + 10_000  # : of a header, each a key of something


@dataclass(frozen=True)
class Entry:
    """A tensor in a file, at bytes begin .. end - 1 behind the header."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int = 0

    @property
    def numpy(self) -> np.dtype[Any]:
        """BF16 has none: its bits, as whole numbers."""
        return np.dtype(_DTYPES[self.dtype])

    @property
    def size(self) -> int:
        return prod(self.shape)

    @property
    def end(self) -> int:
        return self.begin + self.size * self.numpy.itemsize


def dtype_of(values: Array) -> str:
    """Of those that a checkpoint can hold."""
    return next(
        name
        for name, dtype in _DTYPES.items()
        if np.dtype(dtype) == values.dtype and name != "BF16"
    )


def placed(entries: Iterable[Entry]) -> list[Entry]:
    """One after the other; the widest numbers first, so that each begins at a multiple of its width."""
    found, begin = [], 0
    for entry in sorted(entries, key=lambda entry: -entry.numpy.itemsize):
        found.append(Entry(entry.name, entry.dtype, entry.shape, begin))
        begin = found[-1].end
    return found


def write(
    path: Path, entries: Sequence[Entry], metadata: Mapping[str, str], data: Iterable[Array]
) -> None:
    """`data`: of the entries, one after the other. The file has all of it and is on the disk, or does not exist under this name."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    header |= {
        entry.name: {
            "dtype": entry.dtype,
            "shape": list(entry.shape),
            "data_offsets": [entry.begin, entry.end],
        }
        for entry in entries
    }
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    with written_durably(path) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for values in data:
            file.write(values.data.cast("B"))
        assert file.tell() == 8 + len(text) + max((entry.end for entry in entries), default=0)


class SafetensorsFile:
    """Open for reading. InputError: it is none."""

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
        self.metadata = header.pop("__metadata__", {})
        if not isinstance(self.metadata, dict) or not all(
            isinstance(value, str) for value in self.metadata.values()
        ):
            raise self._wrong("its metadata is no table of texts")
        self.entries = [self._entry(name, described) for name, described in header.items()]
        self._refuse_gaps()

    def stretches(self, entry: Entry, length: int) -> Iterator[Array]:
        """The elements of a tensor in memory order, flat, so many at a time."""
        for start in range(0, entry.size, length):
            values = np.empty(min(length, entry.size - start), entry.numpy)
            rest, place = (
                values.data.cast("B"),
                self._data + entry.begin + start * entry.numpy.itemsize,
            )
            while rest:
                count = os.preadv(self._file.fileno(), [rest], place)
                if not count:
                    raise self._wrong("it became shorter")
                rest, place = rest[count:], place + count
            yield values

    def _entry(self, name: str, described: Any) -> Entry:
        match described:
            case {
                "dtype": str(dtype),
                "shape": list(shape),
                "data_offsets": [begin, end],
                **more,
            } if dtype in _DTYPES and not more:
                if (
                    not manifest.problem({"any": shape}, {})
                    and type(begin) is int
                    and type(end) is int
                ):
                    entry = Entry(name, dtype, tuple(shape), begin)
                    if begin >= 0 and entry.end == end <= self._size - self._data:
                        return entry
        raise self._wrong(
            f"what it says of {printable(name, 100)} cannot be: {printable(str(described), 100)}"
        )

    def _refuse_gaps(self) -> None:
        """Each tensor begins where the one before ends, and the last one ends with the file."""
        place = 0
        for entry in sorted(self.entries, key=lambda entry: (entry.begin, entry.end)):
            if entry.begin != place:
                raise self._wrong(
                    f"{printable(entry.name, 100)} is at byte {entry.begin:,} of the data, and the tensors before end at {place:,}"
                )
            place = entry.end
        if place != self._size - self._data:
            raise self._wrong(
                f"its tensors have {place:,} bytes, and it has {self._size - self._data:,}"
            )

    def _wrong(self, what: str) -> InputError:
        return InputError(
            f"{printable(str(self.path))} is no safetensors file, or is damaged: {what}"
        )

    def __enter__(self) -> "SafetensorsFile":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key is there twice")
    return found


def from_float32(values: Array, dtype: str) -> Array:
    """Rounded to the nearest, ties to even."""
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


# The weights of a checkpoint as safetensors: whole tensors, in one file or several with an index, never more in memory than a stretch of one.
DTYPES = {"fp32": "F32", "bf16": "BF16", "fp16": "F16"}
_SOURCE = "hpczero.checkpoint"
BUFFERS = "hpczero.buffers"  # in the metadata: which of the tensors are buffers
WHOLE, _INDEX = "model.safetensors", "model.safetensors.index.json"


class Export:
    """Of one checkpoint's weights in one dtype. `size`: bytes of data; `overflows`: weights that were finite and have become infinite."""

    def __init__(self, checkpoint: Checkpoint, dtype: str) -> None:
        self.checkpoint, self.dtype = checkpoint, DTYPES[dtype]
        self.entries = [
            Entry(tensor.name, self.dtype, tensor.shape) for tensor in checkpoint.table.tensors
        ]
        self.entries += [
            Entry(name, dtype_of(values), values.shape)
            for name, values in checkpoint.buffers.items()
        ]
        self.size = sum(entry.end for entry in self.entries)
        self.overflows = 0

    def to_file(self, path: Path, advance: Advance) -> list[Path]:
        _refuse_existing([path])
        self._write(path, self.entries, advance)
        return [path]

    def to_folder(self, folder: Path, largest: int, advance: Advance) -> list[Path]:
        """Files of at most so many bytes of data (a tensor that has more is alone in one); the index comes last."""
        groups = _dealt(self.entries, largest)
        paths = [
            folder / f"model-{number:05d}-of-{len(groups):05d}.safetensors"
            for number in range(1, len(groups) + 1)
        ]
        _refuse_existing([folder / _INDEX])
        _refuse_existing([path for path in paths if not self._began(path)])
        for path, group in zip(paths, groups, strict=True):
            self._write(path, group, advance)
        where = {
            entry.name: path.name
            for path, group in zip(paths, groups, strict=True)
            for entry in group
        }
        with written_durably(folder / _INDEX) as file:
            file.write(
                json.dumps(
                    {"metadata": {"total_size": self.size}, "weight_map": where}, indent=2
                ).encode()
                + b"\n"
            )
        return [*paths, folder / _INDEX]

    def _write(self, path: Path, group: Sequence[Entry], advance: Advance) -> None:
        buffers = [entry.name for entry in group if entry.name in self.checkpoint.buffers]
        metadata = {
            "format": "pt",
            "hpczero.step": str(self.checkpoint.step),
            _SOURCE: self._source,
            BUFFERS: json.dumps(buffers),
        }
        entries = placed(group)
        write(path, entries, metadata, self._data(entries, advance))

    @cached_property
    def _source(self) -> str:
        """The checkpoint's identity: of its step and all its checksums but those of the blocks."""
        return str(xxhash.xxh3_128_hexdigest(manifest.text(self.checkpoint.content).encode()))

    def _began(self, path: Path) -> bool:
        """Return True if an export of this checkpoint to this dtype wrote the file. Without an index
        it was killed, and the same command writes all files anew.
        """
        try:
            with SafetensorsFile(path) as file:
                dtypes = {e.dtype for e in file.entries if e.name not in self.checkpoint.buffers}
                return file.metadata.get(_SOURCE) == self._source and dtypes <= {self.dtype}
        except InputError:
            return False

    def _data(self, entries: Sequence[Entry], advance: Advance) -> Iterator[Array]:
        for entry in entries:
            for values in self._stretches(entry):
                yield values
                advance(values.nbytes)

    def _stretches(self, entry: Entry) -> Iterator[Array]:
        if entry.name in self.checkpoint.buffers:
            yield self.checkpoint.buffers[entry.name].reshape(-1)
            return
        for values in self.checkpoint[f"/{SLOTS[0]}/{entry.name}"].stretches():
            made = from_float32(values, self.dtype)
            if self.dtype != "F32":
                self.overflows += int(np.isfinite(values).sum() - _finite(made, self.dtype))
            yield made


def _finite(values: Array, dtype: str) -> int:
    return int(
        ((values & 0x7F80) != 0x7F80).sum() if dtype == "BF16" else np.isfinite(values).sum()
    )


def _dealt(entries: Sequence[Entry], largest: int) -> list[list[Entry]]:
    """In order, a new file whenever the next tensor has no more room."""
    groups: list[list[Entry]] = [[]]
    filled = 0
    for entry in entries:
        size = entry.end - entry.begin
        if groups[-1] and filled + size > largest:
            groups.append([])
            filled = 0
        groups[-1].append(entry)
        filled += size
    return groups


def _refuse_existing(paths: Sequence[Path]) -> None:
    for path in paths:
        if os.path.lexists(path):
            raise InputError(
                f"{printable(str(path))} exists already and is left as it is: name another one"
            )
