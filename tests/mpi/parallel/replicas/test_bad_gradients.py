"""Gradients that are not finite, or zero, on one worker or on all: every worker does the same."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from hpczero.comm.world import World
from hpczero.parallel.zero.engine import Engine, StepResult
from hpczero.parallel.zero.unit import Unit
from hpczero.spec.schema import Spec
from tests.support.covering import Case
from tests.support.grids import assert_all_ranks_say
from tests.support.replicas import METHODS, kept, spec_of
from tests.support.training import Record, train

pytestmark = pytest.mark.mpi

AT = 1  # the step, from 0, in which a gradient is spoiled


def layouts(ranks: int) -> list[Case]:
    found: dict[int, list[Case]] = {
        2: [{"per_node": 1}],
        3: [{"per_node": 2}],
        4: [
            {"per_node": 2},
            {"per_node": 2, "tensor": 2},
            {"per_node": 2, "pipeline": 2, "shards": 1},
        ],
    }
    return found.get(ranks, [])


def cases(ranks: int, everything: bool) -> list[Case]:
    """Every method at a stage of its own; all stages, and grids, with `everything`."""
    of_ranks = layouts(ranks)[: None if everything else 1]
    pairs = list(product(METHODS, of_ranks))
    return [
        {"method": method, "stage": stage} | layout
        for number, (method, layout) in enumerate(pairs)
        for stage in ((1, 2, 3) if everything else (1 + number % 3,))
    ]


@dataclass
class Spoiler:
    """Makes one number of a gradient NaN, on one rank in one step; keeps the states around it."""

    world: World
    rank: int = 0
    value: float = float("nan")
    steps: int = 0
    tensor: str = ""
    before: dict[str, Tensor] = field(default_factory=dict)
    after: dict[str, Tensor] = field(default_factory=dict)
    updates: list[int] = field(default_factory=list)

    def complete(self, unit: Unit) -> None:
        if self.rank != self.world.rank or self.steps != AT or self.tensor:
            return
        if unit.layout.name.startswith("blocks"):
            slot = unit.layout.slots[-1]
            self.tensor = slot.parameter.name
            unit.part(unit.send_buffer, slot).view(-1)[-1] = self.value

    def finish(self, engine: Engine, lr: float, finish: Any) -> StepResult:
        spoiled = self.steps == AT
        if spoiled:
            engine.wait_for_weights()
            self.before = kept(engine)
        self.steps += 1
        result: StepResult = finish(engine, lr)
        if spoiled:
            engine.wait_for_weights()
            self.after = kept(engine)
        self.updates.append(engine.updates)
        return result


@pytest.fixture
def spoiler(world: World, monkeypatch: pytest.MonkeyPatch) -> Iterator[Spoiler]:
    complete, finish = Unit.complete, Engine.finish_step
    spoiler = Spoiler(world)

    def spoiling(unit: Unit) -> None:
        complete(unit)
        spoiler.complete(unit)

    def keeping(engine: Engine, lr: float) -> StepResult:
        return spoiler.finish(engine, lr, finish)

    with monkeypatch.context() as patch:
        patch.setattr(Unit, "complete", spoiling)
        patch.setattr(Engine, "finish_step", keeping)
        yield spoiler


def spec_of_case(case: Case, **train: Any) -> Spec:
    sizes = {axis: case.get(axis, 1) for axis in ("tensor", "pipeline")}
    zero = {"stage": case["stage"], "shard_ranks": case.get("shards", "node")}
    return spec_of(case["method"], zero, sizes, **train)


def trained(world: World, case: Case, spec: Spec) -> Record:
    """Train on nodes; what all ranks must say alike, they say."""
    nodes = world.part(range(world.size), case["per_node"])
    found = train(nodes, spec)
    nodes.close()
    if spec.optimizer.outer.every:
        found.gradients.clear()  # each worker's own
    assert_all_ranks_say(world, found)
    assert all(weights.isfinite().all() for weights in found.weights.values())
    assert "replica" in found.ledger.as_dict()
    return found


@pytest.mark.cases(of=cases)
@pytest.mark.usual(4)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.few(2)
def test_what_one_worker_alone_sees_is_left_out_by_all(
    world: World, case: Case, value: float, spoiler: Spoiler
) -> None:
    """Its step changes nothing, not even what messages have left out; who it was is said."""
    spoiler.rank, spoiler.value = world.size - 1, value
    found = trained(world, case, spec_of_case(case))
    data_rank = world.size // (case.get("tensor", 1) * case.get("pipeline", 1)) - 1
    assert spoiler.updates == [1, 1, 2, 3, 4, 5]
    assert spoiler.before
    for name, state in spoiler.before.items():
        assert torch.equal(state, spoiler.after[name]), name
    assert [metrics.get("skipped", False) for metrics in found.metrics_seen] == [
        step == AT for step in range(6)
    ]
    (where,) = {values["where"] for name, values in found.events if name == "WARN"}
    *_, tensor = world.all_gather_objects(spoiler.tensor)
    assert where == f"first in {tensor} of data rank {data_rank}"


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("method", [name for name in METHODS if "local" in name])
def test_an_outer_step_is_carried_out_though_the_step_is_left_out(
    world: World, method: str, spoiler: Spoiler
) -> None:
    """What was sent before arrives: all have the outer weights then."""
    spoiler.rank = 1
    spec = spec_of(method, {"stage": 2, "shard_ranks": 1})
    outer = spec.optimizer.outer.model_copy(update={"every": 1, "fragments": 1})
    spec = spec.model_copy(update={"optimizer": spec.optimizer.model_copy(update={"outer": outer})})
    trained(world, {"per_node": 0}, spec)
    assert spoiler.updates == [1, 1, 2, 3, 4, 5]
    for name, master in spoiler.after.items():
        unit, _, kind = name.partition(" ")
        if kind == "master":
            assert torch.equal(master, spoiler.after[f"{unit} common weights"])
            assert not torch.equal(master, spoiler.before[name])
            assert all(torch.equal(master, other) for other in world.everyone.stack(master))


@pytest.mark.cases(of=cases)
@pytest.mark.usual(4)
@pytest.mark.few(1)
def test_fp16_overflows_are_left_out_alike_until_the_scale_fits(world: World, case: Case) -> None:
    spec = spec_of_case(case, precision="fp16", loss_scale=2.0**24, steps=12)
    found = trained(world, case, spec)
    scales = [metrics["loss_scale"] for metrics in found.metrics_seen]
    left_out = [metrics.get("skipped", False) for metrics in found.metrics_seen]
    assert left_out[0]
    assert not all(left_out)
    halved = [scale / 2 if left else scale for scale, left in zip(scales, left_out, strict=True)]
    assert scales[1:] == halved[:-1]
