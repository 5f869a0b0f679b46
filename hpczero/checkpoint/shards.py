"""The data of a checkpoint, read back: whatever is returned fits its checksum."""

import contextlib
import errno
import os
from collections import OrderedDict, deque
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import xxhash

from hpczero.checkpoint.manifest import Content, ShardFile
from hpczero.checkpoint.shard_file import (
    BLOCK,
    WIDTH,
    Array,
    Damaged,
    Extent,
    Unreadable,
    aligned,
    not_read,
    open_plain,
    structure_checksum,
)
from hpczero.safe_files import read_at

_AT_ONCE = 4  # blocks in a read past the page cache
_KEPT = 16  # blocks that were read last
_OPEN = 32  # files that are open at a time, twice each


class Shards:
    """The shard files of one checkpoint."""

    def __init__(self, folder: Path, content: Content) -> None:
        self.folder = folder
        self._slots = content.slots
        self._of_rank = {
            data.rank: (shard, data.extent) for shard in content.shards for data in shard.ranks
        }
        self._files: OrderedDict[str, int] = OrderedDict()  # open, the last used one at the end
        self._direct: dict[int, int] = {}  # those of them that are open past the page cache, too
        self._buffers: list[Array] = []
        self._verified: dict[str, tuple[int, ...]] = {}  # file -> identity when it was checked
        self._is_closed = False
        self._checksums: dict[int, Array] = {}
        self._kept: OrderedDict[tuple[int, int, int], Array] = OrderedDict()
        self._ahead: ThreadPoolExecutor | None = None  # reads the next blocks meanwhile

    def read(self, rank: int, slot: int, first: int, out: Array, what: str) -> None:
        """Fill `out` with the elements of a rank's slot from `first` on.

        `what`: the tensor that they are of, for messages about damage.
        """
        shard, extent = self._of_rank[rank]
        try:
            self.open(shard)
        except (Damaged, Unreadable) as error:
            raise type(error)(f"{error}; {self._slots[slot]}/{what} is there") from error
        into = out.view(np.uint8)
        begin = first * WIDTH
        end = begin + len(into)
        complete = range(-(-begin // BLOCK), end // BLOCK)  # blocks that are wanted whole
        for number in range(begin // BLOCK, -(-end // BLOCK)):
            if number in complete:
                continue
            low, high = max(begin, number * BLOCK), min(end, (number + 1) * BLOCK)
            block = self._kept_block(shard, extent, slot, number, what)
            into[low - begin : high - begin] = block[low - number * BLOCK : high - number * BLOCK]
        if complete:
            target = into[complete.start * BLOCK - begin :]
            self._read_blocks(shard, extent, slot, complete, target, what)

    def _read_blocks(
        self, shard: ShardFile, extent: Extent, slot: int, blocks: range, out: Array, what: str
    ) -> None:
        """Fill `out` with consecutive whole blocks: while some are verified, the next are read."""
        file = self.open(shard)
        coming = deque[Future[Array]]()
        self._buffers = self._buffers or [aligned(_AT_ONCE * BLOCK) for _ in range(2)]
        self._ahead = self._ahead or ThreadPoolExecutor(1, "hpczero-reader")
        groups = [blocks[at : at + _AT_ONCE] for at in range(0, len(blocks), _AT_ONCE)]
        try:
            for index, group in enumerate([*groups, None]):
                if group:
                    offset = extent.data[slot] + group[0] * BLOCK
                    buffer = self._buffers[index % 2][: len(group) * BLOCK]
                    coming.append(self._ahead.submit(self._filled, shard, file, offset, buffer))
                if index:
                    before = groups[index - 1]
                    data = coming.popleft().result()
                    for at, number in enumerate(before):
                        block = data[at * BLOCK : (at + 1) * BLOCK]
                        self._check(shard, extent, slot, number, block, what)
                        out[at * BLOCK : (at + 1) * BLOCK] = block
                    out = out[len(before) * BLOCK :]
        finally:
            for future in coming:
                future.exception()  # nobody writes into the buffers any more

    def _filled(self, shard: ShardFile, file: int, offset: int, buffer: Array) -> Array:
        """Fill a buffer, past the page cache if possible: copying through it takes longest."""
        direct = self._direct.get(file)
        if direct is not None:
            try:
                if os.preadv(direct, [buffer.data], offset) == len(buffer):
                    return buffer
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise not_read(self.folder / shard.file, error, f" at byte {offset}") from error
        self._fill(shard, file, offset, buffer)
        return buffer

    def file_of(self, rank: int) -> str:
        return self._of_rank[rank][0].file

    def open(self, shard: ShardFile) -> int:
        """Return the descriptor of a file whose size and bytes outside the data are verified.

        It may be closed once other files are asked for.
        """
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
        file = open_plain(path)
        try:
            identity = _identity(file)
            if self._verified.get(shard.file) != identity:
                if problem := problem_outside_data(shard, file):
                    raise Damaged(f"{path}: {problem}")
                self._verified[shard.file] = identity
        except BaseException as error:
            os.close(file)
            if isinstance(error, OSError):
                raise not_read(path, error) from error
            raise
        with contextlib.suppress(OSError):
            self._direct[file] = os.open(
                f"/proc/self/fd/{file}", os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC
            )
        return file

    def _close(self, file: int) -> None:
        for descriptor in (file, self._direct.pop(file, None)):
            if descriptor is not None:
                os.close(descriptor)

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
        """Return a block of which a part is wanted; the next part is probably wanted soon."""
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
            begin = extent.data[slot] + number * BLOCK
            tensor = f"{self._slots[slot]}/{what}".rstrip("/")
            bytes_of = f"bytes {begin} to {begin + len(block) - 1}"
            raise Damaged(f"{self.folder / shard.file}: damaged at {bytes_of}, in {tensor}")

    def _fill(self, shard: ShardFile, file: int, offset: int, out: Array) -> None:
        try:
            count = read_at(file, out.data, offset)
        except OSError as error:
            raise not_read(self.folder / shard.file, error, f" at byte {offset}") from error
        if count < out.nbytes:
            raise Damaged(f"{self.folder / shard.file}: it ends at byte {offset + count}")

    def _checksums_of(self, shard: ShardFile, extent: Extent) -> Array:
        if extent.rank not in self._checksums:
            raw = np.empty(extent.checksums_length, np.uint8)
            self._fill(shard, self.open(shard), extent.checksums, raw)
            self._checksums[extent.rank] = raw.view("<u8").reshape(len(extent.data), extent.blocks)
        return self._checksums[extent.rank]


def _identity(file: int) -> tuple[int, ...]:
    """Return what stays the same as long as a file is not written to or replaced."""
    status = os.fstat(file)
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def problem_outside_data(shard: ShardFile, file: int) -> str:
    """Return why this cannot be the file that was written, by its size and all but its data.

    Empty if it can. OSError: that cannot be told.
    """
    size = os.fstat(file).st_size
    if size != shard.size:
        return f"it has {size:,} bytes, and {shard.size:,} were written"
    checksum = structure_checksum(file, size, shard.ranges())
    if checksum != shard.rest:
        written = f"and {shard.rest} was written"
        return f"it is damaged outside of its data: checksum {checksum}, {written}"
    return ""
