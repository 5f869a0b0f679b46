"""A checkpoint made of safetensors files, with moments of zero, at step 0: training begins with weights from elsewhere."""

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from hpczero import env
from hpczero.checkpoint import directory, index, manifest, shard_file
from hpczero.checkpoint.load import STRETCH
from hpczero.checkpoint.manifest import (
    INDEX,
    Content,
    IndexFile,
    RankData,
    ShardFile,
    TrainingState,
)
from hpczero.checkpoint.piece_table import RankShard, Table, Tensor
from hpczero.checkpoint.safetensors import BUFFERS, FLOATS, Entry, SafetensorsFile, to_float32
from hpczero.checkpoint.shard_file import (
    CHUNK,
    SLOTS,
    WIDTH,
    Advance,
    Array,
    Extent,
    Writer,
    bounce,
    empty_chunks,
)
from hpczero.errors import InputError
from hpczero.model.families import known, layers
from hpczero.model.shapes import ZEROS, Layer, Parameter
from hpczero.parallel.layout import unit_layout
from hpczero.spec.schema import Spec
from hpczero.text import printable

_SHOWN = 8


@dataclass(frozen=True)
class FoundTensors:
    """A tensor, and the file that it is in."""

    file: SafetensorsFile
    entry: Entry


class Adoption:
    """Of open files, for a model; InputError: the tensors are not those of the model."""

    def __init__(self, spec: Spec, files: Sequence[SafetensorsFile]) -> None:
        self.spec = spec
        self.found: dict[str, FoundTensors] = {}
        for file in files:
            for entry in file.entries:
                if entry.name in self.found:
                    raise InputError(
                        f"{printable(entry.name, 100)} is in {self.found[entry.name].file.path} and in {file.path}"
                    )
                self.found[entry.name] = FoundTensors(file, entry)
        buffers = {name for file in files for name in _buffers_of(file)}
        self.buffers = {
            name: one
            for name, one in self.found.items()
            if name in buffers or one.entry.dtype not in FLOATS
        }
        self.layers = (
            layers(spec.model) if known(spec.model) else _as_layers(self.found, self.buffers)
        )
        self._refuse_another_model()
        self._refuse_what_cannot_be_held()
        self.overflows = 0  # numbers that were finite and are too large for float32
        self.parameters = [parameter for layer in self.layers for parameter in layer.parameters]

    @property
    def size(self) -> int:
        """Bytes that are read."""
        return sum(one.entry.end - one.entry.begin for one in self.found.values())

    def save(self, checkpoints: Path, advance: Advance) -> Path:
        holding = RankShard([unit_layout(layer) for layer in self.layers if layer.parameters], 0)
        table = Table.of([Tensor(p.name, p.shape) for p in self.parameters], 1, lambda _: holding)
        buffers = {name: _whole(one) for name, one in self.buffers.items()}
        state = TrainingState(
            step=0,
            updates=0,
            loss_scale=self.spec.train.loss_scale if self.spec.train.precision == "fp16" else 1.0,
            good_steps=0,
        )
        made = Made(
            state,
            self.spec.model_dump(mode="json"),
            {"pipeline": 1, "data": 1, "tensor": 1},
            table,
            [[0]],
            buffers,
        )
        empty, elements = empty_chunks(), table.elements(1)[0]
        return save(
            checkpoints,
            made,
            lambda _, slot: bounce(_zeros(elements) if slot else self._weights(advance), empty),
        )

    def _weights(self, advance: Advance) -> Iterator[Array]:
        for parameter in self.parameters:
            one = self.found[parameter.name]
            for values in one.file.stretches(one.entry, STRETCH):
                made = to_float32(values, one.entry.dtype)
                if values.dtype == np.float64:
                    self.overflows += int(np.isfinite(values).sum() - np.isfinite(made).sum())
                yield made
                advance(values.nbytes)

    @property
    def room(self) -> int:
        """Bytes that the checkpoint takes, but for its structure."""
        weights = sum(prod(parameter.shape) for parameter in self.parameters)
        return weights * WIDTH * len(SLOTS) + sum(
            one.entry.size * one.entry.numpy.itemsize for one in self.buffers.values()
        )

    def _refuse_what_cannot_be_held(self) -> None:
        tensors = {
            name: one.entry.shape for name, one in self.found.items() if name not in self.buffers
        }
        buffers = {
            name: (
                "float32" if one.entry.dtype == "BF16" else one.entry.numpy.name,
                one.entry.shape,
            )
            for name, one in self.buffers.items()
        }
        if problem := manifest.problem(tensors, buffers):
            raise InputError(f"a checkpoint cannot hold what is in the files: {problem}")

    def _refuse_another_model(self) -> None:
        wanted = {
            parameter.name: parameter.shape
            for layer in self.layers
            for parameter in layer.parameters
        }
        there = {
            name: one.entry.shape for name, one in self.found.items() if name not in self.buffers
        }
        wrong = [f"{name}: not in the files" for name in wanted if name not in there]
        wrong += [f"{printable(name)}: not in the model" for name in there if name not in wanted]
        other = [name for name, shape in wanted.items() if there.get(name, shape) != shape]
        wrong += [
            f"{name}: {list(there[name])} in the files, {list(wanted[name])} in the model"
            for name in other
        ]
        if wrong:
            shown = "".join(f"\n  {line}" for line in wrong[:_SHOWN]) + (
                f"\n  and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
            )
            raise InputError(f"the files do not have this model's tensors:{shown}")


