"""Runs with checkpoints on nodes: stopped by a request, resumed, on any layout."""

import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hpczero.comm.grid import Grid
from hpczero.comm.world import World
from hpczero.parallel.parallelize import assemble
from hpczero.parallel.zero.engine import Engine
from hpczero.planner.volumes import resolved
from hpczero.spec.schema import Checkpoint as Settings
from hpczero.spec.schema import Spec
from hpczero.train.batches import Batches
from hpczero.train.checkpointing import Checkpoints
from hpczero.train.resume import Resumed
from hpczero.train.trainer import Reporter, Trainer
from tests.support.replicas import kept, spec_of
from tests.support.training import LearnableSource, Record

STEPS = 20


@dataclass
class StoppingRecord(Record):
    """Asks for the end of the run, as a user does, when a step is done: the next one is the last.

    Rank 0 asks; 0: nobody does.
    """

    stops_after: int = 0
    asks: bool = False

    def step(self, step: int, metrics: dict[str, Any]) -> None:
        if self.asks and step == self.stops_after - 1:
            os.kill(os.getpid(), signal.SIGUSR2)


@dataclass
class Run:
    losses: dict[int, float] = field(default_factory=dict)
    resumed: Resumed | None = None
    restored: dict[str, Tensor] = field(default_factory=dict)  # all states when it has begun
    states: dict[str, Tensor] = field(default_factory=dict)  # and at its end
    common: dict[str, Tensor] = field(default_factory=dict)  # rank 0's whole weights at its begin
    state: str = ""


def checkpointed(
    method: str,
    folder: str,
    zero: Mapping[str, Any],
    parallel: Mapping[str, Any] | None = None,
    **changes: Any,
) -> Spec:
    """Return a spec that learns quickly."""
    optimizer = {"lr": 1e-2} | changes.pop("optimizer", {})
    spec = spec_of(method, zero, parallel, optimizer, steps=STEPS, **changes)
    settings = Settings(every=0, keep=0)
    return spec.model_copy(update={"output": folder, "checkpoint": settings})


def run(world: World, spec: Spec, per_node: int, stops_after: int = 0) -> Run:
    """Run from the newest checkpoint to the end, or until it is asked to stop."""
    nodes = world.part(range(world.size), per_node)
    grid = Grid.build(resolved(spec, nodes.node_of_rank), nodes.node_of_rank)
    source = LearnableSource(spec)
    batches = Batches(spec, source, grid.coordinate(nodes.rank, "data"), grid.size("data"))
    way = assemble(spec, nodes, grid, accumulates=len(batches.parts()) > 1)
    record = StoppingRecord(stops_after=stops_after, asks=nodes.rank == 0 and stops_after > 0)
    checkpoints = Checkpoints(spec, nodes, grid, way.engine)
    trainer = Trainer(spec, nodes, way, batches, Reporter(record, record), checkpoints)  # type: ignore[arg-type]
    found = Run(resumed=checkpoints.resume())
    checkpoints.refresh_weights()
    assert found.resumed
    found.restored = waited(way.engine)
    if not way.engine.tensor and not way.engine.pipeline:
        found.common = way.engine.full_state_dict()
    found.state = trainer.train(found.resumed.step).state
    found.losses = {metrics["step"]: metrics["loss"] for metrics in record.metrics_seen}
    found.states = waited(way.engine)
    way.engine.close()
    nodes.close()
    return found


def waited(engine: Engine) -> dict[str, Tensor]:
    engine.wait_for_weights()
    return kept(engine)


def that_differ(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> list[str]:
    """Return the states that are not the same to the bit."""
    assert one.keys() == other.keys()
    return [name for name in one if not torch.equal(one[name], other[name])]


def checkpoint_of(folder: str, step: int) -> Path:
    return Path(folder) / "run" / "checkpoints" / f"step-{step:08}"
