"""A whole training run on the ranks of a world, recorded on every one of them."""

import json
from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from hpczero.comm.grid import Grid
from hpczero.comm.group import Group
from hpczero.comm.trace import Ledger
from hpczero.comm.world import World
from hpczero.data.dataset import SyntheticSource
from hpczero.data.documents import Cut
from hpczero.parallel.layout import ParameterSlot
from hpczero.parallel.parallelize import assemble
from hpczero.parallel.zero.engine import Engine
from hpczero.parallel.zero.unit import Unit
from hpczero.planner.volumes import resolved
from hpczero.spec.schema import Spec
from hpczero.train.batches import Batches
from hpczero.train.trainer import Outcome, Reporter, Trainer


@dataclass
class Record:
    """Record of a run: takes the place of rank 0's reporter, on every rank."""

    metrics_seen: list[dict[str, Any]] = field(default_factory=list)
    events: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    all_gradients: list[dict[str, torch.Tensor]] = field(default_factory=list)  # of steps kept
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    initial: dict[str, torch.Tensor] = field(default_factory=dict)  # weights before the first step
    sent: dict[str, Any] = field(default_factory=dict)  # the data axis in the ledger
    ledger: Ledger = field(default_factory=Ledger)
    sent_until: list[dict[str, Any]] = field(default_factory=list)  # the ledger after each step
    synced: list[int] = field(default_factory=list)  # steps whose metrics are on the disk
    outcome: Outcome | None = None
    path: Path = Path("/nonexistent")

    def metrics(self, values: dict[str, Any]) -> None:
        self.metrics_seen.append(values)
        self.sent_until.append(self.ledger.as_dict())

    def event(self, name: str, **values: Any) -> None:
        self.events.append((name, values))

    def sync(self) -> None:
        self.synced.append(len(self.metrics_seen))

    def step(self, step: int, metrics: dict[str, Any]) -> None:
        pass

    @property
    def losses(self) -> list[float]:
        return [metrics["loss"] for metrics in self.metrics_seen]

    @property
    def norms(self) -> list[float]:
        return [metrics["grad_norm"] for metrics in self.metrics_seen]

    @property
    def validation_losses(self) -> list[float]:
        return [
            metrics["validation_loss"]
            for metrics in self.metrics_seen
            if "validation_loss" in metrics
        ]


class LearnableSource(SyntheticSource):
    """Synthetic text with something to learn: every token is followed by its successor in half of
    all places. Little of it is for validation: an evaluation's last batch is a shorter one.

    Documents are "masked" or "padded" at places that the window's number says.
    """

    def __init__(self, spec: Spec) -> None:
        super().__init__(spec.seed, spec.model.vocab, spec.text_len)
        self.documents = spec.data.documents

    def of_length(self, seq_len: int) -> "LearnableSource":
        shorter = copy(self)
        shorter._seq_len = seq_len
        return shorter

    def windows(self, split: str) -> int:
        return 13 if split == "validation" else super().windows(split)

    def fill(self, split: str, window: int, out: Any) -> Cut | None:
        super().fill(split, window, out)
        out[1::2] = (out[:-1:2] + 1) % self.vocabulary
        seq_len = len(out) - 1
        if self.documents == "masked":
            begins = range(1 + window % 7, seq_len, 3 + window % 5)
            return Cut(begins, [begin - 1 for begin in begins])
        if self.documents == "padded":
            targets = 1 + window % seq_len
            return Cut(range(targets, seq_len)[:1], range(targets, seq_len))
        return None


def train(world: World, spec: Spec, run: Path = Record.path, keeps: int = 1) -> Record:
    """Train on this rank's part; what ranks' clocks write lies in the folder `run`.

    The gradients of the first `keeps` steps are kept, and of several the initial weights, too.
    """
    grid = Grid.build(resolved(spec, world.node_of_rank), world.node_of_rank)
    divided = grid.shards_and_replicas(spec.zero.shard_ranks)
    group = world.group("data", grid.ranks(world.rank, "data"))
    if divided.size("replica") > 1:
        group = world.group("shard", divided.ranks(world.rank, "shard"))
    source = LearnableSource(spec)
    batches = Batches(spec, source, grid.coordinate(world.rank, "data"), grid.size("data"))
    way = assemble(spec, world, grid, accumulates=len(batches.parts()) > 1)
    engine = way.engine
    record = Record(ledger=world.ledger, path=run)
    update, initial = engine.update.step, dict[Unit, torch.Tensor]()
    kept: list[dict[Unit, torch.Tensor]] = [{} for _ in range(keeps)]

    def keep_and_update(unit: Unit) -> None:
        if engine.updates < keeps:
            kept[engine.updates][unit] = unit.gradient_to_step.float().clone()
        if keeps > 1 and unit not in initial:
            initial[unit] = unit.master.clone()
        update(unit)

    engine.update.step = keep_and_update  # type: ignore[method-assign]
    record.outcome = Trainer(spec, world, way, batches, Reporter(record, record)).train()  # type: ignore[arg-type]
    record.sent = world.ledger.as_dict().get("data", {})
    masters = {unit: unit.master for unit in engine.units}
    record.weights, record.initial, *record.all_gradients = (
        of_model(engine, of_units, group) for of_units in (masters, initial, *kept)
    )
    record.gradients = record.all_gradients[0]
    engine.close()
    return record


