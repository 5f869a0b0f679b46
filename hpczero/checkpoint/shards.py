"""The data of a checkpoint, read back: whatever is given out has been held against its checksum."""

import contextlib
import errno
import os
from collections import OrderedDict, deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import xxhash

from hpczero.checkpoint.manifest import Content, ShardFile
from hpczero.checkpoint.shard_file import (
    BLOCK,
    SLOTS,
    WIDTH,
    Array,
    Damaged,
    Extent,
    Unreadable,
    aligned,
    not_read,
    open_plain,
    rest,
)

_AT_ONCE = 4  # blocks in a read past the page cache
_KEPT = 16  # blocks that were read last
_OPEN = 32  # files that are open at a time, twice each


class Shards:
    """Of one checkpoint. `read` gives elements of a rank's slot."""

    def __init__(self, folder: Path, content: Content) -> None:
        self.folder = folder
        self._of_rank = {
            data.rank: (shard, data.extent) for shard in content.shards for data in shard.ranks
        }
        self._files: OrderedDict[str, int] = (
            OrderedDict()
        )  # open ones, the one that was used last at the end
        self._direct: dict[int, int] = {}  # those of them that are open past the page cache, too
        self._buffers: list[Array] = []
        self._known: dict[str, tuple[int, ...]] = {}  # those that were found to be what was written
        self._is_closed = False
        self._checksums: dict[int, Array] = {}
        self._kept: OrderedDict[tuple[int, int, int], Array] = OrderedDict()
        self._ahead: ThreadPoolExecutor | None = (
            None  # reads the next blocks while some are looked at
        )

    def read(self, rank: int, slot: int, first: int, out: Array, what: str) -> None:
        """Fills `out` with as many elements of the slot. `what`: the tensor, for what is said of damage."""
        shard, extent = self._of_rank[rank]
        try:
            self.open(shard)
        except (Damaged, Unreadable) as error:
            raise type(error)(f"{error}; {SLOTS[slot]}/{what} is there") from error
        into, begin = out.view(np.uint8), first * WIDTH
        end = begin + len(into)
        whole = range(-(-begin // BLOCK), end // BLOCK)
        for number in range(begin // BLOCK, -(-end // BLOCK)):
            if number in whole:
                continue
            low, high = max(begin, number * BLOCK), min(end, (number + 1) * BLOCK)
            block = self._kept_block(shard, extent, slot, number, what)
            into[low - begin : high - begin] = block[low - number * BLOCK : high - number * BLOCK]
        if whole:
            self._read_blocks(shard, extent, slot, whole, into[whole.start * BLOCK - begin :], what)

    def _read_blocks(
        self, shard: ShardFile, extent: Extent, slot: int, blocks: range, out: Array, what: str
    ) -> None:
        """Fill `out` with whole blocks that follow each other: while some are held against their checksums,
        the next are read.
        """
        file, coming = self.open(shard), deque[Future[Array]]()
        self._buffers = self._buffers or [aligned(_AT_ONCE * BLOCK) for _ in range(2)]
        self._ahead = self._ahead or ThreadPoolExecutor(1, "hpczero-reader")
        parts = [blocks[at : at + _AT_ONCE] for at in range(0, len(blocks), _AT_ONCE)]
        try:
            for index, part in enumerate([*parts, None]):
                if part:
                    place, size = extent.data[slot] + part[0] * BLOCK, len(part) * BLOCK
                    buffer = self._buffers[index % 2][:size]
                    coming.append(self._ahead.submit(self._filled, shard, file, place, buffer))
                if index:
                    self._take(
                        shard, extent, slot, parts[index - 1], coming.popleft().result(), out, what
                    )
                    out = out[len(parts[index - 1]) * BLOCK :]
        finally:
            for future in coming:
                future.exception()  # nobody writes into the buffers any more

    def _take(
        self,
        shard: ShardFile,
        extent: Extent,
        slot: int,
        blocks: range,
        found: Array,
        out: Array,
        what: str,
    ) -> None:
        for at, number in enumerate(blocks):
            block = found[at * BLOCK : (at + 1) * BLOCK]
            self._check(shard, extent, slot, number, block, what)
            out[at * BLOCK : (at + 1) * BLOCK] = block

    def _filled(self, shard: ShardFile, file: int, place: int, buffer: Array) -> Array:
        """Past the page cache, where that can be done: it would cost more than all the rest."""
        direct = self._direct.get(file)
        if direct is not None:
            try:
                if os.preadv(direct, [buffer.data], place) == len(buffer):
                    return buffer
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise not_read(self.folder / shard.file, error, f" at byte {place}") from error
        self._fill(shard, file, place, buffer)
        return buffer

    def file_of(self, rank: int) -> str:
        return self._of_rank[rank][0].file

    def open(self, shard: ShardFile) -> int:
        """The file, if it is the one that was written: its size, and all of it but the data. It may be closed once others are asked for."""
        if self._is_closed:
            raise ValueError(f"{self.folder}: this checkpoint has been closed")
        if shard.file not in self._files:
            self._files[shard.file] = self._opened(shard)
            while len(self._files) > _OPEN:
                self._close(self._files.popitem(last=False)[1])
        self._files.move_to_end(shard.file)
        return self._files[shard.file]

    def _opened(self, shard: ShardFile) -> int:
        path = self.folder / shard.file
        with contextlib.ExitStack() as otherwise:
            file = open_plain(path)
            otherwise.callback(os.close, file)
            try:
                identity = _identity(file)
                problem = (
                    problem_outside_data(shard, file)
                    if self._known.get(shard.file) != identity
                    else ""
                )
            except OSError as error:
                raise not_read(path, error) from error
            if problem:
                raise Damaged(f"{path}: {problem}")
            self._known[shard.file] = identity
            otherwise.pop_all()
        with contextlib.suppress(OSError):
            self._direct[file] = os.open(
                f"/proc/self/fd/{file}", os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC
            )
        return file

    def _close(self, file: int) -> None:
        for one in (file, self._direct.pop(file, None)):
            if one is not None:
                os.close(one)

    def close(self) -> None:
        self._is_closed = True
        if self._ahead:
            self._ahead.shutdown()
            self._ahead = None
        for file in self._files.values():
            self._close(file)
        self._files.clear()

    def _kept_block(
        self, shard: ShardFile, extent: Extent, slot: int, number: int, what: str
    ) -> Array:
        key = extent.rank, slot, number
        if key not in self._kept:
            block = np.empty(min(BLOCK, extent.length - number * BLOCK), np.uint8)
            self._fill(shard, self.open(shard), extent.data[slot] + number * BLOCK, block)
            self._check(shard, extent, slot, number, block, what)
            self._kept[key] = block
            while len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
        return self._kept[key]

    def _check(
        self, shard: ShardFile, extent: Extent, slot: int, number: int, block: Array, what: str
    ) -> None:
        if xxhash.xxh3_64_intdigest(block.data) != self._checksums_of(shard, extent)[slot, number]:
            place = extent.data[slot] + number * BLOCK
            where = f"damaged at bytes {place} to {place + len(block) - 1}, in {SLOTS[slot]}/{what}".rstrip(
                "/"
            )
            raise Damaged(f"{self.folder / shard.file}: {where}")

    def _fill(self, shard: ShardFile, file: int, place: int, out: Array) -> None:
        rest_of = out.data
        try:
            while rest_of and (count := os.preadv(file, [rest_of], place)):
                rest_of, place = rest_of[count:], place + count
        except OSError as error:
            raise not_read(self.folder / shard.file, error, f" at byte {place}") from error
        if rest_of:
            raise Damaged(f"{self.folder / shard.file}: it ends at byte {place}")

    def _checksums_of(self, shard: ShardFile, extent: Extent) -> Array:
        if extent.rank not in self._checksums:
            raw = np.empty(8 * len(SLOTS) * extent.blocks, np.uint8)
            self._fill(shard, self.open(shard), extent.checksums, raw)
            self._checksums[extent.rank] = raw.view("<u8").reshape(len(SLOTS), extent.blocks)
        return self._checksums[extent.rank]


def _identity(file: int) -> tuple[int, ...]:
    """Of a file that was not written to since."""
    found = os.fstat(file)
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def problem_outside_data(shard: ShardFile, file: int) -> str:
    """Why this cannot be the file that was written; empty if it can, as far as all but its data says. OSError: that cannot be told."""
    size = os.fstat(file).st_size
    if size != shard.size:
        return f"it has {size:,} bytes, and {shard.size:,} were written"
    checksum = rest(file, size, (place for data in shard.ranks for place in data.extent.ranges()))
    return (
        ""
        if checksum == shard.rest
        else f"it is damaged outside of its data: checksum {checksum}, and {shard.rest} was written"
    )


# HDF5 files that a stranger may have made, as the HDF5 library sees them: what is taken from one
# lies in that file itself, and is no larger than it. The library may crash on such a file: this is
# used in a process of its own (`apart`).
WRONG = (
    OSError,
    KeyError,
    ValueError,
    TypeError,
    RuntimeError,
    RecursionError,
    AttributeError,
    MemoryError,
)  # what h5py says of such a file
_DEEPEST = 32  # groups in groups: more than any name that can be meant has


@contextmanager
def opened(path: Path) -> Iterator[h5py.File]:
    """To look into. Unreadable: that fails, and not for what is in the file."""
    try:
        with h5py.File(path, "r", locking=False) as file:
            yield file
    except OSError as error:
        if error.errno is None:
            raise
        raise not_read(path, error) from error


def dataset(file: h5py.File, name: str) -> h5py.Dataset:
    """What has this name, as h5py shows it."""
    found = _inside(file, name)
    if not isinstance(found, h5py.h5d.DatasetID):
        raise ValueError(f"/{name} is no dataset")
    return h5py.Dataset(found)


def _inside(file: h5py.File, name: str) -> Any:
    """What has this name (the root: ""), as h5py's low level has it: reached without a link that leads on, here or elsewhere; such a link is not even
    looked along.
    """
    here = h5py.h5g.open(file.id, b"/")
    for part in name.encode().split(b"/") if name else ():
        if not isinstance(here, h5py.h5g.GroupID) or not here.links.exists(part):
            raise ValueError(f"/{name} is not in this file itself")
        _refuse_a_link(here, part, name)
        here = h5py.h5o.open(here, part)
    return here


def _refuse_a_link(group: h5py.h5g.GroupID, part: bytes, path: str) -> None:
    if group.links.get_info(part).type != h5py.h5l.TYPE_HARD:
        raise ValueError(f"/{path} is not in this file itself")


def plain(file: h5py.File, name: str, dtype: str = "", dims: int | None = None) -> Array:
    """A dataset of numbers, whole."""
    found = dataset(file, name)
    if found.is_virtual or found.external or found.chunks is not None:
        raise ValueError(f"/{name} is no plain dataset")
    if (
        found.shape is None
        or found.dtype.kind not in "fiub"
        or found.dtype.names
        or found.dtype.subdtype
    ):
        raise ValueError(f"/{name} has no numbers")
    if (dtype and found.dtype != np.dtype(dtype)) or (dims is not None and found.ndim != dims):
        raise ValueError(f"/{name} has {found.dtype} {found.shape}")
    if found.nbytes > min(found.id.get_storage_size(), os.stat(file.filename).st_size):
        raise ValueError(f"/{name} says that it has {found.shape} and stores less")
    return np.asarray(found[()])


def datasets_below(file: h5py.File) -> Iterator[tuple[str, Any]]:
    """The name and the object of each that is in a group of the file. ValueError: there is a link
    that leads on, or a group twice.
    """
    stack, seen = [("", _inside(file, ""))], set()
    while stack:
        prefix, group = stack.pop()
        address = h5py.h5o.get_info(group).addr
        if address in seen or prefix.count("/") > _DEEPEST:
            raise ValueError(f"/{prefix} is too deep, or there twice")
        seen.add(address)
        for part in group:
            path = prefix + part.decode()
            _refuse_a_link(group, part, path)
            found = h5py.h5o.open(group, part)
            if isinstance(found, h5py.h5g.GroupID):
                stack.append((f"{path}/", found))
            else:
                yield path, found
