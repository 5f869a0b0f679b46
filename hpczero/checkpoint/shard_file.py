"""Shard files: the data of some ranks, as HDF5 that is made once and then filled by raw writes (docs/checkpoint-format.md).

    /rank-00003/model, /rank-00003/optimizer/moment1, …   float32, contiguous, at multiples of 4096 bytes and as long, padded with zeros
    /rank-00003/checksums                                 uint64 [slots, blocks]: xxh3 of each block of a mebibyte

`make` writes the structure, closes the file and says where each dataset lies; whoever has the data writes it there (`Writer`), then the
checksums. `rest` is a checksum of every byte that is not data: the structure, and the checksums.
"""

import contextlib
import errno
import mmap
import os
import stat
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any, Protocol

import h5py
import numpy as np
import xxhash

from hpczero.errors import HpczeroError, InputError
from hpczero.hdf5.in_memory import made_in_memory, write_all
from hpczero.safe_files import open_for_writing

# How far long work is: a bar on a terminal, nothing elsewhere.
Advance = Callable[[int], None]  # so many more bytes are done


@contextlib.contextmanager
def bar(doing: str, total: int, shown: bool = True) -> Iterator[Advance]:
    """On standard error, so that what a verb prints can be piped on."""
    if not shown or not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        yield partial(progress.advance, progress.add_task(doing, total=total))


# Files of checkpoints: a stranger may have made them; only plain ones of the folder are read.
_MISSING = {errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO}


class Damaged(HpczeroError):
    """A checkpoint that is not what was written: bytes differ, or are missing."""


class Unreadable(InputError):
    """A checkpoint that may be whole, and that this process cannot read now: no permission, a disk's error, too many open files."""


class Newer(Unreadable):
    """A checkpoint of a format that this version does not know."""


def not_read(path: Path, error: OSError, more: str = "") -> HpczeroError:
    """What it says of a checkpoint that this happened while it was read."""
    text = f"{path}: {error.strerror or error}{more}"
    return (
        Damaged(text)
        if error.errno in _MISSING
        else Unreadable(f"{text}: it cannot be told whether this checkpoint is damaged")
    )


