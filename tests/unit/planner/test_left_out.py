"""Settings of replicas and of compression that change nothing on the ranks of a job."""

from typing import Any

import pytest

from hpczero.comm.grid import Grid
from hpczero.planner.forecast import left_out
from hpczero.spec.optimizer import Outer
from hpczero.spec.rules_of_replicas import without_effect_of_replicas
from hpczero.spec.schema import Comm, Optimizer, Parallel, Spec, Train, Zero

NO_REPLICAS = (
    'comm.compress = "int8" has no effect: 4 data ranks with one copy of the states, and no '
    "weights are gathered between nodes in half precision"
)
ONE_WORKER = (
    'optimizer.outer.every = 5 has no effect: zero.shard_ranks = "node" makes the 4 data ranks one '
    "worker, which has nobody to exchange with; a number that is smaller makes several"
)


def spec(shard_ranks: Any, precision: Any = "bf16", **tables: Any) -> Spec:
    zero = Zero(stage=2, shard_ranks=shard_ranks, node_shared=False)
    return Spec(train=Train(precision=precision), zero=zero, **tables)


COMPRESSED = {"comm": Comm(compress="int8")}
APART = {"optimizer": Optimizer(outer=Outer(every=5))}


@pytest.mark.parametrize(
    ("job", "per_node", "expected"),
    [
        (spec("all"), 4, []),
        (spec("all", **COMPRESSED), 4, [NO_REPLICAS]),
        (spec("all", **COMPRESSED), 2, []),  # weights
        (spec(4, "fp32", **COMPRESSED), 2, [NO_REPLICAS]),
        (spec("node", **COMPRESSED), 4, [NO_REPLICAS]),
        (spec("node", **COMPRESSED), 2, []),  # sums of gradients
        (spec("node", **APART), 4, [ONE_WORKER]),
        (spec("node", **APART), 2, []),
    ],
)
def test_what_changes_nothing_is_said(job: Spec, per_node: int, expected: list[str]) -> None:
    grid = Grid.build(Parallel(), [rank // per_node for rank in range(4)])
    assert left_out(job, grid) == expected


def test_what_no_number_of_ranks_changes_is_said_once() -> None:
    job = spec("all", "fp32", **COMPRESSED)
    assert len(without_effect_of_replicas(job)) == 1
    assert left_out(job, Grid.build(Parallel(), [0, 0, 1, 1])) == []