def _buffers_of(file: SafetensorsFile) -> list[str]:
    """As an export says."""
    try:
        names = json.loads(file.metadata[BUFFERS])
    except (KeyError, TypeError, ValueError, RecursionError):
        return []
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []


def _as_layers(found: Mapping[str, FoundTensors], buffers: Mapping[str, Any]) -> list[Layer]:
    """Of a model that is not known without building it: what there is."""
    return [
        Layer(name, (Parameter(name, one.entry.shape, ZEROS),))
        for name, one in found.items()
        if name not in buffers
    ]


def _whole(one: FoundTensors) -> Array:
    parts = [
        to_float32(v, "BF16") if one.entry.dtype == "BF16" else v
        for v in one.file.stretches(one.entry, STRETCH)
    ]
    return np.concatenate(
        [np.empty(0, parts[0].dtype if parts else one.entry.numpy), *parts]
    ).reshape(one.entry.shape)


def _zeros(elements: int) -> Iterator[Array]:
    zeros = np.zeros(min(elements, CHUNK // WIDTH), np.float32)
    for start in range(0, elements, CHUNK // WIDTH):
        yield zeros[: elements - start]


# A checkpoint written by one process, for any grid of ranks: what an import makes. (A run's are written by all its ranks: `write`.)
Read = Callable[
    [int, int], Iterable[Array]
]  # rank, slot -> its data, as `shard.Writer.write` takes it


@dataclass(frozen=True)
class Made:
    """All of a checkpoint but its data. `files`: the ranks whose data each shard file has."""

    state: TrainingState
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
        shards = [
            _shard(path, f"shard-{number:05d}.h5", {rank: elements[rank] for rank in ranks}, read)
            for number, ranks in enumerate(made.files)
        ]
        attributes = {
            "format": made.state.format,
            "step": made.state.step,
            "spec": dict(made.spec),
            "grid": dict(made.grid),
        }
        index.write(path / INDEX, made.table, shards, made.buffers, attributes)
        content = Content(
            format=made.state.format, hpczero=env.VERSION, created=datetime.now(UTC).isoformat(timespec="seconds"),
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
    sealed = _sealed(
        path / name, "rest", [place for extent in extents for place in extent.ranges()]
    )
    return ShardFile(file=name, ranks=[_described(extent) for extent in extents], **sealed)


def _described(extent: Extent) -> RankData:
    return RankData(
        rank=extent.rank,
        elements=extent.elements,
        data=list(extent.data),
        checksums=extent.checksums,
    )


def _sealed(path: Path, checksum: str, data: Iterable[shard_file.Range]) -> dict[str, Any]:
    """The size of a file that is on the disk now, and the checksum of all of it but the data."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
        size = os.fstat(file).st_size
        return {"size": size, checksum: shard_file.rest(file, size, data)}
    finally:
        os.close(file)
