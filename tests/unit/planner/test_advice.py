"""Advice on a cause of a step's seconds names keys that there are, and that can still change."""

import re

import pytest

from hpczero.planner.advice import CALLED, sentence
from hpczero.spec.keys import keys
from hpczero.spec.rules import contradictions
from hpczero.spec.schema import Checkpoint, Memory, Model, Parallel, Spec, Train, Zero

MODEL = Model(layers=8, hidden=64, heads=4, vocab=64, seq_len=128)
PLAIN = Spec(model=MODEL, zero=Zero(stage=0))
MUCH = Spec(
    model=MODEL.model_copy(update={"kernels": "torch"}),
    train=Train(global_batch=64, micro_batch=2),
    parallel=Parallel(tensor=2, pipeline=2, schedule="interleaved", chunks=2),
    zero=Zero(stage=3, offload="cpu"),
    memory=Memory(recompute="block", offload_activations="cpu"),
    checkpoint=Checkpoint(every=10),
)


@pytest.mark.parametrize("cause", CALLED)
def test_advice_names_keys_that_there_are(cause: str) -> None:
    said = [sentence(cause, spec) for spec in (PLAIN, MUCH)]
    assert all(text.startswith(CALLED[cause]) for text in said)
    named = re.findall(r"[a-z]+\.[a-z_]+", " ".join(said))
    assert set(named) <= set(keys())


@pytest.mark.parametrize(
    ("cause", "way"),
    [
        ("compute", "memory.recompute"),
        ("compute", "parallel.tensor"),
        ("memory", "parallel.sequence_parallel"),
        ("memory", "model.kernels"),
        ("messages", "parallel.chunks"),
        ("data", "zero.stage"),
    ],
)
def test_what_is_not_in_use_cannot_be_less(cause: str, way: str) -> None:
    assert way in sentence(cause, MUCH)
    assert way not in sentence(cause, PLAIN)


@pytest.mark.parametrize(
    ("cause", "way"), [("bubble", "parallel.schedule"), ("optimizer", "zero.stage")]
)
def test_what_is_in_use_already_is_not_advised(cause: str, way: str) -> None:
    assert way in sentence(cause, PLAIN)
    assert way not in sentence(cause, MUCH)


def test_chunks_are_advised_where_the_layers_are_enough() -> None:
    """With embedding and head there are ten: two for each of five stages."""
    for stages, possible in ((5, True), (6, False)):
        spec = PLAIN.model_copy(update={"parallel": Parallel(pipeline=stages)})
        assert ("parallel.schedule" in sentence("bubble", spec)) == possible
        chunks = Parallel(pipeline=stages, schedule="interleaved", chunks=2)
        assert possible == (not list(contradictions(spec.model_copy(update={"parallel": chunks}))))