def of_model(
    engine: Engine, of_units: Mapping[Unit, torch.Tensor], group: Group
) -> dict[str, torch.Tensor]:
    """Whole tensors of all stages, of what each rank holds of some of its units."""
    found: dict[str, torch.Tensor] = {}
    for unit, own in of_units.items():
        found |= whole(unit, own, group, engine.tensor)
    return of_all_stages(found, engine.pipeline) if engine.pipeline else found


def of_all_stages(own: dict[str, torch.Tensor], pipeline: Group) -> dict[str, torch.Tensor]:
    """Return the tensors of all stages; those of several stages must be the same."""
    found: dict[str, torch.Tensor] = {}
    for stage in range(pipeline.size):
        names = (
            [json.dumps([[name, list(tensor.shape)] for name, tensor in own.items()])]
            if stage == pipeline.rank
            else [""]
        )
        length = torch.tensor([len(names[0])])
        pipeline.broadcast(length, stage)
        text = torch.zeros(int(length), dtype=torch.uint8)
        if stage == pipeline.rank:
            text = torch.frombuffer(bytearray(names[0].encode()), dtype=torch.uint8)
        pipeline.broadcast(text, stage)
        for name, shape in json.loads(bytes(text.tolist())):
            tensor = own[name].clone() if stage == pipeline.rank else torch.empty(shape)
            pipeline.broadcast(tensor, stage)
            assert name not in found or torch.equal(found[name], tensor), name
            found[name] = tensor
    return found


def whole(
    unit: Unit, own: torch.Tensor, group: Group, tensor: Group | None
) -> dict[str, torch.Tensor]:
    """Whole tensors from what each rank holds of a unit. What every tensor rank holds whole must
    be the same on all of them.
    """
    flat, own = torch.empty(unit.layout.size), own.cpu()
    if own.numel() == flat.numel():
        flat.copy_(own)
    else:
        group.all_gather(flat, own.contiguous())
    return {
        place.parameter.name: logical(place, unit.part(flat, place).clone(), tensor)
        for place in unit.layout.slots
    }


def logical(place: ParameterSlot, part: torch.Tensor, tensor: Group | None) -> torch.Tensor:
    if tensor is None:
        return part
    if not place.is_split:
        assert all(torch.equal(part, theirs) for theirs in tensor.stack(part)), place.parameter.name
        return part
    found = torch.zeros(place.parameter.shape)
    found[place.held] = part
    tensor.all_reduce(found)
    return found


def distance(
    one: dict[str, torch.Tensor],
    other: dict[str, torch.Tensor],
    kept: dict[str, torch.Tensor] | None = None,
) -> float:
    """`kept`: the elements that are compared, if not all."""
    return max(
        (((one[name] - other[name]) * (kept[name] if kept else 1)).norm() / one[name].norm()).item()
        for name in one
    )


def assert_same(
    serial: Record, parallel: Record, kept: dict[str, torch.Tensor] | None = None
) -> None:
    assert len(parallel.losses) == len(serial.losses)
    assert max(abs(a - b) / a for a, b in zip(serial.losses, parallel.losses, strict=True)) < 1e-5
    assert distance(serial.gradients, parallel.gradients) < 1e-4
    assert distance(serial.weights, parallel.weights, kept) < 1e-4
    assert serial.norms == pytest.approx(parallel.norms, rel=1e-4)
    assert serial.validation_losses == pytest.approx(parallel.validation_losses, rel=1e-5)
    assert serial.gradients.keys() == parallel.gradients.keys()
    assert serial.weights.keys() == parallel.weights.keys()
