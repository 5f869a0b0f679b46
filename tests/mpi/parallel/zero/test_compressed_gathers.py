"""Weights that are gathered between nodes in 8 bits: what all ranks have is what a few lines of
PyTorch make of the master weights, so that every layout trains the same numbers.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from hpczero.comm.grid import Grid
from hpczero.comm.world import World
from hpczero.parallel.layout import UnitLayout
from hpczero.parallel.parallelize import assemble
from hpczero.parallel.zero.engine import Engine
from hpczero.parallel.zero.unit import Unit
from hpczero.planner.volumes import resolved
from hpczero.spec.schema import Comm, Spec
from hpczero.train.batches import Batches
from hpczero.train.trainer import Reporter, Trainer
from tests.support.covering import Case
from tests.support.replica_runs import run, that_differ
from tests.support.replicas import spec_of
from tests.support.training import LearnableSource, Record, train

pytestmark = pytest.mark.mpi

BLOCK = 256
# nodes of 3 ranks and of 1: of two workers the second alone has ranks on both
PARTLY = {"shared": False, "per_node": 3, "parallel": {}, "batch": 12, "shards": 2}


def compressed(
    parallel: dict[str, Any] | None = None, compress: Any = "int8", **settings: Any
) -> Spec:
    zero = {"stage": settings.pop("stage"), "shard_ranks": settings.pop("shards", "all")}
    zero["node_shared"] = settings.pop("shared", "auto")
    settings = {"precision": "bf16", "steps": 5, **settings}
    optimizer = settings.pop("optimizer", {"lr": 1e-2})
    spec = spec_of("sums", zero, parallel, optimizer, **settings)
    return spec.model_copy(update={"comm": Comm(compress=compress)})


@contextmanager
def trained(world: World, spec: Spec, per_node: int) -> Iterator[tuple[Engine, Record]]:
    nodes = world.part(range(world.size), per_node)
    grid = Grid.build(resolved(spec, nodes.node_of_rank), nodes.node_of_rank)
    source = LearnableSource(spec)
    batches = Batches(spec, source, grid.coordinate(nodes.rank, "data"), grid.size("data"))
    way = assemble(spec, nodes, grid, accumulates=len(batches.parts()) > 1)
    record = Record()
    Trainer(spec, nodes, way, batches, Reporter(record, record)).train()  # type: ignore[arg-type]
    yield way.engine, record
    way.engine.close()
    nodes.close()


def shown(engine: Engine, unit: Unit) -> Tensor:
    """The weights that a layer works with on this rank."""
    if not engine.sharded.parameters:
        return unit.weights.clone()
    whole = unit.weights.new_empty(unit.layout.size)
    engine.start_gather(unit, whole).wait()
    return whole


def masters(engine: Engine, unit: Unit) -> Tensor:
    """The master weights of all ranks of this worker."""
    axis = engine.axis
    of_all = axis.group.stack(unit.master)
    first = axis.group.rank // axis.size * axis.size
    return of_all[first : first + axis.size].view(-1)


def rounded(layout: UnitLayout, master: Tensor, tensor_ranks: int) -> Tensor:
    """Blocks begin anew with each shard; what tensor ranks have in common is in none of them."""
    found, exact = torch.empty_like(master), master
    master = master.clone()
    for slot in layout.slots if tensor_ranks > 1 else ():
        if not slot.is_split:
            master[slot.offset : slot.stop] = 0
    for number in range(layout.shards):
        for values, out in zip(
            master[layout.shard(number)].split(BLOCK),
            found[layout.shard(number)].split(BLOCK),
            strict=True,
        ):
            scale = values.abs().max() / 127
            out.copy_((values * (1 / scale)).round() * scale if scale > 0 else values)
    if tensor_ranks > 1:
        for slot in layout.slots:
            if not slot.is_split:
                found[slot.offset : slot.stop] = exact[slot.offset : slot.stop]
    return found.bfloat16()


def layouts(ranks: int, everything: bool) -> list[Case]:
    grids: list[dict[str, Any]] = [{}]
    if ranks % 4 == 0:
        # data ranks of a pair lie on two nodes with one order, on one with the other
        grids += [{"tensor": 2, "order": "tensor,data,pipeline"}]
        grids += [{"pipeline": 2, "order": "data,tensor,pipeline"}]
    return [
        {"stage": stage, "shared": shared, "per_node": per_node, "parallel": grid, "batch": batch}
        for grid, stage, shared, per_node, batch in product(
            grids, (1, 2, 3), (False, True), (1, 2), (12, 24)
        )
        if shared is False or per_node > 1
    ] + [PARTLY | {"stage": stage} for stage in (1, 3) if ranks == 4]


@pytest.mark.cases(of=layouts)
@pytest.mark.ranks(2, 3, 4, 8)
@pytest.mark.few(2)
def test_all_ranks_have_what_the_messages_say(world: World, case: Case) -> None:
    spec = compressed(
        case["parallel"],
        stage=case["stage"],
        shared=case["shared"],
        shards=case.get("shards", "all"),
        global_batch=case["batch"],
    )
    tensor = case["parallel"].get("tensor", 1)
    with trained(world, spec, case["per_node"]) as (engine, _):
        assert engine.sharded.parameters == (case["stage"] == 3 and not engine.axis.shared)
        in_8_bits = 0
        for unit in engine.units:
            master, found = masters(engine, unit), shown(engine, unit)
            used = torch.zeros(unit.layout.size, dtype=torch.bool)
            for slot in unit.layout.slots:
                used[slot.offset : slot.stop] = True
            expected = rounded(unit.layout, master, tensor)
            if unit in engine._messages:
                in_8_bits += 1
            else:
                expected = master.bfloat16()
            assert torch.equal(found[used], expected[used]), unit.layout.name
        # the data ranks are the two of a node: nothing is gathered between nodes
        data_ranks = world.size // tensor // case["parallel"].get("pipeline", 1)
        inside = case["per_node"] == 2 and tensor == 1 and data_ranks == 2
        assert bool(in_8_bits) != inside


@pytest.mark.ranks(2, 4)
def test_every_stage_trains_the_same_numbers(world: World) -> None:
    """One micro-batch, so that sums are made in one order; and they are not those of bf16."""
    settings: dict[str, Any] = {"global_batch": 2 * world.size, "micro_batch": 2}
    nodes = world.part(range(world.size), 1)
    found = [train(nodes, compressed(stage=stage, **settings)).losses for stage in (1, 2, 3)]
    plain = train(nodes, compressed(stage=2, compress="none", **settings)).losses
    nodes.close()
    assert found[0] == found[1] == found[2]
    assert found[0] != plain
    assert found[0] == pytest.approx(plain, rel=5e-3)


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.slow
def test_nothing_adds_up_where_nothing_is_learned(world: World, stage: int) -> None:
    """Weights are rounded anew from the masters: with hardly a learning rate they stay."""
    settings: dict[str, Any] = {"optimizer": {"lr": 1e-20}, "stage": stage}
    found = []
    for steps in (1, 30):
        with trained(world, compressed(**settings, steps=steps), 1) as (engine, record):
            found.append(torch.cat([shown(engine, unit) for unit in engine.units]).float())
    assert len(record.losses) == 30
    assert (found[1] - found[0]).abs().max() < 1e-15


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.few(1)
def test_a_stopped_run_is_the_one_that_was_not(
    world: World, stage: int, shared_folder: str
) -> None:
    def spec(folder: str) -> Spec:
        made = compressed(stage=stage, shared=False, steps=8)
        settings = made.checkpoint.model_copy(update={"every": 0, "keep": 0})
        return made.model_copy(
            update={"output": f"{shared_folder}/{folder}", "checkpoint": settings}
        )

    whole = run(world, spec("whole"), 1)
    first = run(world, spec("parts"), 1, stops_after=3)
    second = run(world, spec("parts"), 1)
    assert second.resumed
    assert second.resumed.step == 3
    assert first.losses | second.losses == whole.losses
    assert that_differ(whole.states, second.states) == []


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize(("stage", "shared"), [(1, False), (2, True), (3, False)])
@pytest.mark.few(1)
def test_changed_weights_are_those_that_the_caller_wrote(
    world: World, stage: int, shared: bool
) -> None:
    """Who changes weights begins with the masters in half precision, not with what messages say;
    what nobody changed keeps its master weights to the bit.
    """
    with trained(world, compressed(stage=stage, shared=shared), world.size // 2) as (engine, _):
        before = [masters(engine, unit).clone() for unit in engine.units]
        halved, emptied, *_ = engine.units[1].parameters
        with engine.gathered([halved, emptied], modify=True):
            if world.rank == 0:
                halved.data.mul_(0.5)
                emptied.data.zero_()
        for unit, expected in zip(engine.units, before, strict=True):
            if unit is engine.units[1]:
                first, second, *_ = unit.layout.slots
                part = expected[first.offset : first.stop]
                part.copy_(torch.where(part.bfloat16() == 0, part, part.bfloat16() * 0.5))
                expected[second.offset : second.stop] = 0
            assert torch.equal(masters(engine, unit), expected)
            if unit in engine._messages:
                assert torch.equal(shown(engine, unit), rounded(unit.layout, expected, 1))


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.few(1)
def test_what_is_not_finite_stays_so(world: World, stage: int) -> None:
    """A NaN in a master weight makes its whole block NaN on every rank."""
    with trained(world, compressed(stage=stage, shared=False), 1) as (engine, _):
        unit = engine.units[1]
        if unit.owned.start == 0:
            unit.master[5] = float("nan")
        engine.renew(lambda _: None)
        found = shown(engine, unit)
        assert found[: min(BLOCK, unit.layout.shard_size)].isnan().all()
        assert not found[unit.layout.shard_size :].isnan().any()
