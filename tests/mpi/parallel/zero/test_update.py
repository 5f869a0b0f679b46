"""Any optimizer, and groups: the same as in plain PyTorch, on any ranks, at every stage."""

from typing import Any

import pytest
import torch

from hpczero.comm.world import World
from hpczero.errors import InputError
from tests.support.optimizers import OPTIMIZERS
from tests.support.updates import (
    ADAMW,
    GROUPS,
    STEPS,
    assert_close,
    assert_equal,
    begun,
    by_hpczero,
    by_pytorch,
    load,
    one_step,
    samples,
    saved,
    spec_of,
)
from tests.support.user_modules import ways

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(1, 2, 3), pytest.mark.usual(2)]


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.few(3)
def test_an_optimizer_steps_as_in_pytorch_and_alike_everywhere(
    world: World, name: str, everything: bool
) -> None:
    optimizer, options, lr = OPTIMIZERS[name]
    wanted = {"optimizer": optimizer, "optimizer_options": options}
    expected = by_pytorch(optimizer, options, lr, groups=False)
    first, *others = (
        by_hpczero(world, spec_of(stage, shared, lr), **wanted)
        for stage, shared in ways(list(OPTIMIZERS).index(name), everything)
    )
    assert_close(first, expected, world.rank)
    for other in others:
        assert_equal(first, other)


@pytest.mark.parametrize("own_rates", [True, False])
@pytest.mark.parametrize("name", ["by the kernel", "SGD, nesterov and decay", "Adam, decay of L2"])
@pytest.mark.few(2)
def test_groups_have_options_and_rates_of_their_own(
    world: World, name: str, own_rates: bool, everything: bool
) -> None:
    optimizer, options, lr = OPTIMIZERS.get(name, (None, {}, 1e-2))
    wanted = {"optimizer": optimizer, "optimizer_options": options, "groups": GROUPS}
    of_spec: dict[str, Any] = {}
    plain, plain_options = optimizer, options
    if optimizer is None:
        plain, plain_options, of_spec = ADAMW, {"betas": (0.9, 0.95), "eps": 1e-6}, {"eps": 1e-6}
    expected = by_pytorch(plain, plain_options, lr, groups=True, own_rates=own_rates)
    first, *others = (
        by_hpczero(world, spec_of(stage, shared, lr, **of_spec), own_rates, **wanted)
        for stage, shared in (ways(1, True) if everything else ((0, False), (2, True)))
    )
    assert_close(first, expected, world.rank)
    for other in others:
        assert_equal(first, other)


def test_betas_and_eps_of_a_group_by_the_kernel(world: World) -> None:
    options = {"betas": (0.5, 0.8), "eps": 1e-3}
    with_groups = by_hpczero(world, spec_of(1, False), groups={"*": options})
    assert_equal(with_groups, by_hpczero(world, spec_of(1, False, **options)))


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@pytest.mark.parametrize("name", ["SGD, momentum and dampening", "Adam", "a user's own"])
@pytest.mark.few(1)
def test_all_stages_are_equal_to_the_bit_in_half_precision(
    world: World, name: str, precision: str, everything: bool
) -> None:
    optimizer, options, lr = OPTIMIZERS[name]
    how = {"accumulates": False, "average": 0.9}
    wanted = {"optimizer": optimizer, "optimizer_options": options, **how}
    first, *others = (
        by_hpczero(world, spec_of(stage, shared, lr, precision), **wanted)
        for stage, shared in ways(1, everything)
    )
    assert first[0] == pytest.approx(by_pytorch(optimizer, options, lr)[0], rel=0.02)
    for other in others:
        assert_equal(first, other)


@pytest.mark.parametrize("name", ["by the kernel", *OPTIMIZERS])
@pytest.mark.few(2)
def test_what_is_restored_goes_on_as_if_nothing_had_been(
    world: World, name: str, everything: bool
) -> None:
    """After 4 steps one layer has had no gradient yet; what is restored replaces other states."""
    optimizer, options, _ = OPTIMIZERS.get(name, (None, {}, 0.0))
    wanted = {
        "optimizer": optimizer,
        "optimizer_options": options,
        "groups": {"layers.1.*": {"lr": 5e-3}},
        "average": 0.8,
    }
    for stage, shared in ((2, False), (0, True)) if everything else ((2, False),):
        with begun(world, stage, shared, 4, **wanted) as (engine, losses):
            state = saved(engine)
            everyones = world.all_gather_objects(state["facts"])
            assert all(facts == everyones[0] for facts in everyones)
            late = state["facts"].get("kept", {}).get("layers.2.weight", {})
            assert True not in late.values() or name in ("Adagrad", "one that knows where it began")
            losses = [one_step(engine, step) for step in range(4, STEPS)]
            with engine.averaged():
                whole = engine.full_state_dict()
            last = saved(engine)
        with begun(world, stage, shared, 6, **wanted) as (engine, _):
            load(engine, state, 4)
            assert [one_step(engine, step) for step in range(4, STEPS)] == losses
            with engine.averaged():
                assert_equal(([], whole), ([], engine.full_state_dict()))
            again = saved(engine)
        assert again["facts"] == last["facts"]
        for one, other in zip(last["flat"], again["flat"], strict=True):
            assert all(torch.equal(one[state], other[state]) for state in one)


def test_states_of_another_optimizer_are_refused(world: World) -> None:
    with begun(world, 1, False, 0, optimizer="Adam") as (engine, _):
        facts = engine.engine.update.facts()
    for optimizer, name in ((None, "adamw"), ("SGD", "torch.optim.sgd.SGD")):
        with (
            begun(world, 1, False, 0, optimizer=optimizer) as (engine, _),
            pytest.raises(InputError, match=f"of torch.optim.adam.Adam, not of {name}"),
        ):
            engine.engine.update.restore(facts)


@pytest.mark.parametrize("optimizer", [None, "SGD"])
def test_a_step_whose_gradient_is_not_finite_changes_nothing(
    world: World, optimizer: str | None
) -> None:
    options = {"momentum": 0.9} if optimizer else {}
    wanted = {"optimizer": optimizer, "optimizer_options": options, "average": 0.9}
    with begun(world, 2, False, 2, **wanted) as (engine, _):
        before = saved(engine)
        engine.backward(engine(samples(slice(0, 2)), {0, 1}) * float("inf"))
        assert engine.step().bad
        after = saved(engine)
        assert before["facts"] == after["facts"]
        for one, other in zip(before["flat"], after["flat"], strict=True):
            assert all(torch.equal(one[state], other[state]) for state in one)
