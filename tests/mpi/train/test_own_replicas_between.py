"""Loops of one's own whose replicas train by themselves: what a program does between two steps."""

import pytest
import torch

from hpczero.comm.world import World
from tests.support.own_replicas import (
    LOCAL,
    STEPS,
    are_equal,
    here,
    looping,
    parameters_of,
    spec_of,
)
from tests.support.replicas import kept

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(2, 3, 4), pytest.mark.usual(4)]

STAGES = pytest.mark.parametrize("stage", [1, 2, 3])
LOCALS = pytest.mark.parametrize("method", LOCAL)


@STAGES
@LOCALS
@pytest.mark.parametrize("at", [3, 4])
@pytest.mark.few(1)
def test_a_forward_with_gradients_inside_averaged_changes_nothing(
    world: World, method: str, stage: int, at: int
) -> None:
    """Also where an outer step is due: it is not that of the weights which are there meanwhile."""
    found = []
    for looks in (False, True):
        with looping(world, spec_of(method, stage)) as loop:
            engine = loop.engine
            loop.run(at)
            if looks:
                with engine.averaged():
                    engine(torch.ones(2, 10))
                    state = parameters_of(engine.full_state_dict())
                    outer = here(engine)
                assert are_equal(world, outer)
                if world.rank == 0:
                    assert all(torch.equal(state[name], outer[name]) for name in outer)
            losses = dict(loop.run(STEPS).losses)
            found.append((losses, kept(engine.engine)))
    (expected, states), (losses, others) = found
    assert losses == expected
    assert [name for name in states if not torch.equal(states[name], others[name])] == []


@STAGES
@LOCALS
@pytest.mark.parametrize("steps", [4, 5])
@pytest.mark.few(3)
def test_replicas_come_together(world: World, method: str, stage: int, steps: int) -> None:
    with looping(world, spec_of(method, stage)) as loop:
        engine = loop.engine
        loop.run(steps)
        before = here(engine)
        engine.come_together()
        after = here(engine)
        assert are_equal(world, after)
        for name, values in after.items():
            mean = world.everyone.stack(before[name]).mean(0)
            torch.testing.assert_close(values, mean, rtol=1e-5, atol=1e-6)
        state = parameters_of(engine.full_state_dict())
        if world.rank == 0:
            assert all(torch.equal(state[name], after[name]) for name in after)


@STAGES
@LOCALS
@pytest.mark.few(1)
def test_what_is_on_its_way_is_not_added_to_what_is_loaded(
    world: World, shared_folder: str, method: str, stage: int
) -> None:
    """A loop that goes back to a checkpoint after the forward with which an outer step begins."""
    with looping(world, spec_of(method, stage, shared_folder)) as loop:
        engine = loop.engine
        loop.run(3)
        engine.save(wait=True)
        expected = dict(loop.run(STEPS).losses)
        engine(torch.ones(2, 10))
        engine.load(f"{shared_folder}/{engine.spec.name}")
        assert engine.steps == 3
        loop.losses.clear()
        loop.run(STEPS)
        assert loop.losses == {step: expected[step] for step in range(4, STEPS + 1)}


@LOCALS
@pytest.mark.few(2)
def test_a_loop_may_end_with_an_outer_step_on_its_way(world: World, method: str) -> None:
    for _ in range(2):
        with looping(world, spec_of(method, 2)) as loop:
            loop.run(4)
            loop.engine(torch.ones(2, 10))


LATE = {"outer": {"every": 2, "begin": 5, "lr": 0.9, "momentum": 0.3}}


@STAGES
@pytest.mark.parametrize("at", [8, 5, 4])
@pytest.mark.few(1)
def test_gradients_are_summed_until_local_steps_begin(
    world: World, shared_folder: str, stage: int, at: int
) -> None:
    """Losses are those without them, to the bit; and a stop at any moment changes nothing."""
    late = spec_of("sums", stage, shared_folder, optimizer={"eps": 1e-4, **LATE})
    with looping(world, spec_of("sums", stage, shared_folder) | {"name": "sums"}) as loop:
        summed = dict(loop.run(6).losses)
    with looping(world, late | {"name": "whole"}) as loop:
        loop.run(at)
        assert are_equal(world, here(loop.engine)) == (at <= 5)
        loop.engine.save(wait=True)
        whole = dict(loop.run(STEPS).losses)
        expected = kept(loop.engine.engine)
    assert {step: whole[step] for step in range(1, 7)} == summed
    with looping(world, late) as loop:
        loop.engine.load(f"{shared_folder}/whole/checkpoints/step-{at:08}")
        loop.run(STEPS)
        assert loop.losses == {step: whole[step] for step in range(at + 1, STEPS + 1)}
        found = kept(loop.engine.engine)
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []


@STAGES
@pytest.mark.few(1)
def test_replicas_that_sum_again_have_the_same_weights(
    world: World, shared_folder: str, stage: int
) -> None:
    """A checkpoint of local steps goes on with gradients summed for some steps: with the mean."""
    outer = {"eps": 1e-4, "outer": {**LATE["outer"], "begin": 0}}
    with looping(world, spec_of("sums", stage, shared_folder, optimizer=outer)) as loop:
        loop.run(3)
        assert not are_equal(world, here(loop.engine))
        loop.engine.save(wait=True)
    late = spec_of("sums", stage, shared_folder, optimizer={"eps": 1e-4, **LATE})
    with looping(world, late | {"name": "late"}) as loop:
        loop.engine.load(f"{shared_folder}/loop")
        assert are_equal(world, here(loop.engine))
        loop.run(5)
        assert are_equal(world, here(loop.engine))
        loop.run(8)
