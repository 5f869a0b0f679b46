"""Saving a checkpoint, by all ranks together.

begin       rank 0 makes the folder, the first rank of every writer its shard file;
            all learn where their data goes
            (asynchronous: every rank copies what it owns, and a thread does what follows)
write       every rank writes its data, and rank 0 also the index; no MPI is called here
conclude    once all have written: checksums, fsync, final names;
            then rank 0 writes the manifest, which makes it a checkpoint

A failure on any rank ends the save on all of them: there is no manifest, and what was written is
removed.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided

from hpczero import safe_files
from hpczero.checkpoint import directory, index, manifest, shard_file
from hpczero.checkpoint.manifest import INDEX, IndexFile, RankData, ShardFile, TrainingState
from hpczero.checkpoint.piece_table import Table
from hpczero.checkpoint.shard_file import (
    SLOTS,
    WIDTH,
    Array,
    DataSource,
    Extent,
    aligned,
    empty_chunks,
    in_chunks,
    padded,
    write_data,
)
from hpczero.comm.objects import run_while_polling
from hpczero.comm.world import World
from hpczero.errors import HpczeroError
from hpczero.safe_files import rename

_PAUSE_FACTOR = 3.0  # pause of a background writer after each chunk, in times of what that took


class SaveFailed(HpczeroError):
    """A checkpoint could not be written; the ones before it are what they were."""


@dataclass(frozen=True)
class SaveJob:
    """The facts that all checkpoints of a run share. `table` is called on rank 0 only."""

    checkpoints: Path
    spec: Mapping[str, Any]
    grid: Mapping[str, int]
    table: Callable[[], Table]
    writers: str  # "node", "rank"
    identity: Mapping[str, str] = field(default_factory=dict)  # besides the spec
    slots: Sequence[str] = SLOTS  # what is kept of each tensor


@dataclass(frozen=True)
class Saved:
    """A checkpoint that is complete.

    `own_seconds`: for which this rank's data alone, until it was on the disk, held up the others.
    """

    step: int
    path: Path
    size: int
    seconds: float  # from its beginning
    own_seconds: float


class Saver:
    """Saves the checkpoints of one run, on every rank; at most one save is in flight."""

    def __init__(
        self, world: World, job: SaveJob, sources: Sequence[Sequence[DataSource]], behind: bool
    ) -> None:
        """Collective.

        `sources`: for each slot the elements that this rank owns, as float32, in the order of
        `stored_spans`; each save takes what is in that memory then. `behind`: a save may be
        asynchronous, and the memory for its copies is taken now.
        """
        self.world = world
        self.job = job
        self.sources = [_joined(of_slot) for of_slot in sources]
        self._alive = sources  # a joined array keeps only its first part alive
        elements = sum(map(len, self.sources[0]))
        self._leader = _leader(world, job.writers)
        # of each rank: who makes its file, how many elements it owns
        self._ranks = self._gathered([self._leader, elements])
        leaders = sorted({leader for leader, _ in self._ranks})
        self._names = {leader: manifest.shard_name(at) for at, leader in enumerate(leaders)}
        self._copies = [aligned(padded(elements * WIDTH)) for _ in job.slots] if behind else []
        for copy in self._copies:
            copy.fill(0)  # the first use of memory takes long
        self._table: Table | None = None
        self._save: _Save | None = None

    @property
    def in_flight(self) -> bool:
        """True, on all ranks alike, between `begin` and `conclude`."""
        return self._save is not None

    @property
    def written(self) -> bool:
        """True if this rank has nothing more to write of the save in flight."""
        return self._save is None or not self._save.thread or not self._save.thread.is_alive()

    @property
    def copy_bytes(self) -> int:
        """Bytes of the memory that copies are kept in."""
        return sum(copy.nbytes for copy in self._copies)

    def begin(self, state: TrainingState, buffers: Mapping[str, Array], asynchronous: bool) -> None:
        """Collective. Copy the sources (or write them) before this returns.

        SaveFailed, on all ranks alike: it cannot begin.
        """
        assert self._save is None, "a save is in flight"
        copies: list[list[Array]] = []

        def copy(*slots: int) -> None:
            """Copy while files are made, which takes as long as their disk likes."""
            for slot in slots if asynchronous else ():
                kept = self._copies[slot].view(np.float32)
                copies.append(_in_chunks(_copy(self.sources[slot], kept)))

        def make_folder() -> str:
            if self.world.rank:
                return ""
            return str(directory.begin(self.job.checkpoints, state.step))

        path = Path(self._run_on_all(make_folder, meanwhile=partial(copy, 0))[0])
        others = range(1, len(self.job.slots))
        made = self._run_on_all(lambda: self._make_file(path), path, partial(copy, *others))
        extents = {data["rank"]: RankData(**data).extent for file in made for data in file}
        files = {
            leader: [extents[rank] for rank in self._ranks_of(leader)] for leader in self._names
        }
        save = _Save(path, state, time.monotonic(), files, extents[self.world.rank])
        self._save = save
        if asynchronous:
            arguments = (save, copies, buffers, _PAUSE_FACTOR)
            save.thread = threading.Thread(
                target=self._write, args=arguments, name="hpczero-checkpoint", daemon=True
            )
            try:
                save.thread.start()
            except RuntimeError as error:  # no more threads: `conclude` raises it, on all ranks
                save.thread = None
                save.error = f"{path}: {error}"
        else:
            empty = self._empty_chunks()
            chunks = [in_chunks(of_slot, empty) for of_slot in self.sources]
            run_while_polling(self.world, lambda: self._write(save, chunks, buffers, 0.0))

    def _ranks_of(self, leader: int) -> list[int]:
        """Return the ranks whose data goes into the file that a rank makes."""
        return [rank for rank, (led_by, _) in enumerate(self._ranks) if led_by == leader]

    def _make_file(self, path: Path) -> list[dict[str, Any]]:
        """Make this rank's shard file, if it makes one; return where data goes in it."""
        if self._leader != self.world.rank:
            return []
        elements = {rank: self._ranks[rank][1] for rank in self._ranks_of(self._leader)}
        extents = shard_file.make_file(self._new(path), elements, self.job.slots)
        return [RankData.of(extent).model_dump() for extent in extents]

    def _new(self, path: Path) -> Path:
        """Return the shard file that this rank writes to, under its first name."""
        return path / f"{self._names[self._leader]}.new"

    def _empty_chunks(self) -> Iterator[Array]:
        """Return buffers in the copies' memory, if there is any: its pages were used before.

        What is behind a copy's elements stays zero.
        """
        enough = len(self._copies) >= shard_file.CHUNKS
        if enough and self._copies[0].nbytes >= shard_file.CHUNK + shard_file.PAGE:
            return cycle([copy[: shard_file.CHUNK].view(np.float32) for copy in self._copies])
        return empty_chunks()

    def conclude(self) -> Saved:
        """Collective. Wait until all have written, and make it a checkpoint.

        SaveFailed, on all ranks alike: any of them failed.
        """
        save = self._save
        self._save = None
        assert save is not None, "no save is in flight"
        began = time.monotonic()
        save.hurried.set()
        run_while_polling(self.world, lambda: save.thread.join() if save.thread else None)
        self._agree(self._gathered(save.error), save.path)
        finished = self._run_on_all(lambda: self._finish_file(save), save.path)
        shards = [ShardFile.model_validate_json(text) for text, _ in finished if text]
        own = save.seconds_of_data(began) + finished[self._leader][1]
        size = self._run_on_all(lambda: self._commit(save, shards), save.path)[0]
        path = directory.in_place(save.path)
        return Saved(save.state.step, path, size, time.monotonic() - save.begun, own)

    def _write(
        self,
        save: "_Save",
        chunks: Sequence[Any],
        buffers: Mapping[str, Array],
        pause_factor: float,
    ) -> None:
        """Write this rank's data, and the index beside it, without MPI."""
        shard_path = self._new(save.path)
        index_path = save.path / f"{INDEX}.new"
        pause = save.hurried.wait
        write_shard = partial(write_data, shard_path, save.extent, chunks, pause_factor, pause)
        write_index = partial(self._write_index, index_path, save, buffers)

        def write_both() -> str:
            with ThreadPoolExecutor(1) as beside:
                index_error = beside.submit(save.error_of, index_path, write_index)
                error = save.error_of(shard_path, write_shard)
                save.data_end = time.monotonic()
                return error or index_error.result()

        save.error = save.error_of(save.path, write_both)

    def _write_index(self, path: Path, save: "_Save", buffers: Mapping[str, Array]) -> None:
        if self.world.rank:
            return
        if self._table is None:
            self._table = self.job.table()
        job = self.job
        files = save.files.items()
        shards = [ShardFile.of(self._names[leader], extents) for leader, extents in files]
        attributes = index.attributes(save.state, job.spec, job.grid, job.identity)
        index.write(path, self._table, shards, buffers, attributes, job.slots)
        save.index = IndexFile.sealed(path)

    def _finish_file(self, save: "_Save") -> tuple[str, float]:
        """Bring this rank's shard file, if it made one, to the disk under its final name.

        Return its facts, and the seconds that it took.
        """
        if self._leader != self.world.rank:
            return "", 0.0
        began = time.monotonic()
        name = self._names[self._leader]
        temporary = self._new(save.path)
        shard = ShardFile.sealed(temporary, name, save.files[self._leader])
        rename(temporary, save.path / name)
        return shard.model_dump_json(), time.monotonic() - began

    def _commit(self, save: "_Save", shards: Sequence[ShardFile]) -> int:
        """Write the manifest on rank 0; return the bytes of the checkpoint."""
        if self.world.rank:
            return 0
        assert save.index is not None
        rename(save.path / f"{INDEX}.new", save.path / INDEX)
        job = self.job
        size = manifest.commit(save.path, save.state, job.spec, job.grid, save.index, shards).size
        directory.put_in_place(save.path)
        return size

    def _run_on_all(
        self,
        action: Callable[[], Any],
        path: Path | None = None,
        meanwhile: Callable[[], object] = lambda: None,
    ) -> list[Any]:
        """Return every rank's result, which JSON can carry; a failure on one fails on all."""
        result = None
        text = ""
        try:
            result = run_while_polling(self.world, action, meanwhile)
        except Exception as error:  # whatever it is, the other ranks wait for word of it
            where = getattr(error, "filename", None) or path or self.job.checkpoints
            why = getattr(error, "strerror", None) or error
            if not isinstance(error, OSError | RuntimeError | MemoryError | HpczeroError):
                why = f"{type(error).__name__}: {error}"
            text = f"{where}: {why} ({_free(Path(where))})"
        gathered = self._gathered([result, text])
        self._agree([text for _, text in gathered], path)
        return [result for result, _ in gathered]

    def _agree(self, errors: Sequence[str], path: Path | None) -> None:
        """Raise SaveFailed, and remove the folder, if any rank has an error."""
        failed = [(rank, text) for rank, text in enumerate(errors) if text]
        if not failed:
            return
        self._save = None
        run_while_polling(self.world, lambda: self._remove(path))
        rank, text = failed[0]
        others = f" (and {len(failed) - 1} other ranks)" if len(failed) > 1 else ""
        who = f"rank {rank} on {self.world.hosts[rank]}{others}"
        raise SaveFailed(f"the checkpoint could not be saved: {who}: {text}")

    def _remove(self, path: Path | None) -> None:
        if self.world.rank == 0 and path:
            with contextlib.suppress(OSError):
                directory.remove(path)

    def _gathered(self, value: Any) -> list[Any]:
        values: list[Any] = self.world.all_gather_objects(value)
        return values


