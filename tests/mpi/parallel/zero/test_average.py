"""The moving average of the weights, and what sees it."""

import pytest
import torch

import hpczero
from hpczero.comm.world import World
from hpczero.errors import HpczeroError
from tests.support.updates import (
    STEPS,
    Chain,
    assert_equal,
    by_hpczero,
    one_step,
    samples,
    spec_of,
    used_in,
)
from tests.support.user_modules import WAYS, made

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(1, 2, 3), pytest.mark.usual(2)]


@pytest.mark.parametrize(("stage", "shared"), WAYS)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.few(3)
def test_the_average_is_that_of_all_weights_so_far(
    world: World, stage: int, shared: bool, precision: str
) -> None:
    spec = spec_of(stage, shared, precision=precision)
    with hpczero.initialize(made(Chain), spec, world, average=0.9) as engine:
        expected = engine.full_state_dict()
        for step in range(6):
            one_step(engine, step)
            for name, weights in engine.full_state_dict().items():
                expected[name].mul_(0.9).add_(weights, alpha=0.1)
        used, x = {0, 3}, samples(slice(0, 4)).to(engine.dtype)
        weights, output = engine.full_state_dict(), engine(x, used)
        with engine.averaged():
            found = engine.full_state_dict()
            for name, average in found.items():
                assert (average - expected[name]).norm() <= 1e-6 * average.norm(), name
            assert not torch.equal(engine(x, used), output)
            with engine.gathered(engine.module.parameters()):
                of_rank_0 = engine.module.layers[3].weight.detach().float().clone()
            if world.rank == 0:
                assert torch.equal(of_rank_0, found["layers.3.weight"].to(engine.dtype).float())
        assert torch.equal(engine(x, used), output)
        assert_equal(([], weights), ([], engine.full_state_dict()))


def test_the_average_changes_no_step(world: World) -> None:
    plain = by_hpczero(world, spec_of(3, False))
    with hpczero.initialize(made(Chain), spec_of(3, False), world, average=0.5) as engine:
        losses = []
        for step in range(STEPS):
            losses.append(one_step(engine, step))
            with engine.averaged(), torch.no_grad():
                engine(samples(slice(0, 2)), used_in(step))
        assert_equal(plain, (losses, engine.full_state_dict()))


def test_inside_averaged_nothing_is_trained(world: World) -> None:
    with hpczero.initialize(made(Chain), spec_of(1, True), world, average=0.5) as engine:
        one_step(engine, 0)
        weights = engine.full_state_dict()
        with engine.averaged():
            loss = engine(samples(slice(0, 2)), {0})
            with pytest.raises(HpczeroError, match="backward: the weights are their average"):
                engine.backward(loss)
            with pytest.raises(HpczeroError, match="load_state_dict: the weights are their"):
                engine.load_state_dict(weights)
            with (
                pytest.raises(HpczeroError, match=r"gathered\(modify=True\): the weights are"),
                engine.gathered([engine.module.scale], modify=True),
            ):
                pass
        engine.backward(engine(samples(slice(0, 2)), {0}))
        with (
            pytest.raises(HpczeroError, match="averaged: gradients of the weights wait"),
            engine.averaged(),
        ):
            pass
        engine.zero_grad()
        with pytest.raises(KeyError), engine.averaged():
            raise KeyError
        loss = engine(samples(slice(0, 2)), {0})
        with pytest.raises(HpczeroError, match=r"`with engine.averaged\(\): pass`, on every rank"):
            engine.backward(loss)
        with engine.averaged():
            pass
        assert_equal(([], weights), ([], engine.full_state_dict()))
        one_step(engine, 1)


def test_the_average_begins_with_what_is_loaded(world: World) -> None:
    other = made(Chain, 17).state_dict()
    with hpczero.initialize(made(Chain), spec_of(2, False), world, average=0.5) as engine:
        engine.load_state_dict(other)
        with engine.averaged():
            assert_equal(([], engine.full_state_dict()), ([], other))
    with (
        hpczero.initialize(made(Chain), spec_of(2, False), world) as engine,
        pytest.raises(HpczeroError, match=r"keeps no average.*average=0.999"),
        engine.averaged(),
    ):
        pass
