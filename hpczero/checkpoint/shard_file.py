"""Shard files: the data of some ranks, as HDF5 that is made once and then filled by plain writes.

    /rank-00003/model, /rank-00003/optimizer/moment1, …   float32, contiguous, at multiples of 4096
                                                          bytes and as long, padded with zeros
    /rank-00003/checksums                                 uint64 [slots, blocks]: xxh3 of each block
                                                          of a mebibyte

`make_file` writes the structure, closes the file and returns where each dataset lies. Whoever has
the data writes it there (`Writer`), then the checksums. `structure_checksum` is of every byte that
is not data: the structure, and the checksums. (docs/checkpoint-format.md)

The errors of reading a checkpoint are here too, and the progress bar of long work on one.
"""

import contextlib
import errno
import mmap
import os
import stat
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any, Protocol

import h5py
import numpy as np
import xxhash

from hpczero.errors import HpczeroError, InputError
from hpczero.hdf5.image import hdf5_image, write_all
from hpczero.safe_files import open_for_writing

SLOTS = ("model", "optimizer/moment1", "optimizer/moment2")  # of AdamW; the first is any one's
BLOCK = 1 << 20  # bytes that have a checksum of their own
PAGE = 4096  # bytes: addresses, offsets and lengths of direct writes are multiples of it
CHUNK = 8 << 20  # bytes that are written at a time
CHUNKS = 3  # in memory: one is filled, one waits, so that the disk does not, and one is written
WIDTH = 4  # bytes of an element
_MISSING = {errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO}

Array = np.ndarray[Any, Any]
Range = tuple[int, int]  # begin and end, in bytes of the file


# -- where data lies, and making the file --------------------------------------------------------


