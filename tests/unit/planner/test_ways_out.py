"""Settings that would fit are offered, but none that the spec's rules refuse."""

from typing import Any

import pytest

from hpczero.model import families
from hpczero.planner.fit import Bound, NodeLimits, refusal
from hpczero.spec.optimizer import Outer
from hpczero.spec.rules import contradictions
from hpczero.spec.schema import Data, Model, Spec, Train

GB = 10**9
RANKS = 4
MODEL = Model(layers=4, hidden=256, heads=4, vocab=200_000, seq_len=1026)
JOB = Spec(model=MODEL, train=Train(micro_batch=4, global_batch=16))


def offers(spec: Spec, model: Model | None = None) -> str:
    """Return what is offered on a node of too little memory, however much that is."""
    on_node = {0: RANKS}
    rooms = [(Bound(on_node, size * GB, "on n0"),) for size in range(1, 60)]
    layers = families.layers(model or spec.model)
    found = [refusal(spec, layers, NodeLimits(on_node, room)) for room in rooms]
    return "".join(text.partition("would fit: ")[2] for text in found if text)


@pytest.mark.parametrize(
    ("way", "changes"),
    [
        ("memory.loss_chunk", {"model": {"family": "bert"}}),
        ("memory.loss_chunk", {"model": {"family": "t5"}}),
        ("zero.offload", {"optimizer": {"name": "lamb"}}),
        ("zero.offload", {"optimizer": {"outer": Outer(every=5)}, "zero": {"shard_ranks": 2}}),
    ],
)
def test_what_is_refused_is_no_way_out(way: str, changes: dict[str, dict[str, Any]]) -> None:
    assert way in offers(JOB)
    tables = {name: getattr(JOB, name).model_copy(update=table) for name, table in changes.items()}
    offered = offers(JOB.model_copy(update=tables))
    assert offered
    assert way not in offered


def test_what_a_stand_in_has_against_itself_hides_no_way_out() -> None:
    """A loop's module has no length of its own: 1 stands for it, and `data.seq_len` is longer."""
    model = MODEL.model_copy(update={"family": "module:factory", "seq_len": 1})
    job = JOB.model_copy(update={"model": model, "data": Data(seq_len=64)})
    assert contradictions(job)
    offered = offers(job, MODEL)
    assert "zero.offload" in offered
    assert "memory.loss_chunk" not in offered
