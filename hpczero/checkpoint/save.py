"""Saving a checkpoint, all ranks together.

begin       rank 0 makes the folder, the first rank of every writer its shard file; all learn where their data goes
            (asynchronous: every rank copies what it owns, and a thread of its own does what follows; MPI is not called there)
write       every rank writes its data, and rank 0 also the index
conclude    once all have written: checksums, fsync, final names; then rank 0 writes the manifest, which makes it a checkpoint

Whatever fails on whichever rank ends the save on all of them: there is no manifest, and what was written is removed.
"""

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided

from hpczero import env
from hpczero.checkpoint import directory, index, manifest, shard_file
from hpczero.checkpoint.manifest import (
    INDEX,
    Content,
    IndexFile,
    RankData,
    ShardFile,
    TrainingState,
)
from hpczero.checkpoint.piece_table import Table
from hpczero.checkpoint.shard_file import (
    SLOTS,
    WIDTH,
    Array,
    DataSource,
    Extent,
    Writer,
    aligned,
    bounce,
    empty_chunks,
    padded,
)
from hpczero.comm.objects import run_while_polling
from hpczero.comm.world import World
from hpczero.errors import HpczeroError
from hpczero.safe_files import rename

_REST = 3.0  # how long a background writer pauses after each chunk, in times of what that took


class SaveFailed(HpczeroError):
    """A checkpoint could not be written; the ones before it are what they were."""


@dataclass(frozen=True)
class SaveJob:
    """What is the same for all checkpoints of a run. `table` is asked for on rank 0 only."""

    checkpoints: Path
    spec: Mapping[str, Any]
    grid: Mapping[str, int]
    table: Callable[[], Table]
    writers: str  # "node", "rank"
    identity: Mapping[str, str] = field(default_factory=dict)  # besides the spec


@dataclass(frozen=True)
class Saved:
    """A checkpoint that is complete."""

    step: int
    path: Path
    size: int
    seconds: float  # from its beginning


