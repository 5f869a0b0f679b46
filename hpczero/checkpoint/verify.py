"""Everything in a checkpoint held against its checksums: all damages are found, each with its file and the tensors that it concerns.

The work is dealt out as `Task`s, which do not depend on each other: under mpirun every rank takes its share.
"""

import errno
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import numpy as np
import xxhash

from hpczero.checkpoint import manifest
from hpczero.checkpoint.apart import Apart
from hpczero.checkpoint.load import Checkpoint
from hpczero.checkpoint.manifest import INDEX, Content, RankData, ShardFile
from hpczero.checkpoint.piece_table import Table
from hpczero.checkpoint.shard_file import (
    BLOCK,
    SLOTS,
    WIDTH,
    Advance,
    Array,
    Damaged,
    not_read,
    open_plain,
)
from hpczero.checkpoint.shards import problem_outside_data
from hpczero.text import first_few


@dataclass(frozen=True)
class Damage:
    """`tensors`: those that cannot be read any more as they were; `/optimizer/moment1/…` and so on, as far as the index tells."""

    file: str
    what: str
    tensors: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.file}: {self.what}" + (
            f": {first_few(self.tensors)}" if self.tensors else ""
        )


@dataclass(frozen=True)
class Task:
    """The index (no shard), all of a shard file but its data, or a slot of a rank."""

    shard: int = -1
    data: RankData | None = None
    slot: int = 0

    def size(self, content: Content) -> int:
        return self.data.extent.length if self.data else content.index.size if self.shard < 0 else 0


class Verification:
    """Of one checkpoint, whose manifest is what was written (else Damaged). Unreadable: what is asked for cannot be told."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.content = folder, manifest.read(folder)
        self.unreadable = ""
        self.table: Table | None = None
        self._apart = Apart(folder, self.content)
        try:
            with Checkpoint.open(folder) as checkpoint:
                self.table = checkpoint.table
        except Damaged as error:
            self.unreadable = str(error).removeprefix(f"{folder / INDEX}: ")

    def tasks(self) -> list[Task]:
        """The largest first: dealt out in turn, every rank has about as much to read."""
        found = [Task()]
        for number, shard in enumerate(self.content.shards):
            found.append(Task(number))
            found += [
                Task(number, data, slot) for data in shard.ranks for slot in range(len(SLOTS))
            ]
        return sorted(found, key=lambda task: -task.size(self.content))

    def carry_out(self, task: Task, advance: Advance) -> list[Damage]:
        if task.shard < 0:
            advance(self.content.index.size)
            return self._of_index()
        shard = self.content.shards[task.shard]
        try:
            file = open_plain(self.folder / shard.file)
        except Damaged as error:
            if task.data:  # said once, by the task of the file
                return []
            return [
                Damage(
                    shard.file,
                    str(error).removeprefix(f"{self.folder / shard.file}: "),
                    self._held_in(shard),
                )
            ]
        try:
            return (
                list(self._of_data(shard, task.data, task.slot, file, advance))
                if task.data
                else self._of_file(task.shard, file)
            )
        except OSError as error:
            raise not_read(self.folder / shard.file, error) from error
        finally:
            os.close(file)

    def _of_index(self) -> list[Damage]:
        if self.table is None:
            return [Damage(INDEX, self.unreadable)]
        return [Damage(INDEX, problem) for problem in self._apart.problems()]

    def _of_file(self, number: int, file: int) -> list[Damage]:
        shard = self.content.shards[number]
        problem = problem_outside_data(shard, file)
        problems = [problem] if problem else self._apart.problems(number)
        return [Damage(shard.file, problem, self._held_in(shard)) for problem in problems]

    def close(self) -> None:
        self._apart.close()

    def __enter__(self) -> "Verification":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _of_data(
        self, shard: ShardFile, data: RankData, slot: int, file: int, advance: Advance
    ) -> Iterator[Damage]:
        """Each run of damaged blocks is one damage. What a file lacks takes no time or memory."""
        extent, place, bad = data.extent, data.data[slot], list[int]()
        stored = -(-(os.fstat(file).st_size - place) // BLOCK)
        there = min(extent.blocks, max(0, stored))
        for number, checksum in enumerate(_checksums(file, data, slot, there)):
            length = min(BLOCK, extent.length - number * BLOCK)
            if not _fits(file, place + number * BLOCK, length, checksum):
                bad.append(number)
            advance(length)
        advance(max(0, extent.length - there * BLOCK))
        for run in _runs(bad, range(there, extent.blocks)):
            begin, end = run.start * BLOCK, min(run.stop * BLOCK, extent.length)
            names = self._at(data.rank, slot, begin // WIDTH, end // WIDTH)
            yield Damage(
                shard.file,
                f"damaged at bytes {place + begin} to {place + end - 1}, data of rank {data.rank}",
                names,
            )

    def _at(self, rank: int, slot: int, begin: int, end: int) -> tuple[str, ...]:
        if self.table is None:
            return (f"/{SLOTS[slot]}",)
        table = self.table
        there = (table.rank == rank) & (table.offset < end) & (table.offset + table.sizes > begin)
        return tuple(
            f"/{SLOTS[slot]}/{table.tensors[number].name}"
            for number in np.unique(table.tensor[there]).astype(int)
        )

    def _held_in(self, shard: ShardFile) -> tuple[str, ...]:
        """All tensors that have something in the file."""
        if self.table is None:
            return ()
        there = np.isin(self.table.rank, [data.rank for data in shard.ranks])
        numbers = np.unique(self.table.tensor[there]).astype(int)
        return tuple(
            f"/{slot}/{self.table.tensors[number].name}" for slot in SLOTS for number in numbers
        )


def _checksums(file: int, data: RankData, slot: int, blocks: int) -> Array:
    """Return those of a slot's first blocks; 0 where the file has none."""
    size = 8 * blocks
    raw = os.pread(file, size, data.checksums + 8 * slot * data.extent.blocks)
    return np.frombuffer(raw + bytes(size - len(raw)), "<u8")


def _fits(file: int, place: int, length: int, checksum: int) -> bool:
    try:
        return xxhash.xxh3_64_intdigest(os.pread(file, length, place)) == checksum
    except OSError as error:
        if error.errno != errno.EIO:  # a place of the disk that is lost is a damage
            raise
        return False


def _runs(numbers: Sequence[int], last: range) -> Iterator[range]:
    """Those that follow each other, together; `last` follows all of them."""
    begin, left = last.start, list(numbers)
    while left and last and left[-1] == begin - 1:
        begin = left.pop()
    yield from _together(left)
    if last:
        yield range(begin, last.stop)


def _together(numbers: Sequence[int]) -> Iterator[range]:
    for _, run in groupby(enumerate(numbers), key=lambda one: one[1] - one[0]):
        together = [number for _, number in run]
        yield range(together[0], together[-1] + 1)
