"""Checkpoints for tests: of any grid, made of random numbers by one process."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

from hpczero.checkpoint import hdf5_process, import_safetensors
from hpczero.checkpoint.manifest import TrainingState
from hpczero.checkpoint.piece_table import RankShard, Table, Tensor, stored_spans
from hpczero.checkpoint.shard_file import BLOCK, SLOTS, Array, empty_chunks, in_chunks
from hpczero.model.families import layers
from hpczero.model.shapes import ZEROS, Layer, Parameter
from hpczero.parallel.layout import UnitLayout, unit_layout
from hpczero.spec.schema import Model, Spec

SMALL = Model(layers=3, hidden=24, heads=6, seq_len=33, vocab=257)
BUFFERS = {"norm.mean": np.arange(5.0), "norm.seen": np.array(7, np.int64)}


@dataclass
class Grid:
    """pipeline x data x tensor ranks, numbered in that order; `per_file` of them write one file."""

    tensor: int = 1
    data: int = 1
    pipeline: int = 1
    per_file: int = 2

    @property
    def ranks(self) -> int:
        return self.tensor * self.data * self.pipeline


@dataclass
class Wanted:
    """The wanted content of a checkpoint: equal ones have equal values, whatever the grid."""

    layers: Sequence[Layer] = field(default_factory=lambda: layers(SMALL))
    spec: Mapping[str, Any] = field(
        default_factory=lambda: Spec(name="made", model=SMALL).model_dump(mode="json")
    )
    seed: int = 0
    step: int = 100
    buffers: Mapping[str, Array] = field(default_factory=lambda: dict(BUFFERS))

    @cached_property
    def values(self) -> list[dict[str, Array]]:
        """Return each slot's values by name."""
        random = np.random.default_rng(self.seed)
        return [
            {
                p.name: random.standard_normal(p.shape, np.float32)
                for layer in self.layers
                for p in layer.parameters
            }
            for _ in SLOTS
        ]


def parameters(**shapes: tuple[int, ...]) -> list[Layer]:
    """A layer for each, split over tensor ranks along the first dimension if it has any."""
    return [
        Layer(name, (Parameter(name, shape, ZEROS, 0 if shape else None),))
        for name, shape in shapes.items()
    ]


def make(checkpoints: Path, grid: Grid | None = None, wanted: Wanted | None = None) -> Path:
    grid, wanted = grid or Grid(), wanted or Wanted()
    per_stage = -(-len(wanted.layers) // grid.pipeline)
    empty = empty_chunks(BLOCK)

    def units(stage: int, tensor_rank: int) -> list[UnitLayout]:
        own = wanted.layers[stage * per_stage : (stage + 1) * per_stage]
        return [
            unit_layout(layer, grid.data, grid.tensor, tensor_rank)
            for layer in own
            if layer.parameters
        ]

    def holding(rank: int) -> RankShard:
        stage, inside = divmod(rank, grid.data * grid.tensor)
        return RankShard(
            units(stage, inside % grid.tensor), inside // grid.tensor, inside % grid.tensor
        )

    def read(rank: int, slot: int) -> Iterator[Array]:
        pieces = [
            wanted.values[slot][own.name][box].reshape(-1)
            for own in stored_spans(holding(rank))
            for box in own.rectangles
        ]
        return in_chunks(pieces, empty)

    table = Table.of(
        [Tensor(p.name, p.shape) for layer in wanted.layers for p in layer.parameters],
        grid.ranks,
        holding,
    )
    files = [
        range(first, min(first + grid.per_file, grid.ranks))
        for first in range(0, grid.ranks, grid.per_file)
    ]
    state = TrainingState(step=wanted.step, updates=wanted.step, loss_scale=1.0, good_steps=0)
    axes = {"pipeline": grid.pipeline, "data": grid.data, "tensor": grid.tensor}
    return import_safetensors.save(
        checkpoints,
        import_safetensors.CheckpointSpec(state, wanted.spec, axes, table, files, wanted.buffers),
        read,
    )


@contextmanager
def memory_at_most(size: int) -> Iterator[None]:
    """Assert that the context takes no more than so many bytes beyond what this process has now,
    whatever it had at its peak before.
    """
    Path("/proc/self/clear_refs").write_text("5")  # the peak is what there is now
    before = peak_of_memory()
    yield
    assert peak_of_memory() - before < size


def peak_of_memory() -> int:
    return 1024 * next(
        int(line.split()[1])
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith("VmHWM")
    )


def seal(folder: Path, change: Callable[[dict[str, Any]], Any] = lambda content: None) -> None:
    """The manifest says what is there now."""
    content = json.loads((folder / "MANIFEST.json").read_text())["content"]
    index = (folder / "index.h5").read_bytes()
    content["index"] = {"size": len(index), "checksum": xxhash.xxh3_64_hexdigest(index)}
    change(content)
    checksum = xxhash.xxh3_64_hexdigest(json.dumps(content, sort_keys=True).encode())
    (folder / "MANIFEST.json").write_text(
        json.dumps({"content": content, "checksum": checksum}, indent=1, sort_keys=True) + "\n"
    )


def look_without_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the HDF5 library asked in this process: a process of its own takes half a second, and
    the files of these tests do the library no harm.
    """

    def problems(self: hdf5_process.Hdf5Process, shard: int = -1) -> list[str]:
        return hdf5_process.answer(self.folder, self.content, shard)

    monkeypatch.setattr(hdf5_process.Hdf5Process, "problems", problems)
    monkeypatch.setattr(hdf5_process, "limited", lambda size: None)
