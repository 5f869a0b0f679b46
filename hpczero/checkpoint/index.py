"""index.h5: every tensor whole, as virtual datasets over the shard files, and the piece table (docs/checkpoint-format.md).

    /model/<name>, /optimizer/moment1/<name>, /optimizer/moment2/<name>    what of a shard file is missing shows as NaN
    /buffers/<name>                                                        what a model keeps besides its parameters
    /pieces/tensor, rank, offset, start, stop;  /pieces/names, shapes      the table that hpczero itself reads by

It is made from the table alone, before there is any data.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from math import prod
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from hpczero.checkpoint import manifest
from hpczero.checkpoint.manifest import RankData, ShardFile, slot_elements
from hpczero.checkpoint.piece_table import Table, Tensor
from hpczero.checkpoint.shard_file import SLOTS, Array, Damaged, not_read
from hpczero.checkpoint.shards import WRONG, dataset, datasets_below, opened, plain
from hpczero.hdf5.in_memory import made_in_memory
from hpczero.hdf5.reader import PlainFile
from hpczero.text import printable

_MOST_MAPPINGS = 1_000_000  # past that the view has the weights only: each costs 25 µs and 80 bytes
COLUMNS = {"tensor": 1, "rank": 1, "offset": 1, "start": 2, "stop": 2}  # and their dimensions
DATASETS = {
    f"pieces/{name}" for name in (*COLUMNS, "names", "shapes")
}  # those that every index has


@dataclass(frozen=True)
class Index:
    """The parts of an index that are read. `identity`: what makes the run itself besides its spec."""

    table: Table
    buffers: dict[str, Array]
    identity: dict[str, str]


def write(
    path: Path,
    table: Table,
    shards: Sequence[ShardFile],
    buffers: Mapping[str, Array],
    attributes: Mapping[str, Any],
) -> None:
    """A new file; `shards` say which file has which rank's data. ValueError: these tensors or buffers cannot be in a checkpoint."""
    described = {name: (manifest.dtype_of(one), one.shape) for name, one in buffers.items()}
    if problem := _problem(table.tensors, described):
        raise ValueError(problem)
    file_of = {
        data.rank: (shard.file, slot_elements(data)) for shard in shards for data in shard.ranks
    }
    with made_in_memory(path) as file:
        for key, value in attributes.items():
            file.attrs[key] = value if isinstance(value, int | str) else json.dumps(value)
        pieces = file.create_group("pieces")
        for name in COLUMNS:
            pieces.create_dataset(name, data=getattr(table, name).astype("<u8"))
        pieces.create_dataset(
            "names",
            data=np.frombuffer(
                json.dumps([tensor.name for tensor in table.tensors]).encode(), np.uint8
            ),
        )
        pieces.create_dataset(
            "shapes",
            data=np.frombuffer(
                json.dumps([tensor.shape for tensor in table.tensors]).encode(), np.uint8
            ),
        )
        for name, values in buffers.items():
            file.create_dataset(f"buffers/{name}", data=values)
        for slot in slots_in_view(table):
            for number, tensor in enumerate(table.tensors):
                _view(file, slot, number, tensor, table, file_of)


def slots_in_view(table: Table) -> Sequence[str]:
    return SLOTS if len(table.rank) * len(SLOTS) <= _MOST_MAPPINGS else SLOTS[:1]


def _view(
    file: h5py.File,
    slot: str,
    number: int,
    tensor: Tensor,
    table: Table,
    file_of: Mapping[int, tuple[str, int]],
) -> None:
    shape = tensor.shape or (1,)
    whole = h5py.h5s.create_simple(shape)
    properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    properties.set_fill_value(np.array(np.nan, "<f4"))
    for piece in table.pieces(number):
        rank, offset, size = (
            int(table.rank[piece]),
            int(table.offset[piece]),
            int(table.sizes[piece]),
        )
        name, length = file_of[rank]
        box = table.box(piece) or (slice(0, 1),)
        whole.select_hyperslab(
            tuple(cut.start for cut in box), tuple(cut.stop - cut.start for cut in box)
        )
        source = h5py.h5s.create_simple((length,))
        source.select_hyperslab((offset,), (size,))
        properties.set_virtual(whole, name.encode(), f"/rank-{rank:05d}/{slot}".encode(), source)
    whole.select_all()
    links = h5py.h5p.create(h5py.h5p.LINK_CREATE)
    links.set_create_intermediate_group(True)
    h5py.h5d.create(
        file.id, f"{slot}/{tensor.name}".encode(), h5py.h5t.IEEE_F32LE, whole, properties, links
    )