@dataclass
class _Save:
    """A save in flight: which rank writes where, and how far it came."""

    path: Path
    state: TrainingState
    begun: float
    files: Mapping[int, Sequence[Extent]]  # leader -> what is in its file
    extent: Extent
    hurried: threading.Event = field(default_factory=threading.Event)  # awaited: no more pauses
    thread: threading.Thread | None = None
    index: IndexFile | None = None
    error: str = "its writer did not come to an end"  # until it ends well
    data_end: float = 0.0  # of the writing of this rank's data

    def seconds_of_data(self, awaited: float) -> float:
        """Return for how long training stood still for it: a thread's, once it is `awaited`."""
        return max(0.0, self.data_end - (awaited if self.thread else self.begun))

    def error_of(self, path: Path, action: Callable[[], str | None]) -> str:
        """Return what the action, which writes to the path, returns or fails with."""
        try:
            return action() or ""
        except OSError as error:
            extents = [extent for extents in self.files.values() for extent in extents]
            needed = sum(extent.length * len(extent.data) for extent in extents)
            room = f"the checkpoint has {needed:,} bytes; {_free(self.path)}"
            return f"{path}: {error.strerror or error} ({room})"
        except Exception as error:
            return f"{path}: {type(error).__name__}: {error}"


def _free(path: Path) -> str:
    """Return the free space as an error message says it; never fails itself."""
    try:
        return f"{safe_files.free_bytes(path):,} bytes are free there"
    except OSError as error:
        return f"how much is free there cannot be told: {error.strerror}"


