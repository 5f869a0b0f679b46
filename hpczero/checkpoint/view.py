"""Whether what other programs read of a checkpoint is what hpczero reads: the whole-tensor view of index.h5, and the datasets of the shard files.

hpczero itself reads neither: it goes by the manifest and the piece table. A stranger could make a view that leads elsewhere.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import h5py
import numpy as np

from hpczero.checkpoint.index import slots_in_view
from hpczero.checkpoint.inside import WRONG, inside
from hpczero.checkpoint.manifest import ShardFile, slot_elements
from hpczero.checkpoint.shard import SLOTS
from hpczero.checkpoint.table import Table


def problems(path: Path, table: Table, shards: Sequence[ShardFile]) -> Iterator[str]:
    """What of the view in index.h5 does not say what the piece table says."""
    file_of = {data.rank: shard.file for shard in shards for data in shard.ranks}
    try:
        with h5py.File(path, "r", locking=False) as file:
            for slot in slots_in_view(table):
                for number in range(len(table.tensors)):
                    if not _is_view(file, slot, number, table, file_of):
                        yield f"/{slot}/{table.tensors[number].name} is not a view of this tensor's pieces"
    except WRONG as error:
        yield f"its view cannot be read: {error}"


def _is_view(file: h5py.File, slot: str, number: int, table: Table, file_of: dict[int, str]) -> bool:
    tensor, rows = table.tensors[number], table.pieces(number)
    try:
        found = inside(file, f"{slot}/{tensor.name}")
        properties = found.id.get_create_plist()
        if properties.get_layout() == h5py.h5d.VIRTUAL:
            seen = {_source(properties, index) for index in range(properties.get_virtual_count())}
        else:
            seen = {()} if found.size else set()
        return seen == {_mapping(slot, piece, table, file_of) for piece in rows} and found.shape == (tensor.shape or (1,)) and found.dtype == "<f4"
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
    """Whether the datasets of a shard file lie where its manifest says."""
    try:
        with h5py.File(path, "r", locking=False) as file:
            for data in shard.ranks:
                for slot, place in zip(SLOTS, data.data, strict=True):
                    found = inside(file, f"rank-{data.rank:05d}/{slot}")
                    if found.is_virtual or found.external or found.shape != (slot_elements(data),) or found.dtype != np.dtype("<f4"):
                        return f"/rank-{data.rank:05d}/{slot} is no dataset of {slot_elements(data)} float32 in this file"
                    if found.size and found.id.get_offset() != place:
                        return f"/rank-{data.rank:05d}/{slot} is not at byte {place}, as the manifest says"
    except WRONG as error:
        return f"it is no HDF5 file of a checkpoint: {error}"
    return ""