@dataclass(frozen=True)
class Extent:
    """The place of a rank's data in its shard file."""

    rank: int
    elements: int  # without the padding
    data: tuple[int, ...]  # for each slot the byte where it begins
    checksums: int  # the byte where they begin

    @property
    def length(self) -> int:
        """Bytes of a slot, with the padding."""
        return padded(self.elements * WIDTH)

    @property
    def blocks(self) -> int:
        return -(-self.length // BLOCK)

    @property
    def checksums_length(self) -> int:
        """Bytes of the checksums of all slots."""
        return 8 * len(self.data) * self.blocks

    def ranges(self) -> list[Range]:
        """Return where the slots lie."""
        return [(begin, begin + self.length) for begin in self.data] if self.length else []


def padded(size: int) -> int:
    return -(-size // PAGE) * PAGE


def group_of(rank: int) -> str:
    """Return the name of the group that a rank's datasets are in."""
    return f"rank-{rank:05d}"


def make_file(
    path: Path, elements: Mapping[int, int], slots: Sequence[str] = SLOTS
) -> list[Extent]:
    """Make a file with room for so many elements of each rank; it is not on the disk yet."""
    made = []
    with hdf5_image(path, alignment_threshold=PAGE, alignment_interval=PAGE) as file:
        for rank, count in elements.items():
            group = file.create_group(group_of(rank))
            extent = Extent(rank, count, (), 0)
            slot_shape = (extent.length // WIDTH,)
            data = [_allocated(group, slot, slot_shape, "<f4") for slot in slots]
            checksums = _allocated(group, "checksums", (len(slots), extent.blocks), "<u8")
            made.append((extent, data, checksums))
        file.flush()
        return [
            replace(extent, data=tuple(map(_offset, data)), checksums=_offset(checksums))
            for extent, data, checksums in made
        ]


def _allocated(
    group: h5py.Group, name: str, shape: tuple[int, ...], dtype: str
) -> h5py.h5d.DatasetID:
    """Make a contiguous dataset that has its place in the file from now on, and no values."""
    *outer, last = name.split("/")
    for part in outer:
        group = group.require_group(part)
    properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    properties.set_layout(h5py.h5d.CONTIGUOUS)
    properties.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    properties.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    kind = h5py.h5t.py_create(np.dtype(dtype))
    return h5py.h5d.create(group.id, last.encode(), kind, h5py.h5s.create_simple(shape), properties)


def _offset(dataset: h5py.h5d.DatasetID) -> int:
    """Return where a dataset lies; an empty one lies nowhere."""
    return int(dataset.get_offset() or 0)


# -- writing the data ----------------------------------------------------------------------------


class DataSource(Protocol):
    """Elements in order: an array, or what makes an array of a part of itself."""

    def __len__(self) -> int: ...

    def __getitem__(self, part: slice, /) -> Any: ...


def write_data(
    path: Path,
    extent: Extent,
    slots: Iterable[Iterable[Array]],
    pause_factor: float = 0.0,
    pause: Callable[[float], object] = time.sleep,
) -> None:
    """Write a rank's data, its chunks slot after slot, and the checksums, to the disk."""
    writer = Writer(path, extent, True, pause_factor, pause)
    try:
        for slot, chunks in enumerate(slots):
            writer.write(slot, chunks)
        writer.finish()
    finally:
        writer.close()


class Writer:
    """Writes a rank's data into its extent, slot after slot, each from its beginning to its end."""

    def __init__(
        self,
        path: Path,
        extent: Extent,
        direct: bool,
        pause_factor: float = 0.0,
        pause: Callable[[float], object] = time.sleep,
    ) -> None:
        """`direct`: write past the page cache, where the file system allows it.

        `pause_factor`: how long to pause after each chunk, in times of what that took, as others
        need the processor and the disk too.
        """
        self.path = path
        self.extent = extent
        self._pause_factor = pause_factor
        self._pause = pause
        self.checksums = np.zeros((len(extent.data), extent.blocks), np.uint64)
        self._direct = _open_direct(path) if direct else None
        self._file = open_for_writing(path)
        self._disk = ThreadPoolExecutor(1)
        self._waiting = deque[Future[None]]()

    def write(self, slot: int, chunks: Iterable[Array]) -> None:
        """Write float32 chunks, together the slot with its padding.

        Each chunk begins at a multiple of PAGE in memory and, but for the last one, has a multiple
        of BLOCK bytes. It must not change until CHUNKS more were asked for, in the next slot too
        (`empty_chunks`): some are still to be written when this returns. `finish` waits for them.
        """
        offset = self.extent.data[slot]
        block = 0
        for chunk in chunks:
            begun = time.monotonic()
            data = memoryview(chunk.data).cast("B")
            for start in range(0, len(data), BLOCK):
                self.checksums[slot, block] = xxhash.xxh3_64_intdigest(data[start : start + BLOCK])
                block += 1
            self._waiting.append(self._disk.submit(self._write_at, data, offset))
            offset += len(data)
            self._wait(0 if self._pause_factor else CHUNKS - 1)
            if self._pause_factor:  # the time includes that of the disk
                self._pause(self._pause_factor * (time.monotonic() - begun))
        assert offset == self.extent.data[slot] + self.extent.length, (
            f"{self.path}: {offset} is not the end of slot {slot}"
        )

    def _wait(self, left: int) -> None:
        """Wait until no more than so many chunks are still to be written."""
        while len(self._waiting) > left:
            self._waiting.popleft().result()

    def finish(self) -> None:
        """Bring everything to the disk, the checksums too."""
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

    def _write_at(self, data: memoryview, offset: int) -> None:
        if self._direct is not None:
            try:
                write_all(self._direct, data, offset)
                return
            except OSError as error:
                if error.errno != errno.EINVAL:  # this file system cannot write past the cache
                    raise
                os.close(self._direct)
                self._direct = None
        write_all(self._file, data, offset)


def _open_direct(path: Path) -> int | None:
    with contextlib.suppress(OSError):
        return open_for_writing(path, os.O_WRONLY | os.O_DIRECT)
    return None


def aligned(size: int) -> Array:
    """Return so many bytes of new memory that begins at a page."""
    return np.frombuffer(mmap.mmap(-1, max(size, 1)), np.uint8, size)


def empty_chunks(size: int = CHUNK) -> Iterator[Array]:
    """Yield CHUNKS new buffers of so many bytes in turn, without end.

    All slots of a `Writer` go through the same ones.
    """
    assert size % BLOCK == 0
    return cycle([aligned(size).view(np.float32) for _ in range(CHUNKS)])


def in_chunks(sources: Iterable[DataSource], empty: Iterator[Array]) -> Iterator[Array]:
    """Yield the elements of the sources, one after the other, in chunks for a `Writer`."""
    chunk = np.empty(0, np.float32)
    filled = 0
    for source in sources:
        begin = 0
        while begin < len(source):
            if not filled:  # not earlier: a buffer that is skipped brings the others back too early
                chunk = next(empty)
            count = min(len(source) - begin, len(chunk) - filled)
            chunk[filled : filled + count] = source[begin : begin + count]
            begin += count
            filled += count
            if filled == len(chunk):
                yield chunk
                filled = 0
    if filled:
        end = padded(filled * WIDTH) // WIDTH
        chunk[filled:end] = 0
        yield chunk[:end]


def structure_checksum(file: int, size: int, data: Iterable[Range]) -> str:
    """Return the checksum of all bytes but these ranges, in the order of the file."""
    hasher = xxhash.xxh3_64()
    offset = 0
    for begin, end in [*sorted(data), (size, size)]:
        while offset < begin:
            piece = os.pread(file, min(CHUNK, begin - offset), offset)
            if not piece:
                raise OSError(errno.EIO, "it is shorter than it was")
            hasher.update(piece)
            offset += len(piece)
        offset = max(offset, end)
    return hasher.hexdigest()


def sealed(path: Path, data: Iterable[Range] = ()) -> tuple[int, str]:
    """Bring a file to the disk; return its size and the checksum of all bytes but these ranges."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
        size = os.fstat(file).st_size
        return size, structure_checksum(file, size, data)
    finally:
        os.close(file)


# -- reading files that a stranger may have made ---------------------------------------------------


class Damaged(HpczeroError):
    """A checkpoint that is not what was written: bytes differ, or are missing."""


class Unreadable(InputError):
    """A checkpoint that may be good, and that this process cannot read now.

    It lacks the permission, a disk reports an error, or too many files are open.
    """


class Newer(Unreadable):
    """A checkpoint of a format that this version does not know."""


def not_read(path: Path, error: OSError, more: str = "") -> HpczeroError:
    """Return the error to raise for one that occurred while a checkpoint was read."""
    text = f"{path}: {error.strerror or error}{more}"
    if error.errno in _MISSING:
        return Damaged(text)
    return Unreadable(f"{text}: it cannot be told whether this checkpoint is damaged")


def open_plain(path: Path) -> int:
    """Return a descriptor to read from.

    Damaged: the file is missing, or is a link, a pipe, a device or a folder. Unreadable: it cannot
    be opened.
    """
    try:
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        is_link = error.errno == errno.ELOOP
        raise Damaged(f"{path}: it is a link") if is_link else not_read(path, error) from error
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise Damaged(f"{path}: it is no plain file")
    return file


@contextlib.contextmanager
def reading(path: Path, file: int) -> Iterator[int]:
    """Close the file after reading; an OSError inside is raised as `not_read` has it."""
    try:
        yield file
    except OSError as error:
        raise not_read(path, error) from error
    finally:
        os.close(file)


# -- progress of long work: a bar on a terminal, nothing elsewhere -------------------------------

Advance = Callable[[int], None]  # so many more bytes are done


@contextlib.contextmanager
def bar(doing: str, total: int, shown: bool = True) -> Iterator[Advance]:
    """Show a bar on standard error, so that what a verb prints can be piped on."""
    if not shown or not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich import progress
    from rich.console import Console

    columns = (
        progress.TextColumn("{task.description}", markup=False),
        progress.BarColumn(),
        progress.DownloadColumn(),
        progress.TransferSpeedColumn(),
        progress.TimeRemainingColumn(),
    )
    with progress.Progress(*columns, console=Console(stderr=True), transient=True) as shown_bar:
        yield partial(shown_bar.advance, shown_bar.add_task(doing, total=total))
