"""Compare what other programs read of a checkpoint with what hpczero reads.

That is the whole-tensor view of index.h5, its piece table by the HDF5 library, and the datasets of
the shard files.

hpczero reads none of these: it goes by the manifest and by the piece table as `hdf5.reader` has
it. A stranger could make a view that leads elsewhere, or one that crashes the HDF5 library, so
`verify` has this done in a process of its own (`apart`).
"""

import json
from collections.abc import Iterator, Sequence
from math import prod
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from hpczero.checkpoint.index import COLUMNS, DATASETS, slots_in_view
from hpczero.checkpoint.inside import WRONG, dataset, datasets_below, opened, plain
from hpczero.checkpoint.manifest import RankData, ShardFile, slot_elements
from hpczero.checkpoint.piece_table import Table
from hpczero.checkpoint.shard_file import SLOTS


def problems(path: Path, table: Table, shards: Sequence[ShardFile]) -> Iterator[str]:
    """Yield what is in index.h5 that the piece table does not say."""
    file_of = {data.rank: shard.file for shard in shards for data in shard.ranks}
    missing = {f"{slot}/{tensor.name}": (slot, number) for slot in slots_in_view(table) for number, tensor in enumerate(table.tensors)}
    try:
        with opened(path) as file:
            if file.userblock_size:
                yield "it has a user block"
            yield from _of_table(file, table)
            for name, found in datasets_below(file):
                place = missing.pop(name, None)
                if place and not _is_view(found, *place, table, file_of):
                    yield f"/{name} is not a view of this tensor's pieces"
                elif not place and name not in DATASETS and not name.startswith("buffers/"):
                    yield f"/{name} does not belong there"
    except WRONG as error:
        yield f"its view cannot be read: {error}"
    else:
        yield from (f"/{name} is not there" for name in missing)


def _of_table(file: h5py.File, table: Table) -> Iterator[str]:
    for column in COLUMNS:
        if not np.array_equal(plain(file, f"pieces/{column}"), getattr(table, column)):
            yield f"/pieces/{column} is another one for the HDF5 library"
    texts = {
        "names": [tensor.name for tensor in table.tensors],
        "shapes": [list(tensor.shape) for tensor in table.tensors],
    }
    for name, expected in texts.items():
        if json.loads(plain(file, f"pieces/{name}", "u1", 1).tobytes()) != expected:
            yield f"/pieces/{name} is another one for the HDF5 library"


def _is_view(found: Any, slot: str, number: int, table: Table, file_of: dict[int, str]) -> bool:
    tensor, rows = table.tensors[number], table.pieces(number)
    try:
        properties, fill = found.get_create_plist(), np.zeros(1, "<f4")
        properties.get_fill_value(fill)
        if properties.get_layout() == h5py.h5d.VIRTUAL:
            seen = {_source(properties, index) for index in range(properties.get_virtual_count())}
        else:
            seen = {()} if prod(found.shape) else set()
        is_alike = found.shape == (tensor.shape or (1,)) and found.dtype == "<f4" and np.isnan(fill[0])
        return bool(is_alike) and seen == {_mapping(slot, piece, table, file_of) for piece in rows}
    except WRONG:
        return False


def _source(properties: h5py.h5p.PropDCID, index: int) -> tuple[object, ...]:
    """What is asked for before anything else of a view is: asking for its shape could already open the sources."""
    here, there = properties.get_virtual_vspace(index), properties.get_virtual_srcspace(index)
    source = properties.get_virtual_filename(index), properties.get_virtual_dsetname(index)
    return *source, here.get_select_bounds(), there.get_select_bounds(), here.get_select_npoints(), there.get_select_npoints()


def _mapping(slot: str, piece: int, table: Table, file_of: dict[int, str]) -> tuple[object, ...]:
    rank, offset, size, box = int(table.rank[piece]), int(table.offset[piece]), int(table.sizes[piece]), table.box(piece) or (slice(0, 1),)
    here = tuple(cut.start for cut in box), tuple(cut.stop - 1 for cut in box)
    return file_of[rank], f"/rank-{rank:05d}/{slot}", here, ((offset,), (offset + size - 1,)), size, size


def problem_of_shard(path: Path, shard: ShardFile) -> str:
    """Whether the datasets of a shard file, and nothing else, lie where its manifest says."""
    known = {f"rank-{data.rank:05d}/{name}": (shape, dtype, place) for data in shard.ranks for name, shape, dtype, place in _datasets_of(data)}
    try:
        with opened(path) as file:
            if file.userblock_size:
                return "it has a user block"
            if other := next((name for name, _ in datasets_below(file) if name not in known), ""):
                return f"/{other} does not belong there"
            for name, (shape, dtype, place) in known.items():
                found = dataset(file, name)
                if found.is_virtual or found.external or found.chunks or found.shape != shape or found.dtype != np.dtype(dtype):
                    return f"/{name} is no plain dataset of {shape} {np.dtype(dtype).name} in this file"
                if found.size and found.id.get_offset() != place:
                    return f"/{name} is not at byte {place}, as the manifest says"
    except WRONG as error:
        return f"it is no HDF5 file of a checkpoint: {error}"
    return ""


def _datasets_of(data: RankData) -> list[tuple[str, tuple[int, ...], str, int]]:
    """Name, shape, dtype and place of a rank's datasets."""
    slots = [(slot, (slot_elements(data),), "<f4", place) for slot, place in zip(SLOTS, data.data, strict=True)]
    return [*slots, ("checksums", (len(SLOTS), data.extent.blocks), "<u8", data.checksums)]
