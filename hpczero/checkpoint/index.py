"""index.h5: every tensor whole, as virtual datasets over the shard files, and the piece table (docs/checkpoint-format.md).

    /model/<name>, /optimizer/moment1/<name>, /optimizer/moment2/<name>    what of a shard file is missing shows as NaN
    /buffers/<name>                                                        what a model keeps besides its parameters
    /pieces/tensor, rank, offset, start, stop;  /pieces/names, shapes      the table that hpczero itself reads by

It is made from the table alone, before there is any data.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from hpczero.checkpoint import storable
from hpczero.checkpoint.files import Damaged
from hpczero.checkpoint.in_memory import made_in_memory
from hpczero.checkpoint.inside import WRONG, datasets_below, opened, plain
from hpczero.checkpoint.manifest import INDEX, ShardFile, slot_elements
from hpczero.checkpoint.shard import SLOTS, Array
from hpczero.checkpoint.table import Table, Tensor
from hpczero.spec.show import printable

_MOST_MAPPINGS = 1_000_000  # past that the view has the weights only: each costs 25 µs and 80 bytes
_COLUMNS = {"tensor": 1, "rank": 1, "offset": 1, "start": 2, "stop": 2}  # and their dimensions
DATASETS = {f"pieces/{name}" for name in (*_COLUMNS, "names", "shapes")}  # those that every index has


def write(path: Path, table: Table, shards: Sequence[ShardFile], buffers: Mapping[str, Array], attributes: Mapping[str, Any]) -> None:
    """A new file; `shards` say which file has which rank's data. ValueError: these tensors or buffers cannot be in a checkpoint."""
    if problem := _problem(table.tensors, buffers):
        raise ValueError(problem)
    file_of = {data.rank: (shard.file, slot_elements(data)) for shard in shards for data in shard.ranks}
    with made_in_memory(path) as file:
        file.attrs.update({key: value if isinstance(value, int | str) else json.dumps(value) for key, value in attributes.items()})
        pieces = file.create_group("pieces")
        for name in _COLUMNS:
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


def read(folder: Path) -> tuple[Table, dict[str, Array]]:
    """The table and the buffers, of a file whose checksum is right; a stranger may have made it all the same."""
    path = folder / INDEX
    try:
        with opened(path) as file:
            columns = [plain(file, f"pieces/{name}", "<u8", dims) for name, dims in _COLUMNS.items()]
            names, shapes = (json.loads(plain(file, f"pieces/{name}", "u1", 1).tobytes()) for name in ("names", "shapes"))
            tensors = tuple(Tensor(name, tuple(shape)) for name, shape in zip(names, shapes, strict=True))
            buffers = {name: plain(file, f"buffers/{name}") for name, _ in datasets_below(file, "buffers")}
            if problem := _problem(tensors, buffers):
                raise ValueError(problem)
    except WRONG as error:
        raise Damaged(f"{path}: it is no index of a checkpoint: {printable(str(error))}") from error
    rows = len(columns[0])
    if any(len(column) != rows for column in columns) or columns[3].shape != columns[4].shape:
        raise Damaged(f"{path}: the columns of its piece table differ in length")
    order = columns[0]
    if len({tensor.name for tensor in tensors}) < len(tensors) or (rows and (int(order.max()) >= len(tensors) or (order[1:] < order[:-1]).any())):
        raise Damaged(f"{path}: its piece table does not fit its tensors")
    if columns[3].shape[1] != max((len(tensor.shape) for tensor in tensors), default=0):
        raise Damaged(f"{path}: its piece table has not as many dimensions as its tensors")
    return Table(tensors, *columns), buffers


def _problem(tensors: Sequence[Tensor], buffers: Mapping[str, Array]) -> str:
    shapes = {tensor.name: tensor.shape for tensor in tensors}
    return storable.problem(shapes, {name: (storable.dtype_of(values), values.shape) for name, values in buffers.items()})
