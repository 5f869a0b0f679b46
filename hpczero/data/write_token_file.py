"""Writing a token file from raw files of tokens: the same values give the same bytes."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from hpczero import safe_files
from hpczero.data.raw_files import BLOCK, RawFile, blocks_of, checksum, writing
from hpczero.data.token_file import CHECKSUMS, CHUNK, FORMAT, SPLITS, TOKENIZER, VERSION
from hpczero.data.tokenizer import Tokenizer

if TYPE_CHECKING:
    import h5py

LIBRARY_VERSIONS = ("earliest", "v110")  # readable by the HDF5 tools of Linux distributions
_PAGE = 4096
_STORED_AS = {int: "<i8", float: "<f8"}


def write_token_file(
    path: Path,
    encoding: Tokenizer,
    facts: dict[str, Any],
    raw: dict[str, dict[str, RawFile]],
    copied: Callable[[int, int], None],
) -> None:
    """Make a token file of the raw files. `copied` receives the bytes done and the total."""
    with writing(path):
        safe_files.remove(path)  # a builder may have been killed
        descriptor = safe_files.create(path)
    try:
        fill_token_file(path, descriptor, encoding, facts, raw, copied)
    finally:
        os.close(descriptor)


def fill_token_file(
    path: Path,
    descriptor: int,
    encoding: Tokenizer,
    facts: dict[str, Any],
    raw: dict[str, dict[str, RawFile]],
    copied: Callable[[int, int], None],
) -> None:
    """Make a token file of the raw files in an open, empty file; `path` is for messages.

    HDF5 makes the structure in memory: on a disk that fills up it may end the process. Plain writes
    put the values at the offsets that it allocated, counted and hashed on the way. The same values
    give the same bytes.
    """
    import h5py

    from hpczero.hdf5.image import ImagePages

    pages = ImagePages()
    digest = xxhash.xxh3_128()
    total = sum(files["tokens"].length * files["tokens"].dtype.itemsize for files in raw.values())
    done = 0
    written: list[tuple[int, int]] = []  # ranges of bytes that have values
    with h5py.File(
        pages, "w", libver=LIBRARY_VERSIONS, alignment_threshold=_PAGE, alignment_interval=_PAGE
    ) as structure:
        offsets = _allocate(structure, encoding, raw)
        for split in SPLITS:
            dtype = raw[split]["tokens"].dtype
            offset = offsets[split, "tokens"]
            counts = np.zeros(encoding.vocabulary, np.int64)
            checksums = list[int]()
            for chunk in _chunks(raw[split]["tokens"].path):
                counts += np.bincount(np.frombuffer(chunk, dtype), minlength=encoding.vocabulary)
                digest.update(chunk)
                blocks = (chunk[at : at + BLOCK] for at in range(0, len(chunk), BLOCK))
                checksums += map(checksum, blocks)
                offset = _write(path, descriptor, chunk, offset)
                done += len(chunk)
                copied(done, total)
            written.append((offsets[split, "tokens"], offset))
            offset = offsets[split, "documents"]
            for chunk in _chunks(raw[split]["documents"].path):
                offset = _write(path, descriptor, chunk, offset)
            written.append((offsets[split, "documents"], offset))
            structure[f"{split}/counts"][:] = counts
            structure[f"{split}/{CHECKSUMS}"][:] = np.array(checksums, "<u8")
        _describe(structure, encoding, facts | {"fingerprint": digest.hexdigest()})
    with writing(path):
        pages.write_to(descriptor, but=written)


def _write(path: Path, descriptor: int, content: bytes, offset: int) -> int:
    """Write the content at the offset; return the offset after it."""
    end = offset + len(content)
    with writing(path):
        while content:
            count = os.pwrite(descriptor, content, offset)
            content = content[count:]
            offset += count
    return end


def _describe(structure: "h5py.File", encoding: Tokenizer, facts: dict[str, Any]) -> None:
    for name, content in encoding.files.items():
        structure[f"{TOKENIZER}/{name}"][:] = np.frombuffer(content, "<u1")
    structure.attrs["format"] = np.bytes_(FORMAT)
    structure.attrs["version"] = np.int64(VERSION)
    structure.attrs["vocabulary"] = np.int64(encoding.vocabulary)
    structure.attrs["end_of_document"] = np.int64(encoding.end_of_document)
    for name, value in sorted(facts.items()):
        structure.attrs[name] = (
            np.bytes_(value) if isinstance(value, str) else np.array(value, _STORED_AS[type(value)])
        )


def _allocate(
    structure: "h5py.File", encoding: Tokenizer, raw: dict[str, dict[str, RawFile]]
) -> dict[tuple[str, str], int]:
    """Allocate every dataset without writing it; return (split, dataset) -> offset in the file."""
    import h5py

    creation = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    creation.set_layout(h5py.h5d.CONTIGUOUS)
    creation.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    creation.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    creation.set_obj_track_times(False)
    offsets = {}

    def allocate(group: "h5py.Group", name: str, length: int, dtype: np.dtype) -> int:
        kind = h5py.h5t.py_create(dtype, logical=True)
        space = h5py.h5s.create_simple((length,))
        dataset = h5py.h5d.create(group.id, name.encode(), kind, space, dcpl=creation)
        return dataset.get_offset() or 0

    for split in SPLITS:
        group = structure.create_group(split)
        datasets = {name: (content.length, content.dtype) for name, content in raw[split].items()}
        tokens = raw[split]["tokens"]
        datasets["counts"] = encoding.vocabulary, np.dtype("<i8")
        datasets[CHECKSUMS] = blocks_of(tokens.length * tokens.dtype.itemsize), np.dtype("<u8")
        for name, (length, dtype) in datasets.items():
            offsets[split, name] = allocate(group, name, length, dtype)
    for name, content in encoding.files.items():
        allocate(structure.require_group(TOKENIZER), name, len(content), np.dtype("<u1"))
    return offsets


def _chunks(path: Path) -> Iterator[bytes]:
    with open(path, "rb") as file:
        while chunk := file.read(CHUNK):
            yield chunk