def read(path: Path, descriptor: int) -> Index:
    """Read an open index whose checksum is right; a stranger may have made it all the same.

    The HDF5 library has no part in this (`hdf5.reader`), nor has the whole-tensor view.
    """
    try:
        file = PlainFile(descriptor)
        columns = [_plain(file, name, "<u8", dims) for name, dims in COLUMNS.items()]
        names, shapes = (_list_of_tensors(file, name) for name in ("names", "shapes"))
        if len(names) != len(shapes) or len(names) > manifest.MOST_TENSORS:
            raise ValueError(f"{len(names):,} names and {len(shapes):,} shapes")
        tensors = tuple(
            Tensor(name, tuple(shape)) for name, shape in zip(names, shapes, strict=True)
        )
        found = list(islice(file.datasets_below("buffers"), manifest.MOST_BUFFERS + 1))
        described = {name: (manifest.dtype_of(one), one.shape) for name, one in found}
        if problem := _problem(tensors, described):
            raise ValueError(problem)
        buffers = {name: file.values(one) for name, one in found}
        table, identity = _table(tensors, columns), _identity(file)
    except OSError as error:
        raise not_read(path, error) from error
    except (ValueError, TypeError, RecursionError, MemoryError) as error:
        raise Damaged(f"{path}: it is no index of a checkpoint: {printable(str(error))}") from error
    return Index(table, buffers, identity)


def _list_of_tensors(file: PlainFile, name: str) -> list[Any]:
    """Read what the piece table has of each tensor, if it is no more than that."""
    raw = _text(file, name)
    if raw.count(b",") > 8 * manifest.MOST_TENSORS:  # a shape has some, and a list takes 60 bytes
        raise ValueError(f"{name} of more than {manifest.MOST_TENSORS:,} tensors")
    found = json.loads(raw)
    if not isinstance(found, list):
        raise ValueError(f"{name} are no list")
    return found


def _identity(file: PlainFile) -> dict[str, str]:
    """Nothing in a checkpoint of an older version."""
    found = json.loads(str(file.attributes.get("identity") or "{}"))
    if not isinstance(found, dict) or not all(isinstance(one, str) for one in found.values()):
        raise ValueError("its identity is no table of texts")
    return found


def _table(tensors: tuple[Tensor, ...], columns: Sequence[Array]) -> Table:
    """ValueError: what the columns say is no piece table of these tensors."""
    order, start, stop = columns[0], columns[3], columns[4]
    rows, dims = len(order), max((len(tensor.shape) for tensor in tensors), default=0)
    if any(len(column) != rows for column in columns) or start.shape != stop.shape:
        raise ValueError("the columns of its piece table differ in length")
    if rows and (int(order.max()) >= len(tensors) or (order[1:] < order[:-1]).any()):
        raise ValueError("its piece table does not fit its tensors")
    if len({tensor.name for tensor in tensors}) < len(tensors):
        raise ValueError("a tensor is there twice")
    if start.shape[1] != dims:
        raise ValueError("its piece table has not as many dimensions as its tensors")
    return Table(tensors, *columns)


def _plain(file: PlainFile, name: str, dtype: str, dims: int) -> Array:
    found = file.dataset(f"pieces/{name}")
    if found.dtype != np.dtype(dtype) or len(found.shape) != dims:
        raise ValueError(f"/pieces/{name} has {found.dtype} and {len(found.shape)} dimensions")
    return file.values(found)


def _text(file: PlainFile, name: str) -> bytes:
    found = _plain(file, name, "u1", 1).tobytes()
    if len(found) > manifest.LONGEST_TEXT:
        raise ValueError(f"/pieces/{name} has {len(found):,} bytes, more than a model's names have")
    return found


