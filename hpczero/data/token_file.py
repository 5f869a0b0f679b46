"""The token file: one HDF5 file that holds a corpus as tokens (docs/data.md describes it for other readers).

A file may come from anywhere, so `open_token_file` believes nothing in it: types, shapes, places and sizes are checked, and
nothing outside the file is ever read (no links, no external or virtual storage), nor by the HDF5
library, which a crafted file can crash. Tokens are memory-mapped where they lie.
"""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from hpczero import safe_files
from hpczero.data.corpus import Tokenizer, token_dtype
from hpczero.data.raw_files import BLOCK, Blocks, RawFile, blocks_of, checksum, writing
from hpczero.errors import InputError
from hpczero.hdf5.datatypes import NotPlain
from hpczero.hdf5.reader import Dataset, PlainFile
from hpczero.text import printable

if TYPE_CHECKING:
    import h5py

FORMAT = "hpczero-tokens"
VERSION = 1
SPLITS = ("train", "validation")
LIBRARY_VERSIONS = ("earliest", "v110")  # what distributions' own HDF5 tools read
CHECKSUMS = "checksums"  # of the blocks of a split's tokens; files of older versions have none
_LARGEST_VOCABULARY = 2**32
_LONGEST_TEXT = 100  # characters of an attribute
_CHUNK = 2**22  # bytes: so many blocks
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
    ends: np.ndarray  # [documents + 1], memory-mapped: where each document begins, and the end
    largest: int  # the largest id that occurs; -1 where none does
    checksums: np.ndarray | None  # of the blocks of the tokens (`blocks`)

    @property
    def documents(self) -> int:
        return len(self.ends) - 1

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

    @property
    def has_checksums(self) -> bool:
        """Return False for a file of an older version: only its fingerprint tells what is in it."""
        return all(split.checksums is not None for split in self.splits.values())

    def blocks(self) -> dict[str, Blocks]:
        """The tokens of each split, read with a look at their checksums."""
        held = self.splits.items()
        return {name: Blocks(self.path, name, one.tokens, one.checksums) for name, one in held}

    def damages(self) -> Iterator[str]:
        """Yield what in the file is not as it was written; all of it is read."""
        digest = xxhash.xxh3_128()
        for name, blocks in self.blocks().items():
            split, counts = self.splits[name], np.zeros(self.vocabulary, np.int64)
            for some in blocks.damaged(_CHUNK // BLOCK):
                yield from some.damaged
                digest.update(some.content)
                tokens = np.frombuffer(some.content, split.tokens.dtype)
                counts += np.bincount(tokens[tokens < self.vocabulary], minlength=self.vocabulary)
            if not np.array_equal(counts, split.counts):
                yield f"/{name}/counts are not those of its tokens"
            if not self._ends_fit(split):
                yield f"/{name}/documents do not end with token {self.end_of_document}"
            blocks.close()
        if digest.hexdigest() != self.fingerprint:
            found = digest.hexdigest()
            yield f"the tokens have the fingerprint {found}, and {self.fingerprint} was written"

    def _ends_fit(self, split: Split) -> bool:
        """Return True if each document has its end, and nothing else that means one."""
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


def open_token_file(path: Path) -> TokenFile:
    """The file's facts, its tokens mapped; InputError if it is missing, foreign, newer, truncated or damaged."""
    descriptor = _opened(path)
    try:
        return _read(path, descriptor)
    except NotPlain as error:
        size = os.fstat(descriptor).st_size
        if os.pread(descriptor, 4, 0) != b"\x89HDF":
            raise InputError(
                f"{path} is not a token file (not HDF5, {size} bytes): make one with `hpczero data build -o NAME.h5 TEXT...`"
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
    """Open a plain file, or a link to one: a pipe would be waited for."""
    try:
        return safe_files.open_to_read(path)
    except OSError as error:
        raise InputError(f"token file {path} cannot be read: {error.strerror}") from error


def _read(path: Path, descriptor: int) -> TokenFile:
    file = PlainFile(descriptor)
    kind, version = (
        _attribute(file, name, kind) for name, kind in (("format", str), ("version", int))
    )
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
        raise NotPlain(f"attribute {', '.join(missing)} is missing or of another type")
    if not 0 < facts["vocabulary"] <= _LARGEST_VOCABULARY:
        raise NotPlain(f"a vocabulary of {facts['vocabulary']} ids")
    if not 0 <= facts["end_of_document"] < facts["vocabulary"]:
        raise NotPlain(f"documents that end with token {facts['end_of_document']}")
    if long := next(
        (
            name
            for name in ("tokenizer", "inputs", "fingerprint")
            if len(facts[name]) > _LONGEST_TEXT
        ),
        "",
    ):
        raise NotPlain(f"attribute {long} has more than {_LONGEST_TEXT} characters")
    splits = {name: _read_split(file, descriptor, name, facts["vocabulary"]) for name in SPLITS}
    return TokenFile(path=path, splits=splits, **facts)


def _attribute(file: PlainFile, name: str, kind: type) -> Any:
    """The attribute's value, or None if it is missing, not a single one, or not of that kind."""
    value = file.attributes.get(name)
    if isinstance(value, str):
        value = printable(value)
    return value if type(value) is kind else None


def _read_split(file: PlainFile, descriptor: int, split: str, vocabulary: int) -> Split:
    tokens = _mapped(descriptor, _dataset(file, split, "tokens", token_dtype(vocabulary)))
    documents = _mapped(descriptor, _dataset(file, split, "documents", np.dtype("<i8")))
    counts = _dataset(file, split, "counts", np.dtype("<i8"))
    if len(documents) == 0 or documents[0] != 0 or documents[-1] != len(tokens):
        raise NotPlain(f"/{split}/documents does not run from 0 to the {len(tokens)} tokens")
    of_ids = file.values(counts) if counts.size == vocabulary else np.full(1, -1)
    if (of_ids < 0).any() or _sum(of_ids) != len(tokens):
        raise NotPlain(
            f"/{split}/counts does not add up to the {len(tokens)} tokens over {vocabulary} ids"
        )
    checksums = None
    if CHECKSUMS in file.names(split):
        found = _dataset(file, split, CHECKSUMS, np.dtype("<u8"))
        if found.size != blocks_of(tokens.nbytes):
            raise NotPlain(f"/{split}/{CHECKSUMS} are not those of {tokens.nbytes} bytes")
        checksums = file.values(found)
    largest = int(np.flatnonzero(of_ids)[-1]) if len(tokens) else -1
    return Split(tokens, of_ids, documents, largest, checksums)


def _sum(counts: np.ndarray) -> int:
    """Exact, whatever a file says."""
    high, low = (counts >> 32).sum(dtype=np.int64), (counts & 0xFFFFFFFF).sum(dtype=np.uint64)
    return (int(high) << 32) + int(low)


def _dataset(file: PlainFile, split: str, name: str, dtype: np.dtype) -> Dataset:
    found = file.dataset(f"{split}/{name}")
    if len(found.shape) != 1 or found.dtype != dtype:
        shape = f"shape ({', '.join(map(str, found.shape[:8]))})"
        raise NotPlain(
            f"/{split}/{name} has type {found.dtype} and {shape}, not {dtype} and one dimension"
        )
    return found


def _mapped(descriptor: int, dataset: Dataset) -> np.ndarray:
    """The values where they lie in the file, read-only."""
    if not dataset.size:
        return np.empty(0, dataset.dtype)
    with os.fdopen(os.dup(descriptor), "rb") as file:
        return np.memmap(file, dataset.dtype, "r", dataset.place, dataset.shape)


def write_token_file(
    path: Path,
    encoding: Tokenizer,
    facts: dict[str, Any],
    raw: dict[str, dict[str, RawFile]],
    copied: Callable[[int, int], None],
) -> None:
    """Makes a token file of the raw files. `copied` is told how many bytes of how many are there."""
    with writing(path):
        safe_files.remove(path)  # a builder may have been killed
        made = safe_files.create(path)
    try:
        fill_token_file(path, made, encoding, facts, raw, copied)
    finally:
        os.close(made)


def fill_token_file(
    path: Path,
    made: int,
    encoding: Tokenizer,
    facts: dict[str, Any],
    raw: dict[str, dict[str, RawFile]],
    copied: Callable[[int, int], None],
) -> None:
    """Makes a token file of the raw files in an empty file that is open, the one at `path`.

    HDF5 makes the structure in memory: on a disk that fills up it may end the process. The values
    are written to where they belong by plain writes, counted and hashed on the way. The same
    values give the same bytes.
    """
    import h5py

    from hpczero.hdf5.in_memory import Pages

    pages, digest = Pages(), xxhash.xxh3_128()
    total, done = (
        sum(files["tokens"].length * files["tokens"].dtype.itemsize for files in raw.values()),
        0,
    )
    written: list[tuple[int, int]] = []  # ranges of bytes that have values
    with h5py.File(
        pages, "w", libver=LIBRARY_VERSIONS, alignment_threshold=_PAGE, alignment_interval=_PAGE
    ) as structure:
        places = _allocate(structure, encoding.vocabulary, raw)
        for split in SPLITS:
            dtype, place = raw[split]["tokens"].dtype, places[split, "tokens"]
            counts, checksums = np.zeros(encoding.vocabulary, np.int64), list[int]()
            for block in _blocks(raw[split]["tokens"].path):
                counts += np.bincount(np.frombuffer(block, dtype), minlength=encoding.vocabulary)
                digest.update(block)
                checksums += [
                    checksum(block[at : at + BLOCK]) for at in range(0, len(block), BLOCK)
                ]
                place = _write(path, made, block, place)
                done += len(block)
                copied(done, total)
            written.append((places[split, "tokens"], place))
            place = places[split, "documents"]
            for block in _blocks(raw[split]["documents"].path):
                place = _write(path, made, block, place)
            written.append((places[split, "documents"], place))
            structure[f"{split}/counts"][:] = counts
            structure[f"{split}/{CHECKSUMS}"][:] = np.array(checksums, "<u8")
        _describe(structure, encoding, facts | {"fingerprint": digest.hexdigest()})
    with writing(path):
        pages.write_to(made, but=written)


def _write(path: Path, file: int, block: bytes, place: int) -> int:
    """Write a block; return where the next one goes."""
    end = place + len(block)
    with writing(path):
        while block:
            count = os.pwrite(file, block, place)
            block, place = block[count:], place + count
    return end


def _describe(structure: "h5py.File", encoding: Tokenizer, facts: dict[str, Any]) -> None:
    structure.attrs["format"] = np.bytes_(FORMAT)
    structure.attrs["version"] = np.int64(VERSION)
    structure.attrs["vocabulary"] = np.int64(encoding.vocabulary)
    structure.attrs["end_of_document"] = np.int64(encoding.end_of_document)
    for name, value in sorted(facts.items()):
        structure.attrs[name] = (
            np.bytes_(value) if isinstance(value, str) else np.array(value, _STORED_AS[type(value)])
        )


def _allocate(
    structure: "h5py.File", vocabulary: int, raw: dict[str, dict[str, RawFile]]
) -> dict[tuple[str, str], int]:
    """Every dataset gets its place, unwritten; (split, dataset) -> where it begins."""
    import h5py

    creation = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    creation.set_layout(h5py.h5d.CONTIGUOUS)
    creation.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    creation.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    creation.set_obj_track_times(False)
    offsets = {}
    for split in SPLITS:
        group = structure.create_group(split)
        datasets = {name: (content.length, content.dtype) for name, content in raw[split].items()}
        tokens = raw[split]["tokens"]
        datasets["counts"] = vocabulary, np.dtype("<i8")
        datasets[CHECKSUMS] = blocks_of(tokens.length * tokens.dtype.itemsize), np.dtype("<u8")
        for name, (length, dtype) in datasets.items():
            kind, space = h5py.h5t.py_create(dtype, logical=True), h5py.h5s.create_simple((length,))
            dataset = h5py.h5d.create(group.id, name.encode(), kind, space, dcpl=creation)
            offsets[split, name] = dataset.get_offset() or 0
    return offsets


def _blocks(path: Path) -> Iterator[bytes]:
    with open(path, "rb") as file:
        while block := file.read(_CHUNK):
            yield block
