"""Engines on grids with their checkpoints, in a folder that all ranks share."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from hpczero.comm.grid import Grid
from hpczero.comm.world import World
from hpczero.data.dataset import SyntheticSource
from hpczero.parallel.parallelize import assemble
from hpczero.parallel.zero.engine import Engine
from hpczero.planner.volumes import resolved
from hpczero.spec.schema import Checkpoint as Settings
from hpczero.spec.schema import Data, Model, Optimizer, Parallel, Spec, Train, Zero
from hpczero.train.batches import Batches
from hpczero.train.checkpointing import Checkpoints
from hpczero.train.trainer import Reporter, Trainer
from tests.support.training import Record

# ranks, parallel, ZeRO; nothing divides
GRIDS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "alone": (1, {}, {"stage": 0}),
    "data 2": (2, {}, {"stage": 1, "node_shared": False}),
    "data 2, parameters cut": (2, {}, {"stage": 3, "node_shared": False}),
    "data 2, one copy": (2, {}, {"stage": 2, "node_shared": True}),
    "tensor 2": (2, {"tensor": 2}, {"stage": 1}),
    "pipeline 2": (2, {"pipeline": 2}, {"stage": 2}),
    "data 3": (3, {}, {"stage": 2, "node_shared": False}),
    "tensor 3": (3, {"tensor": 3, "sequence_parallel": True}, {"stage": 0}),
    "pipeline 3": (3, {"pipeline": 3}, {"stage": 0}),
    "data 4": (4, {}, {"stage": 0, "node_shared": False}),
    "tensor 4": (4, {"tensor": 4}, {"stage": 3}),
    "tensor 2, data 2": (4, {"tensor": 2}, {"stage": 3, "node_shared": False}),
    "pipeline 2, data 2": (
        4,
        {"pipeline": 2, "schedule": "interleaved", "chunks": 2},
        {"stage": 1, "node_shared": True},
    ),
    "tensor 2, pipeline 2": (4, {"tensor": 2, "pipeline": 2}, {"stage": 1}),
    "tensor 2, pipeline 2, data 2": (
        8,
        {"tensor": 2, "pipeline": 2},
        {"stage": 3, "node_shared": False},
    ),
    "data 8": (8, {}, {"stage": 2, "node_shared": False}),
}


def spec_of(output: str, name: str, **checkpoint: Any) -> Spec:
    _, parallel, zero = GRIDS[name]
    return Spec(
        output=output,
        model=Model(layers=3, hidden=24, heads=6, seq_len=33, vocab=257, dropout=0.1),
        data=Data(source="synthetic"),
        train=Train(global_batch=5, micro_batch=2, precision="bf16", steps=6, eval_batches=0),
        optimizer=Optimizer(lr=1e-2, eps=1e-6),
        parallel=Parallel(**parallel),
        zero=Zero(**zero),
        checkpoint=Settings(**{"every": 1, **checkpoint}),
    )


def divided(output: str, **checkpoint: Any) -> Spec:
    """Every rank steps a part, however many there are."""
    return spec_of(output, "data 2", **checkpoint)


@contextmanager
def engine_on(world: World, spec: Spec) -> Iterator[tuple[Engine, Checkpoints]]:
    grid = Grid.build(resolved(spec, world.node_of_rank), world.node_of_rank)
    engine = assemble(spec, world, grid, accumulates=True).engine
    yield engine, Checkpoints(spec, world, grid, engine)
    engine.close()


def save_steps(checkpoints: Checkpoints, *steps: int) -> None:
    for step in steps:
        checkpoints.begin(step, ends=True)
        checkpoints.conclude()


def names(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.iterdir())


def trained(world: World, spec: Spec, spoils_gradients: bool = False) -> Record:
    """A run from where its checkpoints are to its end."""
    record, source = Record(), SyntheticSource(spec.seed, spec.model.vocab, spec.model.seq_len)
    grid = Grid.build(resolved(spec, world.node_of_rank), world.node_of_rank)
    batches = Batches(spec, source, grid.coordinate(world.rank, "data"), grid.size("data"))
    way = assemble(spec, world, grid, accumulates=len(batches.parts()) > 1)
    checkpoints = Checkpoints(spec, world, grid, way.engine)
    trainer = Trainer(spec, world, way, batches, Reporter(record, record), checkpoints)  # type: ignore[arg-type]
    first = checkpoints.resume().step
    checkpoints.refresh_weights()
    if spoils_gradients:
        finish, bad = way.engine.finish_step, [False] * (spec.train.steps - first - 1) + [True]
        way.engine.finish_step = lambda lr: replace(finish(lr), bad="spoiled" if bad.pop(0) else "")  # type: ignore[method-assign,arg-type]
    record.outcome = trainer.train(first)
    way.engine.close()
    return record