def _leader(world: World, writers: str) -> int:
    """Return the rank that makes the file that this rank's data goes into."""
    return world.rank if writers == "rank" else world.node_of_rank.index(world.node)


def _copy(sources: Sequence[DataSource], kept: Array) -> Array:
    """Copy sources one after the other; the padding behind them stays zero.

    A device's memory is taken in pieces, as each of them is a copy already. Arrays are taken in
    stretches as long as can be: the C library copies a hundred megabytes past the caches, a fifth
    faster.
    """
    offset = 0
    for source in sources:
        step = max(1, len(source)) if isinstance(source, np.ndarray) else shard_file.CHUNK // WIDTH
        for start in range(0, len(source), step):
            end = min(start + step, len(source))
            kept[offset + start : offset + end] = source[start:end]
        offset += len(source)
    return kept


def _joined(sources: Sequence[DataSource]) -> list[DataSource]:
    """Return the sources, with arrays that follow one another in memory as one."""
    joined: list[DataSource] = []
    before: Array | None = None
    for source in filter(len, sources):  # where an empty array lies means nothing
        array: Array | None = source if isinstance(source, np.ndarray) else None
        if array is not None and before is not None and _end(before) == array.ctypes.data:
            array = as_strided(before, (len(before) + len(array),))
            joined.pop()
        joined.append(source if array is None else array)
        before = array
    return joined


def _end(array: Array) -> int:
    return int(array.ctypes.data + array.nbytes)


def _in_chunks(copy: Array) -> list[Array]:
    step = shard_file.CHUNK // WIDTH
    return [copy[start : start + step] for start in range(0, len(copy), step)]
