"""Which ranks of a node hold one copy of the states, and share its memory."""

from typing import Any

import pytest

from hpczero.comm.grid import Grid
from hpczero.model import families
from hpczero.planner.memory import need, needs_on_grid
from hpczero.planner.placement import Placement, placement, placements
from hpczero.spec.schema import Model, Parallel, Spec, Train, Zero

MODEL = Model(layers=6, hidden=64, heads=4, vocab=257, seq_len=32)
TWO_NODES = [0, 0, 0, 0, 1, 1, 1, 1]


def job(shard_ranks: Any, stage: Any = 1, node_shared: Any = "auto", **parallel: Any) -> Spec:
    return Spec(
        model=MODEL,
        train=Train(global_batch=16, micro_batch=1),
        zero=Zero(stage=stage, shard_ranks=shard_ranks, node_shared=node_shared),
        parallel=Parallel(**{"order": "tensor,data,pipeline", **parallel}),
    )


def placed(spec: Spec, node_of_rank: list[int] = TWO_NODES) -> dict[int, list[Placement]]:
    return placements(spec, Grid.build(spec.parallel, node_of_rank))


def test_only_ranks_of_one_copy_share() -> None:
    assert placed(job("all")) == {node: [Placement(8, 4, True)] for node in (0, 1)}
    assert placed(job(4)) == {node: [Placement(4, 4, True, replicas=2)] for node in (0, 1)}
    assert placed(job("node")) == placed(job(4))
    twice = [Placement(2, 2, True, replicas=4)] * 2
    assert placed(job(2)) == dict.fromkeys((0, 1), twice), "a node has two copies"
    alone = [Placement(1, 1, False, replicas=8)] * 4
    assert placed(job(1)) == dict.fromkeys((0, 1), alone)


def test_a_worker_on_one_node_shares_whole_weights_at_stage_3() -> None:
    assert not placed(job("all", 3))[0][0].shared
    assert placed(job("node", 3))[0][0].shared
    assert not placed(job("node", 3, node_shared=False))[0][0].shared


def test_nodes_with_different_numbers_of_ranks() -> None:
    found = placed(job("node"), [0, 0, 0, 0, 1, 1])
    assert found == {
        0: [Placement(2, 2, True, replicas=3)] * 2,
        1: [Placement(2, 2, True, replicas=3)],
    }


def test_each_part_of_the_model_has_its_own() -> None:
    spec = job("node", tensor=2)
    grid = Grid.build(spec.parallel, TWO_NODES)
    assert placements(spec, grid)[1] == [
        Placement(2, 2, True, tensor_rank=part, replicas=2) for part in range(2)
    ]
    assert placement(spec, grid, 5) == Placement(2, 2, True, tensor_rank=1, replicas=2)


@pytest.mark.parametrize("stage", range(1, 4))
def test_states_of_a_rank_go_by_the_ranks_that_share_a_copy(stage: int) -> None:
    """As many micro-batches as with all, and the states of so many shards."""
    layers = families.layers(MODEL)
    alone, of_four, of_all = (
        need(job(shards, stage, False), layers, Placement(ranks, 1, False, replicas=8 // ranks))
        for shards, ranks in ((1, 1), (4, 4), ("all", 8))
    )
    for kind in ("master", "moments"):
        assert of_four.each[kind] == pytest.approx(alone.each[kind] / 4, rel=0.1)
        assert of_all.each[kind] == pytest.approx(alone.each[kind] / 8, rel=0.1)
    assert of_four.each["activations"] == of_all.each["activations"]
    weights = 4 if stage == 3 else 1
    assert of_four.each["weights"] == pytest.approx(alone.each["weights"] / weights, rel=0.1)


def test_a_node_has_as_many_copies_as_workers() -> None:
    layers = families.layers(MODEL)

    def weights(shards: Any) -> int:
        spec = job(shards)
        return needs_on_grid(spec, layers, Grid.build(spec.parallel, TWO_NODES))[0].node["weights"]

    assert weights("node") == weights(4)
    assert weights(2) == pytest.approx(2 * weights(4), rel=0.01)
    assert weights(1) == pytest.approx(4 * weights(4), rel=0.01)


def test_replicas_store_different_units() -> None:
    """A copy of what is stored is a part of the shards."""
    layers = families.layers(MODEL)
    spec = job(2, node_shared=False)
    saved = spec.checkpoint.model_copy(update={"every": 1})
    spec = spec.model_copy(update={"checkpoint": saved})
    alone, several = (
        need(spec, layers, Placement(2, 1, False, replicas=replicas)).each["checkpoint copy"]
        for replicas in (1, 4)
    )
    assert alone / 4 <= several < alone / 2
