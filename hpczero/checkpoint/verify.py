"""Checking a checkpoint against all its checksums: every damage, with its file and its tensors.

The work is dealt out as `Task`s, which do not depend on each other: under mpirun every rank takes
its share.
"""

import errno
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash

from hpczero.checkpoint import manifest
from hpczero.checkpoint.hdf5_process import Hdf5Process
from hpczero.checkpoint.load import Checkpoint
from hpczero.checkpoint.manifest import INDEX, Content, RankData, ShardFile
from hpczero.checkpoint.piece_table import Table
from hpczero.checkpoint.shard_file import (
    BLOCK,
    WIDTH,
    Advance,
    Array,
    Damaged,
    open_plain,
    reading,
)
from hpczero.checkpoint.shards import problem_outside_data
from hpczero.text import consecutive_runs, first_few


@dataclass(frozen=True)
class Damage:
    """A damage of a file. `tensors`: those that cannot be read any more as they were.

    They are named `/optimizer/moment1/…` and so on, as far as the index tells.
    """

    file: str
    what: str
    tensors: tuple[str, ...] = ()

    def __str__(self) -> str:
        tensors = f": {first_few(self.tensors)}" if self.tensors else ""
        return f"{self.file}: {self.what}{tensors}"


@dataclass(frozen=True)
class Task:
    """The index (no shard), all of a shard file but its data, or a slot of a rank."""

    shard: int = -1
    data: RankData | None = None
    slot: int = 0

    def size(self, content: Content) -> int:
        if self.data:
            return self.data.extent.length
        return content.index.size if self.shard < 0 else 0


class Verification:
    """The verification of one checkpoint.

    Damaged: its manifest is not what was written. Unreadable: what is asked for cannot be told.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.content = manifest.read(folder)
        self.unreadable = ""
        self.table: Table | None = None
        self._apart = Hdf5Process(folder, self.content)
        try:
            with Checkpoint.open(folder, self.content) as checkpoint:
                self.table = checkpoint.table
        except Damaged as error:
            self.unreadable = self._without_path(error, INDEX)

    def tasks(self) -> list[Task]:
        """Return the tasks, the largest first.

        Dealt out in turn, every rank has about as much to read.
        """
        tasks = [Task()]
        for number, shard in enumerate(self.content.shards):
            tasks.append(Task(number))
            slots = range(len(self.content.slots))
            tasks += [Task(number, data, slot) for data in shard.ranks for slot in slots]
        return sorted(tasks, key=lambda task: -task.size(self.content))

    def carry_out(self, task: Task, advance: Advance) -> list[Damage]:
        if task.shard < 0:
            advance(self.content.index.size)
            problems = [self.unreadable] if self.table is None else self._apart.problems()
            return [Damage(INDEX, problem) for problem in problems]
        shard = self.content.shards[task.shard]
        path = self.folder / shard.file
        try:
            file = open_plain(path)
        except Damaged as error:
            problems = [self._without_path(error, shard.file)]
            if task.data:  # the task of the file reports it, once
                return []
        else:
            with reading(path, file):
                if task.data:
                    return list(self._data_damages(shard, task.data, task.slot, file, advance))
                problem = problem_outside_data(shard, file)
                problems = [problem] if problem else self._apart.problems(task.shard)
        return [Damage(shard.file, problem, self._tensors_in(shard)) for problem in problems]

    def _without_path(self, error: Damaged, file: str) -> str:
        return str(error).removeprefix(f"{self.folder / file}: ")

    def close(self) -> None:
        self._apart.close()

    def __enter__(self) -> "Verification":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _data_damages(
        self, shard: ShardFile, data: RankData, slot: int, file: int, advance: Advance
    ) -> Iterator[Damage]:
        """Yield one damage for each run of damaged blocks.

        Blocks that the file lacks take no time or memory.
        """
        extent = data.extent
        first = data.data[slot]
        bad = list[int]()
        stored = -(-(os.fstat(file).st_size - first) // BLOCK)
        there = min(extent.blocks, max(0, stored))
        for number, checksum in enumerate(_checksums(file, data, slot, there)):
            length = min(BLOCK, extent.length - number * BLOCK)
            if not _fits(file, first + number * BLOCK, length, checksum):
                bad.append(number)
            advance(length)
        advance(max(0, extent.length - there * BLOCK))
        for run in _runs(bad, range(there, extent.blocks)):
            begin, end = run.start * BLOCK, min(run.stop * BLOCK, extent.length)
            names = self._tensors_at(data.rank, slot, begin // WIDTH, end // WIDTH)
            damaged = f"damaged at bytes {first + begin} to {first + end - 1}"
            yield Damage(shard.file, f"{damaged}, data of rank {data.rank}", names)

    def _tensors_at(self, rank: int, slot: int, begin: int, end: int) -> tuple[str, ...]:
        """Return the tensors that have something in these elements of a rank's slot."""
        if self.table is None:
            return (f"/{self.content.slots[slot]}",)
        table = self.table
        there = (table.rank == rank) & (table.offset < end) & (table.offset + table.sizes > begin)
        return _names(table, there, self.content.slots[slot : slot + 1])

    def _tensors_in(self, shard: ShardFile) -> tuple[str, ...]:
        """Return all tensors that have something in a file."""
        if self.table is None:
            return ()
        there = np.isin(self.table.rank, [data.rank for data in shard.ranks])
        return _names(self.table, there, self.content.slots)


def _names(table: Table, pieces: Array, slots: Sequence[str]) -> tuple[str, ...]:
    numbers = np.unique(table.tensor[pieces]).astype(int)
    return tuple(f"/{slot}/{table.tensors[number].name}" for slot in slots for number in numbers)


def _checksums(file: int, data: RankData, slot: int, blocks: int) -> Array:
    """Return those of a slot's first blocks; 0 where the file has none."""
    size = 8 * blocks
    raw = os.pread(file, size, data.checksums + 8 * slot * data.extent.blocks)
    return np.frombuffer(raw + bytes(size - len(raw)), "<u8")


def _fits(file: int, offset: int, length: int, checksum: int) -> bool:
    try:
        return xxhash.xxh3_64_intdigest(os.pread(file, length, offset)) == checksum
    except OSError as error:
        if error.errno != errno.EIO:  # a place of the disk that is lost is a damage
            raise
        return False


def _runs(numbers: Sequence[int], last: range) -> Iterator[range]:
    """Yield runs of consecutive numbers; `last` follows all of them."""
    begin = last.start
    left = list(numbers)
    while left and last and left[-1] == begin - 1:
        begin = left.pop()
    for run in consecutive_runs(left):
        yield range(run[0], run[-1] + 1)
    if last:
        yield range(begin, last.stop)
