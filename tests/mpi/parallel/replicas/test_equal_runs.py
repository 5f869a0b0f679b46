"""Runs that must be equal: one replica and AdamW; several micro-batches and one."""

from itertools import product
from typing import Any

import pytest

from hpczero.comm.world import World
from hpczero.spec.schema import Spec
from tests.support.covering import Case
from tests.support.grids import differences
from tests.support.replicas import METHODS, spec_of
from tests.support.training import Record, distance, train

pytestmark = pytest.mark.mpi


def of_one_node(ranks: int, everything: bool) -> list[Case]:
    grids: list[dict[str, int]] = [{}, {"tensor": 2}, {"pipeline": 2}] if ranks == 4 else [{}]
    methods = [method for method in METHODS if method not in ("sums", "int8")]
    found = product(methods, (1, 2, 3), grids) if ranks in (2, 3, 4) else ()
    return [{"method": method, "stage": stage, **grid} for method, stage, grid in found]


def of_nodes(ranks: int, everything: bool) -> list[Case]:
    layouts: dict[int, list[dict[str, int]]] = {
        2: [{"per_node": 1}],
        4: [{"per_node": 2}, {"per_node": 2, "tensor": 2}, {"per_node": 1, "pipeline": 2}],
    }
    pairs = product(METHODS, layouts.get(ranks, []), (1, 2, 3))
    return [{"method": method, "stage": stage, **layout} for method, layout, stage in pairs]


def run(world: World, case: Case, **changes: Any) -> Record:
    sizes = {axis: case.get(axis, 1) for axis in ("tensor", "pipeline")}
    zero = {"stage": case["stage"]} | changes.pop("zero", {})
    spec = spec_of(case["method"], zero, sizes, **changes)
    return on_nodes(world, case, spec)


def on_nodes(world: World, case: Case, spec: Spec) -> Record:
    nodes = world.part(range(world.size), case.get("per_node", 0))
    found = train(nodes, spec)
    nodes.close()
    return found


@pytest.mark.cases(of=of_one_node)
@pytest.mark.usual(4)
@pytest.mark.few(1)
def test_one_replica_trains_as_adamw(world: World, case: Case) -> None:
    """All ranks on one node: nothing is sent less, and nothing is apart, to the bit."""
    found = run(world, case, eval_batches=1)
    everyone = {"shard_ranks": "all"}
    expected = run(world, case | {"method": "sums"}, zero=everyone, eval_batches=1)
    assert differences(expected, found) == []
    assert expected.validation_losses == found.validation_losses
    assert "replica" not in found.ledger.as_dict()


@pytest.mark.cases(of=of_nodes)
@pytest.mark.usual(4)
@pytest.mark.few(1)
def test_several_micro_batches_are_one(world: World, case: Case) -> None:
    """But for roundings, of which those that turn a sign, or an integer, are seen."""
    one, several = (run(world, case, micro_batch=size, steps=8) for size in (12, 1))
    first = run(world, case, micro_batch=12, steps=1)
    assert "replica" in one.ledger.as_dict()
    assert several.losses == pytest.approx(one.losses, rel=2e-5)
    assert several.norms == pytest.approx(one.norms, rel=1e-3)
    kept = {name: values for name, values in one.weights.items() if not name.endswith("qkv.bias")}
    moved = distance(kept, first.weights)  # the gradient of the keys' bias is rounding alone
    assert distance(kept, several.weights) < 0.05 * moved
