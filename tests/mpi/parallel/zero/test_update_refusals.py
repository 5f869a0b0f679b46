"""The memory of an update, and what it refuses."""

from typing import Any

import numpy as np
import pytest
import torch

import hpczero
from hpczero.comm.world import World
from hpczero.errors import HpczeroError, InputError
from hpczero.parallel.zero.torch_update import TorchUpdate
from hpczero.planner.memory import needs_of_nodes
from tests.support.optimizers import OPTIMIZERS, Lamb, Wandering
from tests.support.updates import (
    Chain,
    begun,
    one_step,
    samples,
    spec_of,
)
from tests.support.user_modules import made

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(1, 2, 3), pytest.mark.usual(2)]


@pytest.mark.parametrize("name", ["SGD", "AdamW, amsgrad", "a user's own"])
def test_memory_is_what_the_optimizer_keeps_and_what_is_counted_before(
    world: World, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted: list[dict[str, int]] = []

    def refusal(spec: Any, layers: Any, limits: Any) -> None:
        needs = needs_of_nodes(spec, layers, limits.ranks_on_nodes, limits.platform)
        counted.append(needs[0].rank)

    monkeypatch.setattr("hpczero.planner.fit.refusal", refusal)
    optimizer, options, lr = OPTIMIZERS[name]
    moments = {"SGD": 0, "AdamW, amsgrad": 3, "a user's own": 1}[name]
    wanted = {"optimizer": optimizer, "optimizer_options": options, "average": 0.9}
    with hpczero.initialize(made(Chain), spec_of(1, False, lr), world, **wanted) as engine:
        memory, units = engine.engine.memory(), engine.engine.units
        for kinds in counted:  # on rank 0
            assert memory == {kind: kinds[kind] for kind in memory}
        assert len(counted) == (world.rank == 0)
        one_step(engine, 0)
        owned = [unit.master.numel() for unit in units]
        assert memory["moments"] == 4 * moments * sum(owned)
        assert memory["average"] == 4 * sum(owned)
        assert memory["gradient of a unit"] == 4 * max(owned)
        update = engine.engine.update
        for unit in units:
            states = update.states(unit)
            assert len(states) == moments + 1
            assert any(state.any() for state in states.values()) or not unit.master.any()
        assert isinstance(update, TorchUpdate)
        for part, state, _ in update._all_parts():  # nothing is held a second time
            assert all(state.get(name, view) is view for name, view in part.views.items())


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ({"optimizer": "LBFGS"}, "torch.optim.lbfgs.LBFGS cannot be used"),
        ({"optimizer": Lamb}, "Lamb cannot be used: it does not update parts of a tensor"),
        ({"optimizer": "Sgd"}, "no optimizer of torch.optim has this name"),
        ({"optimizer_options": {"momentum": 0.9}}, "optimizer_options are for an `optimizer` of"),
        ({"groups": {"layer.0.*": {"lr": 1.0}}}, "matches no parameter; the nearest names are"),
        ({"groups": {"*": {"momentum": 0.1}}}, "no option; there are lr, weight_decay, betas and"),
        ({"groups": {"*": {"lr": -1.0}}}, r"lr = -1.0 of '\*' must be a number >= 0"),
        ({"groups": {"*": {"weight_decay": "no"}}}, "weight_decay = 'no' of .* must be a number"),
        ({"groups": {"*": {"betas": 0.9}}}, "betas = 0.9 of .* must be two numbers"),
        ({"groups": {"*": {"eps": 0.0}}}, "eps = 0.0 of .* must be > 0"),
        ({"optimizer": "SGD", "groups": {"*": {"beta": 0.1}}}, "'beta' is no option of a group"),
        ({"groups": {"*": 0.1}}, r"groups: '\*' has 0.1, not options: write them as"),
        ({"average": "0.9"}, "average = '0.9': give a number between 0 and 1"),
        ({"average": 1.0}, "average = 1.0: give a number between 0 and 1"),
    ],
)
def test_what_cannot_be_is_refused(world: World, wanted: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        hpczero.initialize(made(Chain), spec_of(1, False), world, **wanted)


def test_keys_of_the_spec_that_nobody_would_follow_are_refused(world: World) -> None:
    for key, value in {"betas": (0.9, 0.99), "eps": 1e-5, "weight_decay": 0.0}.items():
        with pytest.raises(InputError, match=rf"optimizer\.{key} = .* is for hpczero's AdamW"):
            hpczero.initialize(
                made(Chain), spec_of(0, False, **{key: value}), world, optimizer="Adam"
            )


@pytest.mark.ranks(2, 3)
def test_ranks_that_want_different_updates_are_refused(world: World) -> None:
    last = world.rank == world.size - 1
    cases: list[tuple[dict[str, Any], str]] = [
        ({"average": 0.5 if last else 0.9}, "average is 0.9 on rank 0 and 0.5 on rank"),
        ({"groups": {"*": {"lr": float(last)}}}, "groups is .* on rank 0 and .* on rank"),
        ({"optimizer": Wandering if last else "SGD"}, "optimizer is 'SGD' on rank 0 and Wandering"),
        ({"accumulates": last}, "accumulates is False on rank 0 and True on rank"),
        ({"tensor_plan": {"a": "row"} if last else None}, "tensor_plan is None on rank 0 and"),
        ({"groups": 3 if last else {}}, r"rank \d on .*: groups = 3: give a table with text for"),
    ]
    for wanted, what in cases:
        with pytest.raises(InputError, match=what):
            hpczero.initialize(made(Chain), spec_of(1, False), world, **wanted)


def test_a_rate_for_parameters_that_there_are_not(world: World) -> None:
    with begun(world, 1, False, 1) as (engine, _):
        engine.backward(engine(samples(slice(0, 2)), {0}))
        with pytest.raises(InputError, match=r"step\(lr=...\): 'head.\*' matches no parameter"):
            engine.step(lr={"head.*": 1e-3})
        engine.step()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.ranks(2, 3)
def test_rates_that_differ_change_nothing(world: World, stage: int) -> None:
    """A schedule that follows each rank's own loss would give them."""
    last = world.rank == world.size - 1
    with begun(world, stage, False, 1) as (engine, _):
        one_step(engine, 0)
        before = engine.full_state_dict()
        own: list[tuple[Any, str]] = [
            (0.1 if last else 0.2, "lr = 0.2"),
            (torch.tensor(0.01 if last else 0.0100001), "lr = 0.0100001"),
            ({"*": 0.1 if last else 0.2}, "those of single parameters"),
        ]
        for lr, what in own:
            engine.backward(engine(samples(slice(0, 2)), {0}))
            with pytest.raises(HpczeroError, match=rf"give different learning rates \({what}"):
                engine.step(lr=lr)
            after = engine.full_state_dict()
            assert all(torch.equal(before[name], after[name]) for name in before)
        one_step(engine, 1)
        after = engine.full_state_dict()
        changed = [name for name in before if not torch.equal(before[name], after[name])]
        assert bool(changed) == engine.is_first


@pytest.mark.ranks(2)
def test_a_rate_is_a_number_of_any_kind(world: World) -> None:
    """Equal ones may be of different kinds."""
    first = world.rank == 0
    with begun(world, 1, False, 1) as (engine, _):
        for lr in (
            np.float64(0.01) if first else 0.01,
            0 if first else 0.0,
            torch.tensor(0.5) if first else np.float32(0.5),
        ):
            engine.backward(engine(samples(slice(0, 2)), {0}))
            engine.step(lr=lr)
        for wrong in (float("nan"), float("inf"), -1.0, "much", [1, 2], {"*": -1.0}):
            with pytest.raises(InputError, match="a learning rate is a"):
                engine.step(lr=wrong)


@pytest.mark.ranks(2)
def test_rates_that_differ_are_no_overflow(world: World) -> None:
    spec = spec_of(1, False)
    spec["train"] = {**spec["train"], "precision": "fp16"}
    with hpczero.initialize(made(Chain), spec, world) as engine:
        scale = engine.engine.loss_scale
        engine.backward(engine(samples(slice(0, 2)).to(engine.dtype), {0}) / scale.value)
        with pytest.raises(HpczeroError, match="give different learning rates"):
            engine.step(lr=0.1 if world.rank else 0.2)
        assert engine.engine.loss_scale == scale