class Saver:
    """Of one run, on every rank; at most one save is under way."""

    def __init__(
        self, world: World, job: SaveJob, sources: Sequence[Sequence[DataSource]], behind: bool
    ) -> None:
        """Collective. `sources`: for each slot the elements that this rank owns, as float32, in the order of `table.stored`: each save takes what
        is in that memory then. `behind`: a save may be asynchronous; what it copies into has memory from now on.
        """
        self.world, self.job = world, job
        self.sources, self._alive = (
            [_joined(of_slot) for of_slot in sources],
            sources,
        )  # what is joined keeps only its first array alive
        elements = sum(map(len, self.sources[0]))
        self._leader = _leader(world, job.writers)
        self._writes_file = self._leader == world.rank
        self._ranks = self._gathered(
            [self._leader, elements]
        )  # of each rank: who makes its file, how many elements it owns
        leaders = sorted({leader for leader, _ in self._ranks})
        self._names = {
            leader: f"shard-{number:05d}.h5" for number, leader in enumerate(leaders)
        }  # leader -> file
        self._copies = [aligned(padded(elements * WIDTH)) for _ in SLOTS] if behind else []
        for copy in self._copies:
            copy.fill(0)  # the first use of memory takes long
        self._table: Table | None = None
        self._save: _Save | None = None

    @property
    def in_flight(self) -> bool:
        """Alike on all ranks."""
        return self._save is not None

    @property
    def written(self) -> bool:
        """Whether this rank has nothing more to write of the save under way."""
        return self._save is None or not self._save.thread or not self._save.thread.is_alive()

    @property
    def copied(self) -> int:
        """Bytes of the memory that copies are kept in."""
        return sum(copy.nbytes for copy in self._copies)

    def begin(self, state: TrainingState, buffers: Mapping[str, Array], asynchronous: bool) -> None:
        """Collective. The sources are copied (or written) when this returns. SaveFailed, on all ranks alike, if it cannot begin."""
        assert self._save is None, "a save is under way"
        copies: list[list[Array]] = []

        def copy(*slots: int) -> None:
            """While files are made: that takes as long as their disk likes."""
            if asynchronous:
                copies.extend(
                    _whole(_copy(self.sources[slot], self._copies[slot].view(np.float32)))
                    for slot in slots
                )

        begin = lambda: (  # noqa: E731
            str(directory.begin(self.job.checkpoints, state.step)) if self.world.rank == 0 else ""
        )
        path = Path(self._run_on_all(begin, meanwhile=partial(copy, 0))[0])
        mine = {
            rank: count
            for rank, (leader, count) in enumerate(self._ranks)
            if leader == self.world.rank
        }
        own = path / f"{self._names[self._leader]}.new"
        make = lambda: (  # noqa: E731
            [RankData.of(extent).model_dump() for extent in shard_file.make(own, mine)]
            if self._writes_file
            else []
        )
        made = self._run_on_all(make, path, partial(copy, 1, 2))
        extents = {
            data["rank"]: RankData(**data).extent for of_leader in made for data in of_leader
        }
        files = {
            leader: [extents[rank] for rank, (led, _) in enumerate(self._ranks) if led == leader]
            for leader in self._names
        }
        save = _Save(path, state, time.monotonic(), files, extents[self.world.rank])
        self._save = save
        if asynchronous:
            save.thread = threading.Thread(
                target=self._write,
                args=(save, copies, buffers, _REST),
                name="hpczero-checkpoint",
                daemon=True,
            )
            try:
                save.thread.start()
            except RuntimeError as error:  # no more threads: said on all ranks, by `conclude`
                save.thread, save.error = None, f"{path}: {error}"
        else:
            empty = self._empty_chunks()
            chunks = [bounce(of_slot, empty) for of_slot in self.sources]
            run_while_polling(self.world, lambda: self._write(save, chunks, buffers, rest=0.0))

    def _empty_chunks(self) -> Iterator[Array]:
        """Of the copies' memory, where there is any: its pages were used before. What is behind a copy's elements stays zero."""
        assert len(SLOTS) >= shard_file.CHUNKS
        if self._copies and self._copies[0].nbytes >= shard_file.CHUNK + shard_file.PAGE:
            return cycle([copy[: shard_file.CHUNK].view(np.float32) for copy in self._copies])
        return empty_chunks()

    def conclude(self) -> Saved:
        """Collective. Waits until all have written, and makes it a checkpoint. SaveFailed, on all ranks alike, if any of them failed."""
        save, self._save = self._save, None
        assert save is not None, "no save is under way"
        save.hurried.set()
        run_while_polling(self.world, lambda: save.thread.join() if save.thread else None)
        self._agree(self._gathered(save.error), save.path)
        own = self._run_on_all(
            lambda: self._finish_file(save) if self._writes_file else None, save.path
        )
        shards = [ShardFile.model_validate_json(made) for made in own if made]
        size = self._run_on_all(
            lambda: self._commit(save, shards) if self.world.rank == 0 else 0, save.path
        )[0]
        return Saved(save.state.step, save.path, size, time.monotonic() - save.begun)

    def _write(
        self, save: "_Save", chunks: Sequence[Any], buffers: Mapping[str, Array], rest: float
    ) -> None:
        """Without MPI."""
        shard_path, index_path = (
            save.path / f"{self._names[self._leader]}.new",
            save.path / f"{INDEX}.new",
        )

        def write_both() -> str:
            with ThreadPoolExecutor(1) as beside:
                write_index = (
                    partial(self._write_index, index_path, save, buffers)
                    if self.world.rank == 0
                    else lambda: None
                )
                index_error = beside.submit(save.error_of, index_path, write_index)
                return (
                    save.error_of(
                        shard_path, lambda: self._write_data(shard_path, save, chunks, rest)
                    )
                    or index_error.result()
                )

        save.error = save.error_of(save.path, write_both)

    def _write_data(self, path: Path, save: "_Save", chunks: Sequence[Any], rest: float) -> None:
        writer = Writer(path, save.extent, direct=True, rest=rest, pause=save.hurried.wait)
        try:
            for slot, of_slot in enumerate(chunks):
                writer.write(slot, of_slot)
            writer.finish()
        finally:
            writer.close()

    def _write_index(self, path: Path, save: "_Save", buffers: Mapping[str, Array]) -> None:
        if self._table is None:
            self._table = self.job.table()
        shards = [
            _shard_file(self._names[leader], extents) for leader, extents in save.files.items()
        ]
        attributes = {
            "format": save.state.format,
            "step": save.state.step,
            "spec": dict(self.job.spec),
            "grid": dict(self.job.grid),
        }
        if self.job.identity:
            attributes["identity"] = dict(self.job.identity)
        index.write(path, self._table, shards, buffers, attributes)
        save.index = _file_of(path)

    def _finish_file(self, save: "_Save") -> str:
        name = self._names[self.world.rank]
        temporary, extents = save.path / f"{name}.new", save.files[self.world.rank]
        handle = os.open(temporary, os.O_RDONLY)
        try:
            os.fsync(handle)
            size = os.fstat(handle).st_size
            rest = shard_file.rest(
                handle, size, (place for extent in extents for place in extent.ranges())
            )
        finally:
            os.close(handle)
        rename(temporary, save.path / name)
        return _shard_file(name, extents, size, rest).model_dump_json()

    def _commit(self, save: "_Save", shards: Sequence[ShardFile]) -> int:
        """Rank 0. Bytes of the checkpoint."""
        assert save.index is not None
        rename(save.path / f"{INDEX}.new", save.path / INDEX)
        created = datetime.now(UTC).isoformat(timespec="seconds")
        content = Content(
            format=save.state.format, hpczero=env.VERSION, created=created, state=save.state, spec=dict(self.job.spec), grid=dict(self.job.grid),
            ranks=self.world.size, index=save.index, shards=list(shards),
        )  # fmt: skip
        manifest.write(save.path, content)
        return content.size

    def _run_on_all(
        self,
        action: Callable[[], Any],
        path: Path | None = None,
        meanwhile: Callable[[], object] = lambda: None,
    ) -> list[Any]:
        """Every rank's result, of what JSON can carry; what fails on one fails on all."""
        result, error = None, ""
        try:
            result = run_while_polling(self.world, action, meanwhile)
        except (OSError, RuntimeError, MemoryError, HpczeroError) as problem:  # of HDF5
            where = getattr(problem, "filename", None) or path or self.job.checkpoints
            error = (
                f"{where}: {getattr(problem, 'strerror', None) or problem} ({_free(Path(where))})"
            )
        found = self._gathered([result, error])
        self._agree([text for _, text in found], path)
        return [own for own, _ in found]

    def _agree(self, errors: Sequence[str], path: Path | None) -> None:
        """`errors`: of all ranks."""
        failed = [(rank, text) for rank, text in enumerate(errors) if text]
        if not failed:
            return
        self._save = None
        run_while_polling(
            self.world, lambda: self._drop(path) if self.world.rank == 0 and path else None
        )
        rank, text = failed[0]
        others = f" (and {len(failed) - 1} other ranks)" if len(failed) > 1 else ""
        raise SaveFailed(
            f"the checkpoint could not be saved: rank {rank} on {self.world.hosts[rank]}{others}: {text}"
        )

    def _drop(self, path: Path) -> None:
        with contextlib.suppress(OSError):
            directory.remove(path)

    def _gathered(self, value: Any) -> list[Any]:
        found: list[Any] = self.world.broadcast_object(self.world.gather_objects(value))
        return found


