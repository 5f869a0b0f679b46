"""Making a checkpoint of safetensors files, at step 0: training begins with weights from elsewhere.

The moments are zero. `save` writes a checkpoint for any grid of ranks by one process; those of runs
are written by all ranks (`checkpoint.save`).
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from hpczero.checkpoint import directory, index, limits, manifest, shard_file
from hpczero.checkpoint.load import STRETCH
from hpczero.checkpoint.manifest import INDEX, IndexFile, ShardFile, TrainingState
from hpczero.checkpoint.piece_table import RankShard, Table, Tensor
from hpczero.checkpoint.safetensors import BUFFERS, FLOATS, Entry, SafetensorsFile, to_float32
from hpczero.checkpoint.shard_file import (
    CHUNK,
    SLOTS,
    WIDTH,
    Advance,
    Array,
    empty_chunks,
    in_chunks,
    write_data,
)
from hpczero.checkpoint.views import View, ViewRange, as_they_are, sources, transposed
from hpczero.errors import InputError
from hpczero.model.families import known, layers
from hpczero.model.shapes import ZEROS, Layer, Parameter
from hpczero.parallel.layout import unit_layout
from hpczero.spec.schema import Spec
from hpczero.text import printable

_SHOWN = 8


@dataclass(frozen=True)
class SourceTensor:
    """A tensor, and the file that it is in."""

    file: SafetensorsFile
    entry: Entry

    def stretches(self, first: int = 0, last: int | None = None) -> Iterator[Array]:
        return self.file.stretches(self.entry, STRETCH, first, last)

    def whole(self) -> Array:
        values = np.empty(self.entry.size, self.entry.numpy)
        filled = 0
        for stretch in self.stretches():
            values[filled : filled + len(stretch)] = stretch
            filled += len(stretch)
        return values


def tensors_of(files: Iterable[SafetensorsFile]) -> dict[str, SourceTensor]:
    """Return what open files have, by name; InputError: two of them have the same."""
    found: dict[str, SourceTensor] = {}
    for file in files:
        for entry in file.entries:
            name = entry.name
            if name in found:
                both = f"{found[name].file.path} and in {file.path}"
                raise InputError(f"{printable(name, 100)} is in {both}")
            found[name] = SourceTensor(file, entry)
    return found


class SafetensorsImport:
    """The import of tensors for a model; InputError: they are not those of the model.

    `views`: what the tensors are of the model's parameters; None: the parameters as they are.
    """

    def __init__(
        self, spec: Spec, found: Mapping[str, SourceTensor], views: Sequence[View] | None = None
    ) -> None:
        self.spec = spec
        self.found = found
        files = {tensor.file for tensor in found.values()}
        buffers = {name for file in files for name in _buffers_of(file)}
        self.buffers = {
            name: tensor
            for name, tensor in found.items()
            if tensor.entry.name in buffers or tensor.entry.dtype not in FLOATS
        }
        self.shapes = {
            name: tensor.entry.shape
            for name, tensor in self.found.items()
            if name not in self.buffers
        }
        self.layers = layers(spec.model) if known(spec.model) else _as_layers(self.shapes)
        self.parameters = [parameter for layer in self.layers for parameter in layer.parameters]
        self._views = views or as_they_are({p.name: p.shape for p in self.parameters})
        self._refuse_another_model()
        self._refuse_what_cannot_be_held()
        self.overflows = 0  # numbers that were finite and are too large for float32

    @property
    def size(self) -> int:
        """Bytes that are read."""
        return sum(tensor.entry.end - tensor.entry.begin for tensor in self.found.values())

    @property
    def room(self) -> int:
        """Bytes that the checkpoint takes, but for its structure."""
        weights = sum(prod(parameter.shape) for parameter in self.parameters)
        buffers = [tensor.entry for tensor in self.buffers.values()]
        buffer_bytes = sum(entry.size * entry.numpy.itemsize for entry in buffers)
        return weights * WIDTH * len(SLOTS) + buffer_bytes

    def save(self, checkpoints: Path, advance: Advance) -> Path:
        holding = RankShard([unit_layout(layer) for layer in self.layers if layer.parameters], 0)
        table = Table.of([Tensor(p.name, p.shape) for p in self.parameters], 1, lambda _: holding)
        buffers = {name: _values(tensor) for name, tensor in self.buffers.items()}
        train = self.spec.train
        loss_scale = train.loss_scale if train.precision == "fp16" else 1.0
        state = TrainingState(step=0, updates=0, loss_scale=loss_scale, good_steps=0)
        grid = {"pipeline": 1, "data": 1, "tensor": 1}
        made = CheckpointSpec(state, self.spec.model_dump(mode="json"), grid, table, [[0]], buffers)
        empty = empty_chunks()
        elements = table.elements(1)[0]

        def read(_: int, slot: int) -> Iterator[Array]:
            return in_chunks(_zeros(elements) if slot else self._weights(advance), empty)

        return save(checkpoints, made, read)

    def _weights(self, advance: Advance) -> Iterator[Array]:
        sources_of = sources(self._views)
        for parameter in self.parameters:
            for source in sources_of[parameter.name]:
                for values in self._values(source):
                    converted = to_float32(values, self.found[source.view.name].entry.dtype)
                    if values.dtype == np.float64:
                        lost = np.isfinite(values).sum() - np.isfinite(converted).sum()
                        self.overflows += int(lost)
                    yield converted
                    advance(values.nbytes)

    def _values(self, source: ViewRange) -> Iterator[Array]:
        """Yield the elements of a part of a view as the parameter has them."""
        tensor = self.found[source.view.name]
        if not source.view.transposed:
            yield from tensor.stretches(source.start, source.stop)
            return
        rows, columns = source.view.shape
        yield from transposed(tensor.whole().reshape(rows, columns), STRETCH)

    def _refuse_what_cannot_be_held(self) -> None:
        buffers = {
            name: (_buffer_dtype(tensor.entry).name, tensor.entry.shape)
            for name, tensor in self.buffers.items()
        }
        if problem := limits.problem(self.shapes, buffers):
            raise InputError(f"a checkpoint cannot hold what is in the files: {problem}")

    def _refuse_another_model(self) -> None:
        wanted = {view.name: view.shape for view in self._views}
        there = self.shapes
        wrong = [f"{name}: not in the files" for name in wanted if name not in there]
        wrong += [f"{printable(name)}: not in the model" for name in there if name not in wanted]
        wrong += [
            f"{name}: {list(there[name])} in the files, {list(shape)} in the model"
            for name, shape in wanted.items()
            if there.get(name, shape) != shape
        ]
        if wrong:
            more = [f"and {len(wrong) - _SHOWN} more"] if len(wrong) > _SHOWN else []
            listed = "".join(f"\n  {line}" for line in wrong[:_SHOWN] + more)
            raise InputError(f"the files do not have this model's tensors:{listed}")


def _buffers_of(file: SafetensorsFile) -> list[str]:
    """Return the tensors that an export says are buffers."""
    try:
        names = json.loads(file.metadata[BUFFERS])
    except (KeyError, TypeError, ValueError, RecursionError):
        return []
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []


def _as_layers(shapes: Mapping[str, tuple[int, ...]]) -> list[Layer]:
    """Return what the files have as the layers of a model that only building it would tell."""
    return [Layer(name, (Parameter(name, shape, ZEROS),)) for name, shape in shapes.items()]


def _buffer_dtype(entry: Entry) -> np.dtype[Any]:
    """Return the dtype that a checkpoint holds a buffer in: numpy has no bfloat16."""
    return np.dtype(np.float32) if entry.dtype == "BF16" else entry.numpy


def _values(tensor: SourceTensor) -> Array:
    """Read a buffer."""
    entry = tensor.entry
    values = to_float32(tensor.whole(), "BF16") if entry.dtype == "BF16" else tensor.whole()
    return values.reshape(entry.shape)


def _zeros(elements: int) -> Iterator[Array]:
    zeros = np.zeros(min(elements, CHUNK // WIDTH), np.float32)
    for start in range(0, elements, CHUNK // WIDTH):
        yield zeros[: elements - start]


# -- saving by one process -----------------------------------------------------------------------

Read = Callable[[int, int], Iterable[Array]]  # rank, slot -> its data, for `Writer.write`


@dataclass(frozen=True)
class CheckpointSpec:
    """All of a checkpoint but its data. `files`: the ranks whose data each shard file has."""

    state: TrainingState
    spec: Mapping[str, Any]
    grid: Mapping[str, int]
    table: Table
    files: Sequence[Sequence[int]]
    buffers: Mapping[str, Array] = field(default_factory=dict)


def save(checkpoints: Path, made: CheckpointSpec, read: Read) -> Path:
    """Save a checkpoint in a new folder in `checkpoints`; what cannot be finished is removed."""
    path = directory.begin(checkpoints, made.state.step)
    try:
        elements = made.table.elements(sum(map(len, made.files)))
        shards = [
            _save_shard(path, number, {rank: elements[rank] for rank in ranks}, read)
            for number, ranks in enumerate(made.files)
        ]
        attributes = index.attributes(made.state, made.spec, made.grid, {})
        index.write(path / INDEX, made.table, shards, made.buffers, attributes)
        sealed = IndexFile.sealed(path / INDEX)
        manifest.commit(path, made.state, made.spec, made.grid, sealed, shards)
    except BaseException:
        directory.remove(path)
        raise
    return path


def _save_shard(path: Path, number: int, elements: Mapping[int, int], read: Read) -> ShardFile:
    name = manifest.shard_name(number)
    extents = shard_file.make_file(path / name, elements)
    for extent in extents:
        write_data(path / name, extent, (read(extent.rank, slot) for slot in range(len(SLOTS))))
    return ShardFile.sealed(path / name, name, extents)
