"""index.h5: every tensor whole, as virtual datasets over the shard files, and the piece table.

    /model/<name>, /optimizer/moment1/<name>, …       what of a shard file is missing shows as NaN
    /buffers/<name>                                   what a model keeps besides its parameters
    /pieces/tensor, rank, offset, start, stop, names, shapes
                                                      the table that hpczero itself reads by

It is made from the table alone, before there is any data. (docs/checkpoint-format.md)
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from hpczero.checkpoint import limits
from hpczero.checkpoint.manifest import ShardFile, TrainingState, slot_elements
from hpczero.checkpoint.piece_table import Table, Tensor
from hpczero.checkpoint.shard_file import SLOTS, Array, Damaged, group_of
from hpczero.hdf5.image import hdf5_image
from hpczero.hdf5.reader import UntrustedFile
from hpczero.parallel.layout import Slices
from hpczero.text import printable

_MOST_MAPPINGS = 1_000_000  # past that the view has the weights only: each costs 25 µs and 80 bytes
COLUMNS = {"tensor": 1, "rank": 1, "offset": 1, "start": 2, "stop": 2}  # and their dimensions
DATASETS = {f"pieces/{name}" for name in (*COLUMNS, "names", "shapes")}  # that every index has


# -- writing -------------------------------------------------------------------------------------


def attributes(
    state: TrainingState,
    spec: Mapping[str, Any],
    grid: Mapping[str, int],
    identity: Mapping[str, str],
) -> dict[str, Any]:
    """Return the attributes of an index. `identity`: what makes the run itself besides its spec."""
    values = {"format": state.format, "step": state.step, "spec": dict(spec), "grid": dict(grid)}
    return values | ({"identity": dict(identity)} if identity else {})


def write(
    path: Path,
    table: Table,
    shards: Sequence[ShardFile],
    buffers: Mapping[str, Array],
    attributes: Mapping[str, Any],
    slots: Sequence[str] = SLOTS,
) -> None:
    """Write a new file; `shards` say which file has which rank's data.

    ValueError: a checkpoint cannot hold these tensors or buffers.
    """
    _refuse_what_cannot_be_held(table.tensors, buffers)
    file_of = {
        data.rank: (shard.file, slot_elements(data)) for shard in shards for data in shard.ranks
    }
    with hdf5_image(path) as file:
        for key, value in attributes.items():
            file.attrs[key] = value if isinstance(value, int | str) else json.dumps(value)
        pieces = file.create_group("pieces")
        for name in COLUMNS:
            pieces.create_dataset(name, data=getattr(table, name).astype("<u8"))
        for name, values in texts(table).items():
            pieces.create_dataset(name, data=np.frombuffer(json.dumps(values).encode(), np.uint8))
        for name, buffer in buffers.items():
            file.create_dataset(f"buffers/{name}", data=buffer)
        for slot in slots_in_view(table, slots):
            for number in range(len(table.tensors)):
                _write_view(file, slot, number, table, file_of)


def texts(table: Table) -> dict[str, list[Any]]:
    """Return the parts of the piece table that are stored as JSON."""
    return {
        "names": [tensor.name for tensor in table.tensors],
        "shapes": [list(tensor.shape) for tensor in table.tensors],
    }


def slots_in_view(table: Table, slots: Sequence[str]) -> Sequence[str]:
    return slots if len(table.rank) * len(slots) <= _MOST_MAPPINGS else slots[:1]


def view_of_piece(table: Table, piece: int) -> tuple[int, int, int, Slices]:
    """Return rank, offset, elements and place in the view of a piece.

    A tensor without dimensions has the shape (1) there.
    """
    rank, offset, size = (int(column[piece]) for column in (table.rank, table.offset, table.sizes))
    return rank, offset, size, table.box(piece) or (slice(0, 1),)


def _write_view(
    file: h5py.File,
    slot: str,
    number: int,
    table: Table,
    file_of: Mapping[int, tuple[str, int]],
) -> None:
    tensor = table.tensors[number]
    space = h5py.h5s.create_simple(tensor.shape or (1,))
    properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    properties.set_fill_value(np.array(np.nan, "<f4"))
    for piece in table.pieces(number):
        rank, offset, size, box = view_of_piece(table, piece)
        name, length = file_of[rank]
        starts = tuple(cut.start for cut in box)
        space.select_hyperslab(starts, tuple(cut.stop - cut.start for cut in box))
        source = h5py.h5s.create_simple((length,))
        source.select_hyperslab((offset,), (size,))
        properties.set_virtual(space, name.encode(), f"/{group_of(rank)}/{slot}".encode(), source)
    space.select_all()
    links = h5py.h5p.create(h5py.h5p.LINK_CREATE)
    links.set_create_intermediate_group(True)
    path = f"{slot}/{tensor.name}".encode()
    h5py.h5d.create(file.id, path, h5py.h5t.IEEE_F32LE, space, properties, links)


# -- reading -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Index:
    """The parts of an index that are read."""

    table: Table
    buffers: dict[str, Array]
    identity: dict[str, str]  # what makes the run itself besides its spec


def read(path: Path, descriptor: int) -> Index:
    """Read an open index whose checksum is right; a stranger may have made it all the same.

    The HDF5 library has no part in this (`hdf5.reader`), nor has the whole-tensor view.
    OSError: it cannot be read.
    """
    try:
        file = UntrustedFile(descriptor)
        columns = [_values(file, name, "<u8", dims) for name, dims in COLUMNS.items()]
        tensors = _tensors(file)
        stored = dict(islice(file.datasets_below("buffers"), limits.MOST_BUFFERS + 1))
        _refuse_what_cannot_be_held(tensors, stored)
        buffers = {name: file.values(dataset) for name, dataset in stored.items()}
        return Index(_table(tensors, columns), buffers, _identity(file))
    except (ValueError, TypeError, RecursionError, MemoryError) as error:
        raise Damaged(f"{path}: it is no index of a checkpoint: {printable(str(error))}") from error


def _tensors(file: UntrustedFile) -> tuple[Tensor, ...]:
    names = _list_of_tensors(file, "names")
    shapes = _list_of_tensors(file, "shapes")
    if len(names) != len(shapes) or len(names) > limits.MOST_TENSORS:
        raise ValueError(f"{len(names):,} names and {len(shapes):,} shapes")
    return tuple(Tensor(name, tuple(shape)) for name, shape in zip(names, shapes, strict=True))


def _list_of_tensors(file: UntrustedFile, name: str) -> list[Any]:
    """Read what the piece table has of each tensor, if it is no more than that."""
    text = _values(file, name, "u1", 1).tobytes()
    if len(text) > limits.LONGEST_TEXT:
        raise ValueError(f"/pieces/{name} has {len(text):,} bytes, more than a model's names have")
    if text.count(b",") > 8 * limits.MOST_TENSORS:  # a shape has some, and a list takes 60 bytes
        raise ValueError(f"{name} of more than {limits.MOST_TENSORS:,} tensors")
    parsed = json.loads(text)
    if not isinstance(parsed, list):
        raise ValueError(f"{name} are no list")
    return parsed


def _identity(file: UntrustedFile) -> dict[str, str]:
    """Return the run's identity; nothing in a checkpoint of an older version."""
    parsed = json.loads(str(file.attributes.get("identity") or "{}"))
    if not isinstance(parsed, dict) or not all(isinstance(text, str) for text in parsed.values()):
        raise ValueError("its identity is no table of texts")
    return parsed


def _table(tensors: tuple[Tensor, ...], columns: Sequence[Array]) -> Table:
    """Return the piece table; ValueError: the columns are none of these tensors."""
    order = columns[0]
    start = columns[3]
    stop = columns[4]
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


def _values(file: UntrustedFile, name: str, dtype: str, dims: int) -> Array:
    dataset = file.dataset(f"pieces/{name}")
    if dataset.dtype != np.dtype(dtype) or len(dataset.shape) != dims:
        raise ValueError(f"/pieces/{name} has {dataset.dtype} and {len(dataset.shape)} dimensions")
    return file.values(dataset)


def _refuse_what_cannot_be_held(tensors: Sequence[Tensor], buffers: Mapping[str, Any]) -> None:
    """ValueError: a checkpoint cannot hold these tensors or these buffers, arrays or datasets."""
    described = {name: (limits.dtype_of(values), values.shape) for name, values in buffers.items()}
    if problem := limits.problem({tensor.name: tensor.shape for tensor in tensors}, described):
        raise ValueError(problem)
