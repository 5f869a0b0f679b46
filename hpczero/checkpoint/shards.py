"""The data of a checkpoint, read back: whatever is given out has been held against its checksum."""

import os
from collections import OrderedDict
from pathlib import Path

import numpy as np
import xxhash

from hpczero.checkpoint.files import Damaged, open_plain
from hpczero.checkpoint.manifest import Content, ShardFile
from hpczero.checkpoint.shard import BLOCK, SLOTS, WIDTH, Array, Extent, rest

_KEPT = 16  # blocks that were read last


class Shards:
    """Of one checkpoint. `read` gives elements of a rank's slot."""

    def __init__(self, folder: Path, content: Content) -> None:
        self.folder = folder
        self._of_rank = {data.rank: (shard, data.extent) for shard in content.shards for data in shard.ranks}
        self._files: dict[str, int] = {}
        self._checksums: dict[int, Array] = {}
        self._kept: OrderedDict[tuple[int, int, int], memoryview] = OrderedDict()

    def read(self, rank: int, slot: int, first: int, count: int, what: str) -> Array:
        """`what`: the tensor, for what is said of damage."""
        shard, extent = self._of_rank[rank]
        try:
            self.open(shard)
        except Damaged as error:
            raise Damaged(f"{error}; {SLOTS[slot]}/{what} is there") from error
        begin, end = first * WIDTH, (first + count) * WIDTH
        out = np.empty(end - begin, np.uint8)
        for number in range(begin // BLOCK, -(-end // BLOCK)):
            start = number * BLOCK
            block = self._block(shard, extent, slot, number, what)
            low, high = max(begin, start), min(end, start + BLOCK)
            out[low - begin : high - begin] = np.frombuffer(block[low - start : high - start], np.uint8)
        return out.view("<f4")

    def bad_blocks(self, rank: int, slot: int) -> list[slice]:
        """Elements of a rank's slot whose checksum does not fit."""
        shard, extent = self._of_rank[rank]
        checksums = self._checksums_of(shard, extent)
        bad = []
        for number in range(extent.blocks):
            if xxhash.xxh3_64_intdigest(self._raw(shard, extent, slot, number)) != checksums[slot, number]:
                bad.append(slice(number * BLOCK // WIDTH, min((number + 1) * BLOCK, extent.length) // WIDTH))
        return bad

    def open(self, shard: ShardFile) -> int:
        """The file, if it is the one that was written: its size, and all of it but the data."""
        if shard.file not in self._files:
            file = open_plain(self.folder / shard.file)
            if problem := problem_outside_data(shard, file):
                os.close(file)
                raise Damaged(f"{self.folder / shard.file}: {problem}")
            self._files[shard.file] = file
        return self._files[shard.file]

    def close(self) -> None:
        for file in self._files.values():
            os.close(file)
        self._files.clear()

    def _block(self, shard: ShardFile, extent: Extent, slot: int, number: int, what: str) -> memoryview:
        key = extent.rank, slot, number
        if key not in self._kept:
            block = self._raw(shard, extent, slot, number)
            if xxhash.xxh3_64_intdigest(block) != self._checksums_of(shard, extent)[slot, number]:
                raise Damaged(f"{self.folder / shard.file}: damaged at byte {extent.data[slot] + number * BLOCK}, in {SLOTS[slot]}/{what}")
            self._kept[key] = block
            while len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
        return self._kept[key]

    def _raw(self, shard: ShardFile, extent: Extent, slot: int, number: int) -> memoryview:
        begin = number * BLOCK
        length = min(BLOCK, extent.length - begin)
        return self._bytes(shard, extent.data[slot] + begin, length)

    def _bytes(self, shard: ShardFile, place: int, length: int) -> memoryview:
        file, found = self.open(shard), b""
        try:
            found = os.pread(file, length, place)
        except OSError as error:
            raise Damaged(f"{self.folder / shard.file}: {error.strerror} at byte {place}") from error
        if len(found) != length:
            raise Damaged(f"{self.folder / shard.file}: it ends before byte {place + length}")
        return memoryview(found)

    def _checksums_of(self, shard: ShardFile, extent: Extent) -> Array:
        if extent.rank not in self._checksums:
            raw = self._bytes(shard, extent.checksums, 8 * len(SLOTS) * extent.blocks)
            self._checksums[extent.rank] = np.frombuffer(raw, "<u8").reshape(len(SLOTS), extent.blocks)
        return self._checksums[extent.rank]


def problem_outside_data(shard: ShardFile, file: int) -> str:
    """Why this cannot be the file that was written; empty if it can, as far as all but its data says."""
    size = os.fstat(file).st_size
    if size != shard.size:
        return f"it has {size:,} bytes, and {shard.size:,} were written"
    try:
        checksum = rest(file, size, (place for data in shard.ranks for place in data.extent.ranges()))
    except OSError as error:
        return f"{error.strerror}"
    return "" if checksum == shard.rest else f"it is damaged outside of its data: checksum {checksum}, and {shard.rest} was written"
