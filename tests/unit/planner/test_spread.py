"""Groups on equal nodes in closed form are those of the grid."""

from collections import Counter
from itertools import permutations, product

import pytest

from hpczero.comm.grid import Grid
from hpczero.errors import InputError
from hpczero.planner.allocation import Allocation
from hpczero.planner.spread import in_order, sizes_of, spreads
from hpczero.planner.volumes import resolved
from hpczero.spec.rules import AXES
from hpczero.spec.schema import Model, Parallel, Spec, Train, Zero

GRIDS = [(1, 1, 8), (2, 1, 8), (2, 2, 8), (4, 2, 16), (3, 2, 12), (2, 3, 24), (8, 4, 64)]


def node_of_rank(nodes: Allocation) -> list[int]:
    return [rank // nodes.ranks_per_node for rank in range(nodes.ranks)]


@pytest.mark.parametrize("each", [1, 2, 3, 4, 6, 8, 16])
@pytest.mark.parametrize(("tensor", "pipeline", "ranks"), GRIDS)
def test_a_spread_is_the_groups_on_the_most_nodes(
    tensor: int, pipeline: int, ranks: int, each: int
) -> None:
    nodes = Allocation(ranks, each)
    for order in permutations(AXES):
        parallel = Parallel(tensor=tensor, pipeline=pipeline, order=",".join(order))
        grid = Grid.build(parallel, node_of_rank(nodes))
        found = spreads(in_order(Spec(parallel=parallel), nodes), nodes)
        for axis in AXES:
            of_groups = [
                tuple(Counter(grid.node_of_rank[rank] for rank in group).values())
                for group in grid.groups(axis)
            ]
            assert found[axis].on_nodes in of_groups
            assert found[axis].nodes == max(map(len, of_groups))
            assert found[axis].ranks == grid.size(axis)


@pytest.mark.parametrize("each", [1, 2, 3, 4, 5, 6, 8, 12, 16])
@pytest.mark.parametrize(("tensor", "pipeline", "ranks"), GRIDS)
def test_shards_and_replicas_are_those_of_the_grid(
    tensor: int, pipeline: int, ranks: int, each: int
) -> None:
    nodes = Allocation(ranks, each)
    data = ranks // (tensor * pipeline)
    divisors = [size for size in range(1, data + 1) if data % size == 0]
    for order, shard_ranks in product(permutations(AXES), ("all", "node", *divisors)):
        parallel = Parallel(tensor=tensor, pipeline=pipeline, order=",".join(order))
        grid = Grid.build(parallel, node_of_rank(nodes)).shards_and_replicas(shard_ranks)
        found = spreads(in_order(Spec(parallel=parallel), nodes), nodes, shard_ranks)
        for axis in ("shard", "replica"):
            of_groups = [
                tuple(Counter(grid.node_of_rank[rank] for rank in group).values())
                for group in grid.groups(axis)
            ]
            assert found[axis].ranks == grid.size(axis)
            assert found[axis].on_nodes in of_groups
            assert found[axis].nodes == max(map(len, of_groups))


def test_shards_that_do_not_divide_the_data_ranks_are_an_error() -> None:
    parallel = Parallel(tensor=2, order="tensor,data,pipeline")
    sizes = in_order(Spec(parallel=parallel), Allocation(16, 4))
    with pytest.raises(InputError, match=r"shard_ranks = 3 does not divide the 8 data ranks: take"):
        spreads(sizes, Allocation(16, 4), 3)


def test_groups_beside_share_the_node() -> None:
    nodes = Allocation(64, 8)
    spec = Spec(parallel=Parallel(tensor=4, pipeline=2, order="tensor,data,pipeline"))
    found = spreads(in_order(spec, nodes), nodes)
    assert (found["tensor"].on_nodes, found["tensor"].beside) == ((4,), 2)
    assert (found["data"].on_nodes, found["data"].beside) == ((2,) * 4, 4)
    assert (found["pipeline"].on_nodes, found["pipeline"].beside) == ((1, 1), 8)
    assert found["world"].on_nodes == (8,) * 8


@pytest.mark.parametrize("micro_batch", [1, 4])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(("tensor", "pipeline", "ranks"), [(2, 2, 16), (4, 2, 32), (2, 4, 16)])
def test_the_automatic_order_is_the_one_that_runs(
    tensor: int, pipeline: int, ranks: int, stage: int, micro_batch: int
) -> None:
    spec = Spec(
        model=Model(layers=6, hidden=64, heads=4, vocab=128, seq_len=32),
        train=Train(global_batch=16, micro_batch=micro_batch),
        parallel=Parallel(tensor=tensor, pipeline=pipeline),
        zero=Zero(stage=stage, node_shared=False),
    )
    for each in (2, 4, 8):
        nodes = Allocation(ranks, each)
        order = [axis for axis, _ in in_order(spec, nodes)]
        assert ",".join(order) == resolved(spec, node_of_rank(nodes)).order


def test_ranks_that_do_not_divide_are_an_error() -> None:
    with pytest.raises(InputError, match="does not divide the 7 ranks given"):
        sizes_of(Parallel(tensor=2), Allocation(7, 4))