def _problem(tensors: Sequence[Tensor], buffers: Mapping[str, tuple[str, Sequence[int]]]) -> str:
    return manifest.problem({tensor.name: tensor.shape for tensor in tensors}, buffers)


# Compare what other programs read of a checkpoint with what hpczero reads.
#
# That is the whole-tensor view of index.h5, its piece table by the HDF5 library, and the datasets of
# the shard files.
#
# hpczero reads none of these: it goes by the manifest and by the piece table as `hdf5.reader` has
# it. A stranger could make a view that leads elsewhere, or one that crashes the HDF5 library, so
# `verify` has this done in a process of its own (`apart`).
def problems(path: Path, table: Table, shards: Sequence[ShardFile]) -> Iterator[str]:
    """Yield what is in index.h5 that the piece table does not say."""
    file_of = {data.rank: shard.file for shard in shards for data in shard.ranks}
    missing = {
        f"{slot}/{tensor.name}": (slot, number)
        for slot in slots_in_view(table)
        for number, tensor in enumerate(table.tensors)
    }
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
        is_alike = (
            found.shape == (tensor.shape or (1,)) and found.dtype == "<f4" and np.isnan(fill[0])
        )
        return bool(is_alike) and seen == {_mapping(slot, piece, table, file_of) for piece in rows}
    except WRONG:
        return False


def _source(properties: h5py.h5p.PropDCID, index: int) -> tuple[object, ...]:
    """What is asked for before anything else of a view is: asking for its shape could already open the sources."""
    here, there = properties.get_virtual_vspace(index), properties.get_virtual_srcspace(index)
    source = properties.get_virtual_filename(index), properties.get_virtual_dsetname(index)
    return (
        *source,
        here.get_select_bounds(),
        there.get_select_bounds(),
        here.get_select_npoints(),
        there.get_select_npoints(),
    )


def _mapping(slot: str, piece: int, table: Table, file_of: dict[int, str]) -> tuple[object, ...]:
    rank, offset, size, box = (
        int(table.rank[piece]),
        int(table.offset[piece]),
        int(table.sizes[piece]),
        table.box(piece) or (slice(0, 1),),
    )
    here = tuple(cut.start for cut in box), tuple(cut.stop - 1 for cut in box)
    return (
        file_of[rank],
        f"/rank-{rank:05d}/{slot}",
        here,
        ((offset,), (offset + size - 1,)),
        size,
        size,
    )


def problem_of_shard(path: Path, shard: ShardFile) -> str:
    """Whether the datasets of a shard file, and nothing else, lie where its manifest says."""
    known = {
        f"rank-{data.rank:05d}/{name}": (shape, dtype, place)
        for data in shard.ranks
        for name, shape, dtype, place in _datasets_of(data)
    }
    try:
        with opened(path) as file:
            if file.userblock_size:
                return "it has a user block"
            if other := next((name for name, _ in datasets_below(file) if name not in known), ""):
                return f"/{other} does not belong there"
            for name, (shape, dtype, place) in known.items():
                found = dataset(file, name)
                if (
                    found.is_virtual
                    or found.external
                    or found.chunks
                    or found.shape != shape
                    or found.dtype != np.dtype(dtype)
                ):
                    return f"/{name} is no plain dataset of {shape} {np.dtype(dtype).name} in this file"
                if found.size and found.id.get_offset() != place:
                    return f"/{name} is not at byte {place}, as the manifest says"
    except WRONG as error:
        return f"it is no HDF5 file of a checkpoint: {error}"
    return ""


def _datasets_of(data: RankData) -> list[tuple[str, tuple[int, ...], str, int]]:
    """Name, shape, dtype and place of a rank's datasets."""
    slots = [
        (slot, (slot_elements(data),), "<f4", place)
        for slot, place in zip(SLOTS, data.data, strict=True)
    ]
    return [*slots, ("checksums", (len(SLOTS), data.extent.blocks), "<u8", data.checksums)]
