"""Checkpoints of loops of one's own: saved and resumed on any layout, kept, refused."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import hpczero
from hpczero.checkpoint import directory
from hpczero.comm.world import World
from hpczero.errors import HpczeroError, InputError
from tests.support.own_loops import STEPS, Loop, spec_of, started, states
from tests.support.user_modules import WAYS, made

pytestmark = [pytest.mark.mpi, pytest.mark.usual(2)]


@pytest.mark.parametrize("behind", [True, False])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.few(1)
def test_on_the_same_layout_it_goes_on_to_the_bit(
    world: World, shared_folder: str, behind: bool, precision: str
) -> None:
    for stage, shared in WAYS:
        more: dict[str, Any] = {
            "train": {"precision": precision},
            "checkpoint": {"asynchronous": behind},
        }
        spec = spec_of(f"{shared_folder}/{stage}-{shared}", stage, shared, **more)
        with started(world, spec | {"name": "whole"}) as engine:
            assert engine.resume().step == 0
            whole = Loop(engine, world).run()
            expected = states(engine)
        with started(world, spec) as engine:
            first = Loop(engine, world).run(3)
            engine.save(first.extra() | {"epoch": 2}, first.random)
            first.run(5)  # what comes after the save is lost
        with started(world, spec) as engine:
            again = Loop(engine, world)
            position = engine.resume(again.random)
            assert (position.step, position.extra["epoch"]) == (3, 2)
            assert position.extra["losses"].tolist() == list(whole.losses.values())[:3]
            again.run()
            assert again.losses == {step: whole.losses[step] for step in range(4, STEPS + 1)}
            assert again.drawn == whole.drawn[3:]
            assert all(map(torch.equal, states(engine), expected))
            assert engine.module.seen == STEPS


def test_any_layout_reads_what_any_other_saved(world: World, shared_folder: str) -> None:
    spec = spec_of(shared_folder, 3, False)
    alone = world.part([world.rank])
    own = spec_of(f"{shared_folder}/{world.rank}", 0, False)
    with started(alone, own) as engine:
        expected = Loop(engine, alone).run().losses
    with started(world, spec) as engine:
        first = Loop(engine, world).run(4)
        engine.save({}, first.random)
    for number, (stage, shared) in enumerate(WAYS):
        with started(world, spec_of(f"{shared_folder}/{number}", stage, shared)) as engine:
            assert engine.load(f"{shared_folder}/loop").step == 4
            assert Loop(engine, world).run().losses == pytest.approx(
                {step: expected[step] for step in range(5, STEPS + 1)}, rel=1e-5
            )
    with started(alone, own) as engine:
        engine.load(f"{shared_folder}/loop")
        assert Loop(engine, alone).run().losses == pytest.approx(
            {step: expected[step] for step in range(5, STEPS + 1)}, rel=1e-5
        )
    alone.close()


def test_another_grid_has_generators_of_its_own(
    world: World, shared_folder: str, capfd: pytest.CaptureFixture[str]
) -> None:
    alone = world.part([world.rank])
    with started(world, spec_of(shared_folder)) as engine:
        loop = Loop(engine, world).run(2)
        engine.save({}, loop.random)
    with started(alone, spec_of(f"{shared_folder}/{world.rank}")) as engine:
        loop = Loop(engine, alone)
        before = loop.own.get_state()
        engine.load(f"{shared_folder}/loop", random=loop.random)
        assert torch.equal(loop.own.get_state(), before) == (world.size > 1)
    said = capfd.readouterr().err
    assert ("generators stay as this job has seeded them" in said) == (world.size > 1)
    alone.close()


def test_buffers_of_each_rank_are_its_own_again(world: World, shared_folder: str) -> None:
    """The statistics of BatchNorm are of a rank's own samples."""

    def net() -> nn.Module:
        return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))

    def statistics(engine: Any) -> torch.Tensor:
        found: torch.Tensor = engine.module[1].running_mean
        return found.clone()

    x = torch.randn(6, 3, generator=torch.Generator().manual_seed(world.rank))
    with hpczero.initialize(made(net), spec_of(shared_folder), world) as engine:
        engine.backward(engine(x).sum())
        engine.step()
        engine.save()
        expected = statistics(engine)
    of_ranks = world.everyone.stack(expected)
    assert world.size == 1 or not torch.equal(of_ranks[0], of_ranks[-1])
    with hpczero.initialize(made(net), spec_of(shared_folder), world) as engine:
        engine.resume()
        assert torch.equal(statistics(engine), expected)


def test_weights_alone_begin_a_new_run(world: World, shared_folder: str) -> None:
    with started(world, spec_of(shared_folder)) as engine:
        Loop(engine, world).run(2)
        saved = engine.full_state_dict()
        engine.save({"epoch": 1})
    with started(world, spec_of(shared_folder) | {"seed": 9, "name": "other"}) as engine:
        with pytest.raises(InputError, match="is a checkpoint of another run:\n  seed"):
            engine.load(f"{shared_folder}/loop")
        position = engine.load(f"{shared_folder}/loop", weights_only=True)
        assert (position.step, position.extra) == (0, {"epoch": 1})
        now = engine.full_state_dict()
        assert all(torch.equal(now[name], tensor) for name, tensor in saved.items())
        assert not any(state.any() for state in states(engine)[1::3])


