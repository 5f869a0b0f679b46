"""The token file: one HDF5 file that holds a corpus as tokens (docs/data.md describes it for other readers).

A file may come from anywhere, so `open_token_file` believes nothing in it: types, shapes, places and sizes are checked, and
nothing outside the file is ever read (no links, no external or virtual storage). Tokens are memory-mapped where they lie.
"""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from hpczero.data.rawfiles import RawFile, writing
from hpczero.data.tokenizer import Tokenizer, token_dtype
from hpczero.errors import InputError

if TYPE_CHECKING:
    import h5py

FORMAT = "hpczero-tokens"
VERSION = 1
SPLITS = ("train", "validation")
LIBRARY_VERSIONS = ("earliest", "v110")  # what distributions' own HDF5 tools read
_LARGEST_VOCABULARY = 2**32
_CHUNK = 2**22  # bytes
_PAGE = 4096
_STORED_AS = {int: "<i8", float: "<f8"}
_ATTRIBUTES = {
    "tokenizer": str,
    "vocabulary": int,
    "end_of_document": int,
    "validation_fraction": float,
    "builder": int,
    "inputs": str,
    "fingerprint": str,
}


@dataclass(frozen=True)
class Split:
    tokens: np.ndarray  # [tokens], memory-mapped
    counts: np.ndarray  # [vocabulary]: how often each id occurs
    documents: int
    largest: int  # the largest id that occurs; -1 where none does

    def entropy(self) -> float:
        """Nats per token of the split's own distribution of ids: the loss of a model that knows the frequencies and nothing else."""
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

    def describe(self) -> dict[str, Any]:
        return {
            "path": str(self.path),
            "tokenizer": self.tokenizer,
            "vocabulary": self.vocabulary,
            "tokens": {name: len(split.tokens) for name, split in self.splits.items()},
            "documents": {name: split.documents for name, split in self.splits.items()},
            "fingerprint": self.fingerprint,
        }


def open_token_file(path: Path) -> TokenFile:
    """The file's facts, its tokens mapped; InputError if it is missing, foreign, newer, truncated or damaged."""
    import h5py

    size = _size(path)
    if not h5py.is_hdf5(path):
        raise InputError(f"{path} is not a token file (not HDF5, {size} bytes): make one with `hpczero data build -o NAME.h5 TEXT...`")
    try:
        with h5py.File(path, "r", locking=False) as file:
            return _read(path, size, file)
    except (OSError, KeyError, RuntimeError, TypeError, ValueError, OverflowError, MemoryError) as error:
        raise InputError(f"{path} ({size} bytes) is truncated or damaged: {error}; copy or build it again") from error


def _size(path: Path) -> int:
    try:
        with open(path, "rb") as file:
            return os.fstat(file.fileno()).st_size
    except OSError as error:
        raise InputError(f"token file {path} cannot be read: {error.strerror}") from error


def _read(path: Path, size: int, file: "h5py.File") -> TokenFile:
    kind, version = _attribute(file, "format", str), _attribute(file, "version", int)
    if kind != FORMAT:
        raise InputError(
            f"{path} is an HDF5 file, but not a token file (no attribute format = '{FORMAT}'): make one with `hpczero data build`"
        )
    if version != VERSION:
        raise InputError(
            f"{path} has version {version} of the token file's format, this hpczero reads version {VERSION}: "
            "use the hpczero that made it, or build it again"
        )
    facts = {name: _attribute(file, name, kind) for name, kind in _ATTRIBUTES.items()}
    missing = [name for name, value in facts.items() if value is None]
    if missing:
        raise ValueError(f"attribute {', '.join(missing)} is missing or of another type")
    if not 0 < facts["vocabulary"] <= _LARGEST_VOCABULARY:
        raise ValueError(f"a vocabulary of {facts['vocabulary']} ids")
    splits = {name: _read_split(path, size, file, name, facts["vocabulary"]) for name in SPLITS}
    return TokenFile(path=path, splits=splits, **facts)


def _attribute(file: "h5py.File", name: str, kind: type) -> Any:
    """The attribute's value, or None if it is missing, not a scalar, or not of that kind."""
    if name not in file.attrs or file.attrs.get_id(name).shape != ():
        return None
    value = file.attrs[name]
    if isinstance(value, bytes):
        value = value.decode("utf-8", errors="replace")
    accepted: tuple[type, ...] = {str: (str,), int: (int, np.integer), float: (float, np.floating)}[kind]
    return kind(value) if isinstance(value, accepted) else None


