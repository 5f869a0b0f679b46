"""Loops of one's own whose replicas exchange less than gradients: the numbers of workers that one
process simulates, the weights that all have in common, and checkpoints.
"""

import pytest
import torch

from hpczero.comm.world import World
from hpczero.errors import HpczeroError
from hpczero.parallel.replicas.turns import fragment_of_update
from tests.support.own_loops import Loop, Small
from tests.support.own_replicas import (
    LOCAL,
    SEED,
    STEPS,
    are_equal,
    here,
    looping,
    parameters_of,
    spec_of,
)
from tests.support.own_twin import OwnTwin, layers_in
from tests.support.replicas import METHODS, kept
from tests.support.user_modules import made

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(2, 3, 4), pytest.mark.usual(4)]

STAGES = pytest.mark.parametrize("stage", [1, 2, 3])


def twin_of(loop: Loop, steps: int) -> OwnTwin:
    engine = loop.engine.engine
    spec = loop.engine.spec
    spec = spec.model_copy(update={"train": spec.train.model_copy(update={"steps": steps})})
    shards = engine.axis.size
    ranks = engine.axis.group.size // shards, shards, 1
    return OwnTwin(spec, ranks, made(Small, SEED), layers_in(engine))


@STAGES
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.few(1)
def test_equals_workers_that_one_process_simulates(world: World, method: str, stage: int) -> None:
    with looping(world, spec_of(method, stage)) as loop:
        twin = twin_of(loop, STEPS)
        first = {name: values.clone() for name, values in twin.weights.items()}
        loop.run(STEPS)
        found = parameters_of(loop.engine.full_state_dict())
    if world.rank:
        return
    twin.train()
    assert list(loop.losses.values()) == pytest.approx(twin.losses, rel=1e-5)
    expected = twin.outer or twin.weights
    assert found.keys() == expected.keys()
    off = [(found[name] - expected[name]).norm() for name in found]
    moved = [(first[name] - expected[name]).norm() for name in found]
    assert torch.stack(off).norm() < 0.01 * torch.stack(moved).norm()


@STAGES
@pytest.mark.parametrize("method", LOCAL)
@pytest.mark.parametrize("steps", [3, 4, 6])
@pytest.mark.few(1)
def test_averaged_shows_the_outer_weights(
    world: World, method: str, stage: int, steps: int
) -> None:
    """Before, in and after a round; also when what replicas send is on its way."""
    with looping(world, spec_of(method, stage)) as loop:
        engine = loop.engine
        loop.run(steps)
        own = here(engine)
        assert not are_equal(world, own)
        x = torch.ones(2, 10)
        engine(x)  # the outer step begins, if it is time for one
        with engine.averaged():
            outer = here(engine)
            state = parameters_of(engine.full_state_dict())
            with torch.no_grad():
                of_outer = engine(x).clone()
        assert are_equal(world, outer)
        assert are_equal(world, {"output": of_outer})
        now = here(engine)
        outer_spec = engine.spec.optimizer.outer
        turn = fragment_of_update(steps, outer_spec.every, outer_spec.fragments)
        changed = {name for name in own if not torch.equal(own[name], now[name])}
        assert bool(changed) == (turn is not None)
        assert all(torch.equal(now[name], outer[name]) for name in changed)
        with torch.no_grad():
            assert torch.equal(engine(x), of_outer) == (len(changed) == len(own))
        again = parameters_of(engine.full_state_dict())
        if world.rank == 0:
            assert all(torch.equal(outer[name], state[name]) for name in outer)
            assert all(torch.equal(outer[name], again[name]) for name in outer)
        loop.run(steps + 2)


