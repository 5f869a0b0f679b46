"""A whole training run on the ranks of a world, recorded on every one of them."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from hpczero.comm.grid import Grid
from hpczero.comm.world import World
from hpczero.data.source import SyntheticSource
from hpczero.model import build, shapes
from hpczero.parallel.zero import Engine, Settings
from hpczero.spec.schema import Spec
from hpczero.train.batches import Batches
from hpczero.train.trainer import Outcome, Trainer, Voice


@dataclass
class Record:
    """What a run did: takes the place of rank 0's voice, on every rank."""

    metrics_seen: list[dict[str, Any]] = field(default_factory=list)
    events: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    outcome: Outcome | None = None
    path: Path = Path("/nonexistent")

    def metrics(self, values: dict[str, Any]) -> None:
        self.metrics_seen.append(values)

    def event(self, name: str, **values: Any) -> None:
        self.events.append((name, values))

    def step(self, step: int, metrics: dict[str, Any]) -> None:
        pass

    @property
    def losses(self) -> list[float]:
        return [metrics["loss"] for metrics in self.metrics_seen]


class LearnableSource(SyntheticSource):
    """Synthetic text with something to learn: every token is followed by its successor in half of all places."""

    def fill(self, split: str, window: int, out: Any) -> None:
        super().fill(split, window, out)
        out[1::2] = (out[:-1:2] + 1) % self.vocabulary


def train(world: World, spec: Spec) -> Record:
    grid = Grid.build(spec.parallel, world.node_of_rank)
    group = world.group("data", grid.ranks(world.rank, "data"))
    source = LearnableSource(spec.seed, spec.model.vocab, spec.model.seq_len)
    batches = Batches(spec, source, grid.coordinate(world.rank, "data"), grid.size("data"))
    module = build.on_meta(spec.model)
    engine = Engine(module, shapes.layers(spec.model), group, Settings(spec.train, spec.optimizer, spec.seed, len(batches.parts()) > 1))
    record = Record()
    finish = engine.finish_step

    def finish_and_keep(lr: float) -> Any:
        result = finish(lr)
        if not record.gradients:
            record.gradients = {place.parameter.name: unit.part(unit.summed, place).float().clone() for unit in engine.units for place, _ in unit}
        return result

    engine.finish_step = finish_and_keep  # type: ignore[method-assign]
    record.outcome = Trainer(spec, world, engine, module, batches, Voice(record, record)).train()  # type: ignore[arg-type]
    record.weights = {place.parameter.name: unit.part(unit.master, place).clone() for unit in engine.units for place, _ in unit}
    return record
