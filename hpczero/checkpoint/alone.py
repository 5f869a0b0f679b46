"""A checkpoint written by one process, for any grid of ranks: what an import makes. (A run's are written by all its ranks: `write`.)"""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from hpczero import __version__
from hpczero.checkpoint import directory, index, manifest, shard_file
from hpczero.checkpoint.manifest import INDEX, Content, IndexFile, RankData, ShardFile, State
from hpczero.checkpoint.piece_table import Table
from hpczero.checkpoint.shard_file import SLOTS, Array, Extent, Writer

Read = Callable[[int, int], Iterable[Array]]  # rank, slot -> its data, as `shard.Writer.write` takes it


@dataclass(frozen=True)
class Made:
    """All of a checkpoint but its data. `files`: the ranks whose data each shard file has."""

    state: State
    spec: Mapping[str, Any]
    grid: Mapping[str, int]
    table: Table
    files: Sequence[Sequence[int]]
    buffers: Mapping[str, Array] = field(default_factory=dict)


def save(checkpoints: Path, made: Made, read: Read) -> Path:
    """A new folder in `checkpoints`. What cannot be finished is removed."""
    path = directory.begin(checkpoints, made.state.step)
    try:
        elements = made.table.elements(sum(map(len, made.files)))
        shards = [_shard(path, f"shard-{number:05d}.h5", {rank: elements[rank] for rank in ranks}, read) for number, ranks in enumerate(made.files)]
        attributes = {"format": made.state.format, "step": made.state.step, "spec": dict(made.spec), "grid": dict(made.grid)}
        index.write(path / INDEX, made.table, shards, made.buffers, attributes)
        content = Content(
            format=made.state.format, hpczero=__version__, created=datetime.now(UTC).isoformat(timespec="seconds"),
            state=made.state, spec=dict(made.spec), grid=dict(made.grid), ranks=len(elements),
            index=IndexFile(**_sealed(path / INDEX, "checksum", ())), shards=shards,
        )  # fmt: skip
        manifest.write(path, content)
    except BaseException:
        directory.remove(path)
        raise
    return path


def _shard(path: Path, name: str, elements: Mapping[int, int], read: Read) -> ShardFile:
    extents = shard_file.make(path / name, elements)
    for extent in extents:
        writer = Writer(path / name, extent, direct=True)
        try:
            for slot in range(len(SLOTS)):
                writer.write(slot, read(extent.rank, slot))
            writer.finish()
        finally:
            writer.close()
    sealed = _sealed(path / name, "rest", [place for extent in extents for place in extent.ranges()])
    return ShardFile(file=name, ranks=[_described(extent) for extent in extents], **sealed)


def _described(extent: Extent) -> RankData:
    return RankData(rank=extent.rank, elements=extent.elements, data=list(extent.data), checksums=extent.checksums)


def _sealed(path: Path, checksum: str, data: Iterable[shard_file.Range]) -> dict[str, Any]:
    """The size of a file that is on the disk now, and the checksum of all of it but the data."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
        size = os.fstat(file).st_size
        return {"size": size, checksum: shard_file.rest(file, size, data)}
    finally:
        os.close(file)