@dataclass
class _Save:
    """One that is under way: what rank writes where, and how far it came."""

    path: Path
    state: TrainingState
    begun: float
    files: Mapping[int, Sequence[Extent]]  # leader -> what is in its file
    extent: Extent
    hurried: threading.Event = field(
        default_factory=threading.Event
    )  # it is waited for: no more pauses
    thread: threading.Thread | None = None
    index: IndexFile | None = None
    error: str = "its writer did not come to an end"  # what a writer that dies leaves; the one that ends well takes it away

    def error_of(self, path: Path, action: Callable[[], str | None]) -> str:
        """What the action, which writes there, returns or fails with."""
        try:
            return action() or ""
        except OSError as error:
            needed = sum(
                extent.length * len(SLOTS) for extents in self.files.values() for extent in extents
            )
            return f"{path}: {error.strerror or error} (the checkpoint has {needed:,} bytes; {_free(self.path)})"
        except Exception as error:
            return f"{path}: {type(error).__name__}: {error}"


def _free(path: Path) -> str:
    """For what is said of a failure: a file system that is gone is no reason for another one."""
    try:
        return f"{directory.free_bytes(path):,} bytes are free there"
    except OSError as error:
        return f"how much is free there cannot be told: {error.strerror}"


def _leader(world: World, writers: str) -> int:
    """Who makes the file that this rank's data goes into."""
    return world.rank if writers == "rank" else world.node_of_rank.index(world.node)


def _copy(sources: Sequence[DataSource], kept: Array) -> Array:
    """One after the other; the padding behind them stays zero. Of a device in pieces, as what it gives of its memory is a copy already; arrays in
    stretches as long as can be: the C library copies a hundred megabytes past the caches, a fifth faster.
    """
    place = 0
    for source in sources:
        step = max(1, len(source)) if isinstance(source, np.ndarray) else shard_file.CHUNK // WIDTH
        for start in range(0, len(source), step):
            end = min(start + step, len(source))
            kept[place + start : place + end] = source[start:end]
        place += len(source)
    return kept


def _joined(sources: Sequence[DataSource]) -> list[DataSource]:
    """Arrays that follow one another in memory as one."""
    joined: list[DataSource] = []
    before: Array | None = None
    for source in filter(len, sources):  # where an empty array lies means nothing
        array: Array | None = source if isinstance(source, np.ndarray) else None
        if (
            array is not None
            and before is not None
            and before.ctypes.data + before.nbytes == array.ctypes.data
        ):
            array = as_strided(before, (len(before) + len(array),))
            joined.pop()
        joined.append(source if array is None else array)
        before = array
    return joined


def _whole(copy: Array) -> list[Array]:
    step = shard_file.CHUNK // WIDTH
    return [copy[start : start + step] for start in range(0, len(copy), step)]


def _file_of(path: Path) -> IndexFile:
    """Of a file that is on the disk now."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
        size = os.fstat(handle).st_size
        return IndexFile(size=size, checksum=shard_file.rest(handle, size, ()))
    finally:
        os.close(handle)


def _shard_file(
    name: str, extents: Sequence[Extent], size: int = 0, rest: str = "0" * 16
) -> ShardFile:
    return ShardFile(
        file=name, size=size, rest=rest, ranks=[RankData.of(extent) for extent in extents]
    )