def test_the_spec_says_when_and_how_many(world: World, shared_folder: str) -> None:
    spec = spec_of(shared_folder, checkpoint={"every": 2, "keep": 2, "keep_every": 6})
    with started(world, spec) as engine:
        loop = Loop(engine, world)
        for _ in range(STEPS):
            loop.step()
            if engine.is_due():
                engine.save(loop.extra(), folder=None)
    run = Path(shared_folder) / "loop"
    assert list(directory.steps(run / "checkpoints")) == [8, 6]
    if world.rank == 0:
        events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
        assert [event["step"] for event in events if event["event"] == "save"] == [2, 4, 6, 8]
        metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        assert [line["step"] for line in metrics] == list(range(3, STEPS + 1)), (
            "the run's directory is claimed when it is first asked for"
        )
        assert json.loads((run / "summary.json").read_text())["state"] == "finished"
        assert not (run / "lock").exists()


def test_another_module_is_refused(world: World, shared_folder: str) -> None:
    with started(world, spec_of(shared_folder)) as engine:
        Loop(engine, world).run(1)
        engine.save()
    with (
        hpczero.initialize(nn.Linear(3, 2), spec_of(shared_folder), world) as engine,
        pytest.raises(InputError, match="does not have this model's tensors"),
    ):
        engine.resume()


OPTIMIZERS: dict[str, dict[str, Any]] = {
    "AdamW with an average": {"average": 0.9},
    "SGD": {"optimizer": "SGD", "optimizer_options": {"momentum": 0.9}},
    "amsgrad, an average": {
        "optimizer": "Adam",
        "optimizer_options": {"amsgrad": True},
        "average": 0.9,
    },
    "NAdam": {"optimizer": "NAdam"},
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.few(1)
def test_any_optimizer_goes_on_to_the_bit_and_on_another_layout(
    world: World, shared_folder: str, name: str
) -> None:
    how = OPTIMIZERS[name]
    spec = spec_of(shared_folder, 2, False, optimizer={"eps": 1e-8})
    with started(world, spec, **how) as engine:
        first = Loop(engine, world).run(4)
        engine.save(wait=True)
        whole = first.run()
        expected = [*states_by_name(engine), engine.full_state_dict()]
    with started(world, spec, **how) as engine:
        assert engine.resume().step == 4
        again = Loop(engine, world).run()
        assert again.losses == {step: whole.losses[step] for step in range(5, STEPS + 1)}
        found = [*states_by_name(engine), engine.full_state_dict()]
        for one, other in zip(found, expected, strict=True):
            assert all(torch.equal(one[key], other[key]) for key in one)
    elsewhere = spec_of(f"{shared_folder}/elsewhere", 3, False, optimizer={"eps": 1e-8})
    with started(world, elsewhere, **how) as engine:
        assert engine.load(f"{shared_folder}/loop").step == 4
        assert Loop(engine, world).run().losses == pytest.approx(again.losses, rel=1e-5)
        if "average" in how:
            with engine.averaged(), pytest.raises(HpczeroError, match="save: the weights are"):
                engine.save()


def states_by_name(engine: Any) -> list[dict[str, torch.Tensor]]:
    inner = engine.engine
    return [
        {name: state.clone() for name, state in inner.update.states(unit).items()}
        for unit in inner.units
    ]


def test_another_optimizer_is_refused_and_an_average_may_begin_or_end(
    world: World, shared_folder: str, capfd: pytest.CaptureFixture[str]
) -> None:
    spec = spec_of(shared_folder, optimizer={"eps": 1e-8})
    with started(world, spec) as engine:
        Loop(engine, world).run(2)
        engine.save(wait=True)
    with (
        started(world, spec, optimizer="SGD", optimizer_options={"momentum": 0.9}) as engine,
        pytest.raises(InputError, match=r"another optimizer \(moment1, moment2; here momentum"),
    ):
        engine.resume()
    with started(world, spec, average=0.5) as engine:
        assert engine.resume().step == 2
        before = engine.full_state_dict()
        with engine.averaged():
            now = engine.full_state_dict()
        assert all(torch.equal(now[name], tensor) for name, tensor in before.items())
        Loop(engine, world).run(3)
        engine.save(wait=True)
    with started(world, spec) as engine:
        assert engine.resume().step == 3
    said = capfd.readouterr().err
    for words in ("has no average of the weights: it begins", "which goes no further"):
        assert (words in said) == (world.rank == 0)


def test_a_checkpoint_of_step_0_is_a_whole_one(world: World, shared_folder: str) -> None:
    with started(world, spec_of(shared_folder)) as engine:
        loop = Loop(engine, world).run(2)
        engine.save({}, loop.random, step=0, wait=True)
        expected = states(engine), torch.rand(2, generator=loop.own)
    with started(world, spec_of(shared_folder)) as engine:
        loop = Loop(engine, world)
        assert engine.resume(loop.random).step == 0
        assert all(map(torch.equal, states(engine), expected[0]))
        assert torch.equal(torch.rand(2, generator=loop.own), expected[1])


def test_values_are_those_of_the_moment_of_the_save(world: World, shared_folder: str) -> None:
    array, tensor = np.zeros(1_000_000), torch.zeros(1_000_000)
    with started(world, spec_of(shared_folder)) as engine:
        engine.save({"array": array, "tensor": tensor})
        array += 1
        tensor += 1
        extra = engine.resume().extra
        assert not extra["array"].any()
        assert not extra["tensor"].any()
