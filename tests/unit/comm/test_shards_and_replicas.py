"""Shards and replicas: how the data ranks of a grid are divided, on even nodes and others."""

from itertools import groupby, product

import pytest

from hpczero.comm.grid import Grid
from hpczero.errors import InputError
from hpczero.spec.schema import Parallel

ORDER = "tensor,data,pipeline"


def grid_on(nodes: list[int], **sizes: int) -> Grid:
    """Return the grid of nodes with so many ranks each."""
    node_of_rank = [node for node, ranks in enumerate(nodes) for _ in range(ranks)]
    return Grid.build(Parallel(order=ORDER, **sizes), node_of_rank)


@pytest.mark.parametrize(
    ("nodes", "sizes", "shards"),
    [
        ([2, 2], {}, 2),
        ([2, 1], {}, 1),
        ([1, 2], {}, 1),
        ([3, 3], {}, 3),
        ([4, 2], {}, 2),
        ([6, 9, 3], {}, 3),
        ([4], {}, 4),
        ([1, 1, 1], {}, 1),
        ([4, 4], {"tensor": 2}, 2),
        ([4, 2], {"tensor": 2}, 1),  # two and one data ranks
        ([3, 3], {"tensor": 2}, 1),  # tensor ranks on both nodes: of one 2 + 1, the other 1 + 2
        ([4, 4], {"tensor": 4}, 1),  # a data rank on each node
        ([4, 4], {"pipeline": 2}, 4),  # a stage on each node: the data axis crosses none
        ([2, 2, 2, 2], {"pipeline": 2}, 2),
        ([6, 2], {"pipeline": 2}, 2),  # 4, and 2 + 2
    ],
)
def test_the_ranks_of_a_node_share_the_states(
    nodes: list[int], sizes: dict[str, int], shards: int
) -> None:
    grid = grid_on(nodes, **sizes)
    divided = grid.shards_and_replicas("node")
    assert divided.size("shard") == shards
    assert divided.size("shard") * divided.size("replica") == grid.size("data")
    assert divided.groups_across_nodes("shard") == 0


def test_no_more_shards_could_stay_on_nodes() -> None:
    """On all ways to put up to 12 ranks on up to 3 nodes."""
    for nodes in product(range(1, 7), range(6), range(4)):
        filled = [ranks for ranks in nodes if ranks]
        grid = grid_on(filled)
        found = grid.shards_and_replicas("node").size("shard")
        inside = [
            shards
            for shards in range(1, sum(filled) + 1)
            if sum(filled) % shards == 0
            and grid.shards_and_replicas(shards).groups_across_nodes("shard") == 0
        ]
        assert found == max(inside), filled


@pytest.mark.parametrize("shard_ranks", [1, 2, 3, 6, "all", "node"])
@pytest.mark.parametrize(
    "sizes", [{}, {"tensor": 2}, {"pipeline": 2}, {"tensor": 2, "pipeline": 2}]
)
def test_groups_divide_the_data_ranks(shard_ranks: int | str, sizes: dict[str, int]) -> None:
    """Ranks of a shard group follow each other; those with one shard are in a replica group."""
    data = 6
    ranks = data * sizes.get("tensor", 1) * sizes.get("pipeline", 1)
    grid = grid_on([ranks // 2, ranks // 2], **sizes)
    divided = grid.shards_and_replicas(shard_ranks)
    shards = divided.size("shard")
    for group in grid.groups("data"):
        cut = [group[start : start + shards] for start in range(0, data, shards)]
        assert [divided.ranks(first, "shard") for first, *_ in cut] == cut
        for number, alike in enumerate(zip(*cut, strict=True)):
            assert all(divided.ranks(rank, "replica") == alike for rank in alike)
            assert all(divided.coordinate(rank, "shard") == number for rank in alike)
            replica_of = [divided.coordinate(rank, "replica") for rank in alike]
            assert replica_of == list(range(data // shards))


@pytest.mark.parametrize(("shard_ranks", "replicas"), [("all", 1), (4, 1), (2, 2), (1, 4)])
def test_replicas_are_the_rest(shard_ranks: int | str, replicas: int) -> None:
    grid = grid_on([2, 2])
    assert grid.shards_and_replicas(shard_ranks).size("replica") == replicas
    of_axis = grid.size_by_axis(shard_ranks)
    assert ("replica" in of_axis) == ("shard" in of_axis) == (replicas > 1)
    assert of_axis.get("replica", 1) == replicas


@pytest.mark.parametrize(
    ("data", "shard_ranks", "words"),
    [
        (4, 3, "zero.shard_ranks = 3 does not divide the 4 data ranks: take 2 or 4"),
        (6, 4, "zero.shard_ranks = 4 does not divide the 6 data ranks: take 2, 3 or 6"),
        (4, 8, "zero.shard_ranks = 8 does not divide the 4 data ranks: take 2 or 4"),
        (1, 2, "zero.shard_ranks = 2 does not divide the 1 data rank: take 1"),
    ],
)
def test_what_does_not_divide_is_refused_with_the_way_out(
    data: int, shard_ranks: int, words: str
) -> None:
    with pytest.raises(InputError) as refusal:
        grid_on([data]).shards_and_replicas(shard_ranks)
    assert str(refusal.value) == f'{words}, "node" or "all"'


def test_tensor_and_pipeline_ranks_do_not_count() -> None:
    with pytest.raises(InputError, match="= 4 does not divide the 2 data ranks"):
        grid_on([4, 4], tensor=2, pipeline=2).shards_and_replicas(4)


def test_ranks_dealt_out_in_turn_are_sorted_by_node() -> None:
    grid = Grid.build(Parallel(order=ORDER), [0, 1, 0, 1, 0, 1])
    divided = grid.shards_and_replicas("node")
    assert list(divided.groups("shard")) == [(0, 2, 4), (1, 3, 5)]
    assert list(divided.groups("replica")) == [(0, 1), (2, 3), (4, 5)]
    nodes = [[grid.node_of_rank[rank] for rank in group] for group in divided.groups("shard")]
    assert all(len(list(groupby(of_group))) == 1 for of_group in nodes)
