"""index.h5: every tensor whole, as virtual datasets over the shard files, and the piece table (docs/checkpoint-format.md).

    /model/<name>, /optimizer/moment1/<name>, /optimizer/moment2/<name>    what of a shard file is missing shows as NaN
    /buffers/<name>                                                        what a model keeps besides its parameters
    /pieces/tensor, rank, offset, start, stop;  /pieces/names, shapes      the table that hpczero itself reads by

It is made from the table alone, before there is any data.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from hpczero.checkpoint import storable
from hpczero.checkpoint.files import Damaged, not_read
from hpczero.checkpoint.manifest import ShardFile, slot_elements
from hpczero.checkpoint.piece_table import Table, Tensor
from hpczero.checkpoint.shard_file import SLOTS, Array
from hpczero.hdf5.in_memory import made_in_memory
from hpczero.hdf5.reader import PlainFile
from hpczero.text import printable

_MOST_MAPPINGS = 1_000_000  # past that the view has the weights only: each costs 25 µs and 80 bytes
COLUMNS = {"tensor": 1, "rank": 1, "offset": 1, "start": 2, "stop": 2}  # and their dimensions
DATASETS = {f"pieces/{name}" for name in (*COLUMNS, "names", "shapes")}  # those that every index has


@dataclass(frozen=True)
class Index:
    """The parts of an index that are read. `identity`: what makes the run itself besides its spec."""

    table: Table
    buffers: dict[str, Array]
    identity: dict[str, str]


def write(path: Path, table: Table, shards: Sequence[ShardFile], buffers: Mapping[str, Array], attributes: Mapping[str, Any]) -> None:
    """A new file; `shards` say which file has which rank's data. ValueError: these tensors or buffers cannot be in a checkpoint."""
    described = {name: (storable.dtype_of(one), one.shape) for name, one in buffers.items()}
    if problem := _problem(table.tensors, described):
        raise ValueError(problem)
    file_of = {data.rank: (shard.file, slot_elements(data)) for shard in shards for data in shard.ranks}
    with made_in_memory(path) as file:
        for key, value in attributes.items():
            file.attrs[key] = value if isinstance(value, int | str) else json.dumps(value)
        pieces = file.create_group("pieces")
        for name in COLUMNS:
            pieces.create_dataset(name, data=getattr(table, name).astype("<u8"))
        pieces.create_dataset("names", data=np.frombuffer(json.dumps([tensor.name for tensor in table.tensors]).encode(), np.uint8))
        pieces.create_dataset("shapes", data=np.frombuffer(json.dumps([tensor.shape for tensor in table.tensors]).encode(), np.uint8))
        for name, values in buffers.items():
            file.create_dataset(f"buffers/{name}", data=values)
        for slot in slots_in_view(table):
            for number, tensor in enumerate(table.tensors):
                _view(file, slot, number, tensor, table, file_of)


def slots_in_view(table: Table) -> Sequence[str]:
    return SLOTS if len(table.rank) * len(SLOTS) <= _MOST_MAPPINGS else SLOTS[:1]


def _view(file: h5py.File, slot: str, number: int, tensor: Tensor, table: Table, file_of: Mapping[int, tuple[str, int]]) -> None:
    shape = tensor.shape or (1,)
    whole = h5py.h5s.create_simple(shape)
    properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    properties.set_fill_value(np.array(np.nan, "<f4"))
    for piece in table.pieces(number):
        rank, offset, size = int(table.rank[piece]), int(table.offset[piece]), int(table.sizes[piece])
        name, length = file_of[rank]
        box = table.box(piece) or (slice(0, 1),)
        whole.select_hyperslab(tuple(cut.start for cut in box), tuple(cut.stop - cut.start for cut in box))
        source = h5py.h5s.create_simple((length,))
        source.select_hyperslab((offset,), (size,))
        properties.set_virtual(whole, name.encode(), f"/rank-{rank:05d}/{slot}".encode(), source)
    whole.select_all()
    links = h5py.h5p.create(h5py.h5p.LINK_CREATE)
    links.set_create_intermediate_group(True)
    h5py.h5d.create(file.id, f"{slot}/{tensor.name}".encode(), h5py.h5t.IEEE_F32LE, whole, properties, links)


def read(path: Path, descriptor: int) -> Index:
    """Read an open index whose checksum is right; a stranger may have made it all the same.

    The HDF5 library has no part in this (`hdf5.reader`), nor has the whole-tensor view.
    """
    try:
        file = PlainFile(descriptor)
        columns = [_plain(file, name, "<u8", dims) for name, dims in COLUMNS.items()]
        names, shapes = (_list_of_tensors(file, name) for name in ("names", "shapes"))
        if len(names) != len(shapes) or len(names) > storable.MOST_TENSORS:
            raise ValueError(f"{len(names):,} names and {len(shapes):,} shapes")
        tensors = tuple(Tensor(name, tuple(shape)) for name, shape in zip(names, shapes, strict=True))
        found = list(islice(file.datasets_below("buffers"), storable.MOST_BUFFERS + 1))
        described = {name: (storable.dtype_of(one), one.shape) for name, one in found}
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
    if raw.count(b",") > 8 * storable.MOST_TENSORS:  # a shape has some, and a list takes 60 bytes
        raise ValueError(f"{name} of more than {storable.MOST_TENSORS:,} tensors")
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
    if len(found) > storable.LONGEST_TEXT:
        raise ValueError(f"/pieces/{name} has {len(found):,} bytes, more than a model's names have")
    return found


def _problem(tensors: Sequence[Tensor], buffers: Mapping[str, tuple[str, Sequence[int]]]) -> str:
    return storable.problem({tensor.name: tensor.shape for tensor in tensors}, buffers)