def open_plain(path: Path) -> int:
    """A descriptor to read from. Damaged: the file is missing, or is a link, a pipe, a device or a folder; Unreadable: it cannot be opened."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise (
            Damaged(f"{path}: it is a link")
            if error.errno == errno.ELOOP
            else not_read(path, error)
        ) from error
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise Damaged(f"{path}: it is no plain file")
    return file


SLOTS = ("model", "optimizer/moment1", "optimizer/moment2")
BLOCK = 1 << 20  # bytes that have a checksum of their own
PAGE = 4096  # bytes: what direct writing needs of addresses, offsets and lengths
CHUNK = 8 << 20  # bytes that are written at a time
CHUNKS = 3  # in memory: one is made, one waits, so that the disk does not, and one is written
WIDTH = 4  # bytes of an element

Array = np.ndarray[Any, Any]


class DataSource(Protocol):
    """What elements are taken from, in order: an array, or what makes one of a part of itself."""

    def __len__(self) -> int: ...

    def __getitem__(self, part: slice, /) -> Any: ...


Range = tuple[int, int]  # begin and end, in bytes of the file


@dataclass(frozen=True)
class Extent:
    """Where a rank's data lies in its shard file."""

    rank: int
    elements: int  # without the padding
    data: tuple[int, ...]  # for each slot the byte where it begins
    checksums: int

    @property
    def length(self) -> int:
        """Bytes of a slot, with the padding."""
        return padded(self.elements * WIDTH)

    @property
    def blocks(self) -> int:
        return -(-self.length // BLOCK)

    def ranges(self) -> list[Range]:
        return [(begin, begin + self.length) for begin in self.data] if self.length else []


def padded(size: int) -> int:
    return -(-size // PAGE) * PAGE


def make(path: Path, elements: Mapping[int, int]) -> list[Extent]:
    """A new file with room for so many elements of each rank. Its content is not on the disk yet."""
    with made_in_memory(path, alignment_threshold=PAGE, alignment_interval=PAGE) as file:
        made = {}
        for rank, count in elements.items():
            group = file.create_group(f"rank-{rank:05d}")
            length = padded(count * WIDTH)
            data = [_early(group, slot, (length // WIDTH,), np.dtype("<f4")) for slot in SLOTS]
            made[rank] = (
                data,
                _early(group, "checksums", (len(SLOTS), -(-length // BLOCK)), np.dtype("<u8")),
            )
        file.flush()
        return [
            Extent(rank, elements[rank], tuple(map(_offset, data)), _offset(checksums))
            for rank, (data, checksums) in made.items()
        ]


def _early(
    group: h5py.Group, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]
) -> h5py.h5d.DatasetID:
    """A contiguous dataset whose place in the file is known from now on, and in which nothing is written."""
    parts = name.split("/")
    for part in parts[:-1]:
        group = group.require_group(part)
    properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    properties.set_layout(h5py.h5d.CONTIGUOUS)
    properties.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    properties.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    return h5py.h5d.create(
        group.id,
        parts[-1].encode(),
        h5py.h5t.py_create(dtype),
        h5py.h5s.create_simple(shape),
        properties,
    )


def _offset(dataset: h5py.h5d.DatasetID) -> int:
    """An empty dataset has no place."""
    return int(dataset.get_offset() or 0)


class Writer:
    """Writes a rank's data into its extent, a slot after the other, each from its beginning to its end."""

    def __init__(
        self,
        path: Path,
        extent: Extent,
        direct: bool,
        rest: float = 0.0,
        pause: Callable[[float], object] = time.sleep,
    ) -> None:
        """`direct`: past the page cache, where the file system allows it. `rest`: others need the processor and the disk too; how long to pause
        after each chunk, in times of what that took.
        """
        self.path, self.extent, self.rest, self._pause = path, extent, rest, pause
        self.checksums = np.zeros((len(SLOTS), extent.blocks), np.uint64)
        self._direct = _open_direct(path) if direct else None
        self._file = open_for_writing(path)
        self._disk, self._waiting = ThreadPoolExecutor(1), deque[Future[None]]()

    def write(self, slot: int, chunks: Iterable[Array]) -> None:
        """`chunks`: float32, together the slot with its padding. Each begins at a multiple of PAGE in memory and, but for the last one, is of a
        multiple of BLOCK bytes; it stays what it is until CHUNKS more were asked for, in the next slot too (`empty_chunks`): when this returns some
        are still to be written; `finish` waits for them.
        """
        place, block = self.extent.data[slot], 0
        for chunk in chunks:
            begun = time.monotonic()
            data = memoryview(chunk.data).cast("B")
            for start in range(0, len(data), BLOCK):
                self.checksums[slot, block] = xxhash.xxh3_64_intdigest(data[start : start + BLOCK])
                block += 1
            self._waiting.append(self._disk.submit(self._write_at, data, place))
            place += len(data)
            self._wait(0 if self.rest else CHUNKS - 1)
            if self.rest:  # counts from when the chunk is written
                self._pause(self.rest * (time.monotonic() - begun))
        assert place == self.extent.data[slot] + self.extent.length, (
            f"{self.path}: {place} is not the end of slot {SLOTS[slot]}"
        )

    def _wait(self, left: int) -> None:
        """Until no more chunks than these are to be written."""
        while len(self._waiting) > left:
            self._waiting.popleft().result()

    def finish(self) -> None:
        """All is on the disk, the checksums too."""
        self._wait(0)
        if self.checksums.size:
            write_all(self._file, self.checksums.data.cast("B"), self.extent.checksums)
        os.fsync(self._file)

    def close(self) -> None:
        self._disk.shutdown(cancel_futures=True)
        for file in (self._direct, self._file):
            if file is not None:
                os.close(file)
        self._direct = None

    def _write_at(self, data: memoryview, place: int) -> None:
        if self._direct is not None:
            try:
                write_all(self._direct, data, place)
                return
            except OSError as error:
                if error.errno != 22:  # EINVAL: not this way, here
                    raise
                os.close(self._direct)
                self._direct = None
        write_all(self._file, data, place)


def _open_direct(path: Path) -> int | None:
    with contextlib.suppress(OSError):
        return open_for_writing(path, os.O_WRONLY | os.O_DIRECT)
    return None


def aligned(size: int) -> Array:
    """So many bytes of new memory that begins at a page."""
    return np.frombuffer(mmap.mmap(-1, max(size, 1)), np.uint8, size)


def empty_chunks(size: int = CHUNK) -> Iterator[Array]:
    """CHUNKS new buffers of so many bytes in turn, without end. All slots of a `Writer` go through the same ones."""
    assert size % BLOCK == 0
    return cycle([aligned(size).view(np.float32) for _ in range(CHUNKS)])


def bounce(sources: Iterable[DataSource], empty: Iterator[Array]) -> Iterator[Array]:
    """The elements of the sources, one after the other, in chunks that `Writer` can write."""
    chunk, filled = np.empty(0, np.float32), 0
    for source in sources:
        begin = 0
        while begin < len(source):
            if (
                not filled
            ):  # not before it is needed: one that is left out brings the others back too early
                chunk = next(empty)
            count = min(len(source) - begin, len(chunk) - filled)
            chunk[filled : filled + count] = source[begin : begin + count]
            begin, filled = begin + count, filled + count
            if filled == len(chunk):
                yield chunk
                filled = 0
    if filled:
        end = padded(filled * WIDTH) // WIDTH
        chunk[filled:end] = 0
        yield chunk[:end]


def rest(file: int, size: int, data: Iterable[Range]) -> str:
    """The checksum of all bytes but these ranges, in the order of the file."""
    hasher, place = xxhash.xxh3_64(), 0
    for begin, end in [*sorted(data), (size, size)]:
        while place < begin:
            read = os.pread(file, min(CHUNK, begin - place), place)
            if not read:
                raise OSError(5, "it is shorter than it was")
            hasher.update(read)
            place += len(read)
        place = max(place, end)
    return hasher.hexdigest()