def _read_split(path: Path, size: int, file: "h5py.File", split: str, vocabulary: int) -> Split:
    import h5py

    if not isinstance(file.get(split, getlink=True), h5py.HardLink) or not isinstance(file[split], h5py.Group):
        raise ValueError(f"/{split} is missing, or not a group of this file")
    tokens = _mapped(path, size, file[split], "tokens", token_dtype(vocabulary))
    documents = _mapped(path, size, file[split], "documents", np.dtype("<i8"))
    counts = np.array(_mapped(path, size, file[split], "counts", np.dtype("<i8")))
    if len(documents) == 0 or documents[0] != 0 or documents[-1] != len(tokens):
        raise ValueError(f"/{split}/documents does not run from 0 to the {len(tokens)} tokens")
    if len(counts) != vocabulary or (counts < 0).any() or sum(map(int, counts[counts > 0])) != len(tokens):
        raise ValueError(f"/{split}/counts does not add up to the {len(tokens)} tokens over {vocabulary} ids")
    largest = int(np.flatnonzero(counts)[-1]) if len(tokens) else -1
    return Split(tokens, counts, len(documents) - 1, largest)


def _mapped(path: Path, size: int, group: "h5py.Group", name: str, dtype: np.dtype) -> np.ndarray:
    """The dataset's values where they lie in the file, read-only."""
    import h5py

    full = f"{group.name}/{name}"
    dataset = group[name] if isinstance(group.get(name, getlink=True), h5py.HardLink) else None
    if not isinstance(dataset, h5py.Dataset):
        raise ValueError(f"{full} is missing, or not a dataset of this file")
    creation = dataset.id.get_create_plist()
    if creation.get_layout() != h5py.h5d.CONTIGUOUS or creation.get_external_count():
        raise ValueError(f"{full} is not stored as one piece inside this file")
    if dataset.ndim != 1 or dataset.dtype != dtype:
        raise ValueError(f"{full} has type {dataset.dtype} and shape {dataset.shape}, not {dtype} and one dimension")
    length, offset = int(dataset.shape[0]), dataset.id.get_offset()
    if length == 0:
        return np.empty(0, dtype)
    end = (offset or 0) + length * dtype.itemsize
    if offset is None or end > size:
        raise ValueError(f"{full} has {length} values and would end at byte {end} of {size}")
    return np.memmap(path, dtype, "r", offset, (length,))


def write_token_file(
    path: Path, encoding: Tokenizer, facts: dict[str, Any], raw: dict[str, dict[str, RawFile]], copied: Callable[[int, int], None]
) -> None:
    """Makes a token file of the raw files.

    The datasets are allocated first; the values are then copied to where they lie, outside HDF5, counted and hashed on the way;
    counts and attributes come last. The same values give the same bytes. `copied` is told how many bytes of how many are there.
    """
    import h5py

    digest = xxhash.xxh3_128()
    total, done = sum(files["tokens"].length * files["tokens"].dtype.itemsize for files in raw.values()), 0
    with writing(path):
        offsets = _allocate(path, encoding.vocabulary, raw)
        counts = {}
        with open(path, "r+b") as file:
            for split in SPLITS:
                counts[split] = np.zeros(encoding.vocabulary, np.int64)
                file.seek(offsets[split, "tokens"])
                for block in _blocks(raw[split]["tokens"].path):
                    counts[split] += np.bincount(np.frombuffer(block, raw[split]["tokens"].dtype), minlength=encoding.vocabulary)
                    digest.update(block)
                    file.write(block)
                    done += len(block)
                    copied(done, total)
                file.seek(offsets[split, "documents"])
                file.writelines(_blocks(raw[split]["documents"].path))
        with h5py.File(path, "r+", libver=LIBRARY_VERSIONS, locking=False) as made:
            for split in SPLITS:
                made[f"{split}/counts"][:] = counts[split]
            made.attrs["format"] = np.bytes_(FORMAT)
            made.attrs["version"] = np.int64(VERSION)
            made.attrs["vocabulary"] = np.int64(encoding.vocabulary)
            made.attrs["end_of_document"] = np.int64(encoding.end_of_document)
            for name, value in sorted(facts.items() | {"fingerprint": digest.hexdigest()}.items()):
                made.attrs[name] = np.bytes_(value) if isinstance(value, str) else np.array(value, _STORED_AS[type(value)])


def _allocate(path: Path, vocabulary: int, raw: dict[str, dict[str, RawFile]]) -> dict[tuple[str, str], int]:
    """An HDF5 file with every dataset in place, unwritten; (split, dataset) -> where it begins."""
    import h5py

    creation = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    creation.set_layout(h5py.h5d.CONTIGUOUS)
    creation.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    creation.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    creation.set_obj_track_times(False)
    offsets = {}
    with h5py.File(path, "w", libver=LIBRARY_VERSIONS, locking=False, alignment_threshold=_PAGE, alignment_interval=_PAGE) as file:
        for split in SPLITS:
            group = file.create_group(split)
            datasets = {name: (content.length, content.dtype) for name, content in raw[split].items()}
            for name, (length, dtype) in (datasets | {"counts": (vocabulary, np.dtype("<i8"))}).items():
                kind, space = h5py.h5t.py_create(dtype, logical=True), h5py.h5s.create_simple((length,))
                dataset = h5py.h5d.create(group.id, name.encode(), kind, space, dcpl=creation)
                offsets[split, name] = dataset.get_offset() or 0
    return offsets


def _blocks(path: Path) -> Iterator[bytes]:
    with open(path, "rb") as file:
        while block := file.read(_CHUNK):
            yield block
