"""Optimizers and schedules beside settings that they cannot have, or do not read."""

import pytest

from hpczero.model.families import FAMILIES
from hpczero.spec.optimizer import Optimizer, Outer, Schedule
from hpczero.spec.rules import contradictions, unavailable, without_effect
from hpczero.spec.schema import Model, Spec, Zero

OTHERS = pytest.mark.parametrize("name", ["lamb", "lion", "muon"])


def messages(**tables: object) -> list[str]:
    return [contradiction.text for contradiction in contradictions(Spec(**tables))]


@OTHERS
def test_states_elsewhere_are_for_adamw(name: str) -> None:
    [said] = messages(optimizer=Optimizer(name=name), zero=Zero(offload="nvme:/tmp"))
    assert 'zero.offload = "nvme:/tmp" steps states where they lie' in said
    assert f'optimizer.name = "{name}"' in said
    assert not messages(optimizer=Optimizer(name=name))


@OTHERS
def test_local_steps_are_for_adamw(name: str) -> None:
    said = messages(
        optimizer=Optimizer(name=name, outer=Outer(every=10)), zero=Zero(shard_ranks="node")
    )
    assert any("optimizer.outer.every = 10 is for replicas" in line for line in said)


def test_a_power_is_for_polynomials() -> None:
    [said] = messages(schedule=Schedule(name="linear", power=2.0))
    assert 'schedule.power = 2.0 is for "polynomial" only' in said
    assert not messages(schedule=Schedule(name="polynomial", power=2.0))


def test_keys_of_muon_do_nothing_elsewhere() -> None:
    optimizer = Optimizer(name="lamb", momentum=0.8, not_muon=("a",))
    notes = without_effect(Spec(optimizer=optimizer))
    assert [note for note in notes if "optimizer.momentum = 0.8 has no effect" in note]
    assert [note for note in notes if 'optimizer.not_muon = ["a"] has no effect' in note]
    assert not without_effect(Spec(optimizer=optimizer.model_copy(update={"name": "muon"})))


@pytest.mark.parametrize("family", FAMILIES)
def test_patterns_of_not_muon_have_parameters(family: str) -> None:
    """The default's need none: they are for any model."""
    model, defaults = Model(family=family, layers=2), Optimizer().not_muon

    def said(*patterns: str) -> list[str]:
        optimizer = Optimizer(name="muon", not_muon=patterns)
        return unavailable(Spec(model=model, optimizer=optimizer))

    assert not said(*defaults)
    assert not said("*.feed_forward.*", *defaults)
    [message] = said("*.feed_foward.*", *defaults)
    assert (
        "optimizer.not_muon: '*.feed_foward.*' matches no parameter; the nearest names" in message
    )
    assert ".feed_forward." in message
    assert "or leave it out" in message
    of_others = Spec(model=model, optimizer=Optimizer(not_muon=("a",)))
    assert not unavailable(of_others)