@STAGES
@pytest.mark.parametrize("method", [*LOCAL, "one_bit_adam"])
@pytest.mark.few(1)
def test_what_is_loaded_is_what_all_have(world: World, method: str, stage: int) -> None:
    other = made(Small, 17).state_dict()
    with looping(world, spec_of(method, stage)) as loop:
        engine = loop.engine
        loop.run(4)
        engine.load_state_dict(other)
        loaded = here(engine)
        assert are_equal(world, loaded)
        assert all(torch.equal(loaded[name], other[name]) for name in loaded)
        found = parameters_of(engine.full_state_dict())
        assert all(torch.equal(found[name], other[name]) for name in found)
        if method in LOCAL:
            with engine.averaged():
                outer = here(engine)
            assert all(torch.equal(outer[name], other[name]) for name in outer)
            units = engine.engine.units
            update = engine.engine.update
            assert all(torch.equal(unit.master, update.outer[unit]) for unit in units)
        loop.run(8)
        assert all(loss < 10 for loss in loop.losses.values())


@STAGES
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.few(1)
def test_weights_are_written_where_all_replicas_have_the_same(
    world: World, method: str, stage: int
) -> None:
    with looping(world, spec_of(method, stage)) as loop:
        engine = loop.engine
        loop.run(4)
        before = here(engine)
        if method in LOCAL:
            with (
                pytest.raises(HpczeroError, match=r"gathered\(modify=True\): with optimizer.outer"),
                engine.gathered([engine.module.scale], modify=True),
            ):
                pass
            now = here(engine)
            assert all(torch.equal(before[name], now[name]) for name in now)
        else:
            with engine.gathered([engine.module.scale], modify=True), torch.no_grad():
                engine.module.scale.fill_(0.25)
            now = here(engine)
            assert are_equal(world, now)
            assert now["scale"] == 0.25
        loop.run(6)


@STAGES
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("at", [3, 4])
@pytest.mark.few(1)
def test_on_the_same_layout_it_goes_on_to_the_bit(
    world: World, shared_folder: str, method: str, stage: int, at: int
) -> None:
    """At an outer step, and in a round; what messages have left out is saved with the rest.

    At 4 a forward comes before, with which an outer step begins that the save then ends.
    """
    spec = spec_of(method, stage, shared_folder)

    def until_save(loop: Loop) -> None:
        loop.run(at)
        if at == 4:
            loop.engine(torch.ones(2, 10))

    with looping(world, spec | {"name": "whole"}) as loop:
        assert loop.engine.resume().step == 0
        until_save(loop)
        if at == 4:
            loop.engine.full_state_dict()
        whole = loop.run(STEPS).losses
        expected, common = kept(loop.engine.engine), loop.engine.full_state_dict()
    with looping(world, spec) as loop:
        until_save(loop)
        loop.engine.save(wait=at == 4)
        loop.run(at + 2)  # what comes after the save is lost
    with looping(world, spec) as loop:
        assert loop.engine.resume().step == at
        loop.run(STEPS)
        assert loop.losses == {step: whole[step] for step in range(at + 1, STEPS + 1)}
        found, now = kept(loop.engine.engine), loop.engine.full_state_dict()
    assert found.keys() == expected.keys()
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []
    assert all(torch.equal(now[name], common[name]) for name in parameters_of(now))


@STAGES
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.few(1)
def test_weights_alone_begin_a_training_of_their_own(
    world: World, shared_folder: str, method: str, stage: int
) -> None:
    """In a fresh loop and in one that has trained, as with the same weights given: to the bit."""
    spec = spec_of(method, stage, shared_folder)
    with looping(world, spec | {"name": "first"}) as loop:
        loop.run(5)
        loop.engine.save(wait=True)
        weights = loop.engine.full_state_dict()
    weights["seen"] = torch.tensor(0)
    found = []
    for number, before in enumerate((-1, 0, 4)):
        with looping(world, spec | {"name": f"other-{number}"}) as loop:
            if before < 0:
                loop.engine.load_state_dict(weights)
            else:
                loop.run(before)
                loop.engine.load(f"{shared_folder}/first", weights_only=True)
            loop.engine.steps = 0
            loop.losses.clear()
            losses = dict(loop.run(STEPS).losses)
            found.append((losses, kept(loop.engine.engine)))
    (given, expected), *others = found
    for losses, states in others:
        assert losses == given
        assert [name for name in states if not torch.equal(states[name], expected[name])] == []
