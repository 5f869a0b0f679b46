"""The grid: exhaustively on small ones, and that it is instant on large ones."""

import itertools
import random
from math import prod
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpczero.comm.grid import Grid, impossible
from hpczero.errors import InputError
from hpczero.spec.rules import AXES, axes_in_order
from hpczero.spec.schema import Parallel

USUAL = "tensor,data,pipeline"
ORDERS = [",".join(order) for order in itertools.permutations(AXES)]


def small_grids() -> list[tuple[Parallel, list[int]]]:
    """Every order with every size up to 4, on nodes dealt out in turn, in blocks, unevenly."""
    found = []
    for order, tensor, pipeline, data in itertools.product(ORDERS, (1, 2, 3), (1, 2, 4), (1, 2, 3)):
        ranks = tensor * pipeline * data
        nodes = random.Random(ranks).choices(range(3), k=ranks)
        for node_of_rank in (
            [0] * ranks,
            [rank % 2 for rank in range(ranks)],
            [rank // 4 for rank in range(ranks)],
            nodes,
        ):
            found.append((Parallel(tensor=tensor, pipeline=pipeline, order=order), node_of_rank))
    return found


def test_coordinates_ranks_and_groups_agree_on_all_small_grids() -> None:
    for parallel, node_of_rank in small_grids():
        grid, ranks = Grid.build(parallel, node_of_rank), range(len(node_of_rank))
        coordinates = {rank: {axis: grid.coordinate(rank, axis) for axis in AXES} for rank in ranks}
        assert len({tuple(place.values()) for place in coordinates.values()}) == len(ranks)
        for axis in AXES:
            groups = list(grid.groups(axis))
            assert sorted(rank for group in groups for rank in group) == list(ranks)
            for group in groups:
                assert [coordinates[rank][axis] for rank in group] == list(range(grid.size(axis)))
                others = [
                    {other: at for other, at in coordinates[rank].items() if other != axis}
                    for rank in group
                ]
                assert all(other == others[0] for other in others)
                assert all(grid.ranks(rank, axis) == group for rank in group)


def test_sizes_multiply_to_the_number_of_ranks() -> None:
    grid = Grid.build(Parallel(tensor=2, pipeline=3), [0] * 24)
    assert (grid.size("tensor"), grid.size("data"), grid.size("pipeline")) == (2, 4, 3)
    assert grid.axes == ("tensor", "data", "pipeline")


@pytest.mark.parametrize(
    ("sizes", "nodes", "alike"),
    [
        ({"tensor": 2}, [0, 0, 0, 0, 1, 1], True),  # 0 2 | 4 and 1 3 | 5
        ({"tensor": 2}, [0, 0, 0, 1, 1, 1], False),  # 0 2 | 4 and 1 | 3 5
        (
            {"tensor": 2, "order": "data,tensor,pipeline"},
            [0, 0, 0, 1, 1, 1],
            True,
        ),  # all of one node each
        ({"tensor": 2, "pipeline": 3}, [0, 0, 0, 1, 1, 1], True),  # one data rank
        ({}, [0, 0, 0, 1, 1], True),
        (
            {"pipeline": 2, "order": "data,pipeline,tensor"},
            [0, 0, 0, 0, 1, 1],
            True,
        ),  # stages have nothing in common
    ],
)
def test_whether_nodes_cut_the_data_ranks_alike_for_all_tensor_ranks(
    sizes: dict[str, Any], nodes: list[int], alike: bool
) -> None:
    assert Grid.build(Parallel(**{"order": USUAL} | sizes), nodes).nodes_cut_data_alike == alike


def test_default_order_is_tensor_then_data_then_pipeline() -> None:
    grid = Grid.build(Parallel(tensor=2, pipeline=2), [0] * 8)
    assert grid.ranks(5, "tensor") == (4, 5)
    assert grid.ranks(5, "data") == (5, 7)
    assert grid.ranks(5, "pipeline") == (1, 5)


def test_the_order_decides_who_are_neighbours() -> None:
    grid = Grid.build(Parallel(tensor=2, pipeline=2, order="pipeline, data, tensor"), [0] * 8)
    assert grid.ranks(0, "pipeline") == (0, 1)
    assert grid.ranks(0, "tensor") == (0, 4)


def test_the_innermost_axis_stays_on_a_node_however_ranks_were_dealt_out() -> None:
    in_turn = Grid.build(Parallel(tensor=4, order=USUAL), [rank % 4 for rank in range(16)])
    assert in_turn.groups_across_nodes("tensor") == 0
    assert in_turn.ranks(1, "tensor") == (1, 5, 9, 13)
    assert in_turn.groups_across_nodes("data") == 4


def test_nodes_of_unequal_size() -> None:
    grid = Grid.build(Parallel(tensor=2, order=USUAL), [0, 0, 0, 1, 1, 1, 1, 1])
    assert [grid.ranks(rank, "tensor") for rank in (0, 2, 4)] == [(0, 1), (2, 3), (4, 5)]
    assert grid.groups_across_nodes("tensor") == 1


@given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 200))
def test_a_grid_is_built_exactly_if_the_axes_divide_the_ranks(
    tensor: int, pipeline: int, ranks: int
) -> None:
    parallel = Parallel(tensor=tensor, pipeline=pipeline)
    if ranks % (tensor * pipeline) == 0:
        assert Grid.build(parallel, [0] * ranks).size("data") == ranks // (tensor * pipeline)
    else:
        with pytest.raises(InputError, match=f"does not divide the {ranks} rank"):
            Grid.build(parallel, [0] * ranks)


@pytest.mark.parametrize(
    ("tensor", "pipeline", "ranks", "message"),
    [
        (
            4,
            3,
            32,
            (
                "tensor(4) x pipeline(3) = 12 does not divide the 32 ranks given: use mpirun -n "
                "36 or 24, or parallel.pipeline = 2, 4 or 8"
            ),
        ),
        (
            3,
            1,
            32,
            (
                "tensor(3) does not divide the 32 ranks given: use mpirun -n 33 or 30, or "
                "parallel.tensor = 2, 4, 8 or 16"
            ),
        ),
        (
            2,
            1,
            1,
            "tensor(2) does not divide the 1 rank given: use mpirun -n 2, or parallel.tensor = 1",
        ),
        (
            5,
            2,
            7,
            (
                "tensor(5) x pipeline(2) = 10 does not divide the 7 ranks given: use mpirun -n "
                "10, or parallel.tensor = 7 and parallel.pipeline = 1"
            ),
        ),
        (
            4,
            3,
            10,
            (
                "tensor(4) x pipeline(3) = 12 does not divide the 10 ranks given: use mpirun -n "
                "12, or parallel.tensor = 5 and parallel.pipeline = 2"
            ),
        ),
    ],
)
def test_an_impossible_grid_says_what_would_work(
    tensor: int, pipeline: int, ranks: int, message: str
) -> None:
    with pytest.raises(InputError) as caught:
        Grid.build(Parallel(tensor=tensor, pipeline=pipeline), [0] * ranks)
    assert str(caught.value) == message


@given(st.integers(1, 12), st.integers(1, 12), st.integers(1, 100))
def test_what_an_impossible_grid_proposes_does_work(tensor: int, pipeline: int, ranks: int) -> None:
    try:
        Grid.build(Parallel(tensor=tensor, pipeline=pipeline), [0] * ranks)
    except InputError as error:
        for fix in str(error).split(": use ")[1].split(", or "):
            for changed in fixes(fix):
                wanted = {"tensor": tensor, "pipeline": pipeline, "ranks": ranks} | changed
                given_ranks = wanted.pop("ranks")
                Grid.build(
                    Parallel(tensor=wanted["tensor"], pipeline=wanted["pipeline"]),
                    [0] * given_ranks,
                )


def fixes(words: str) -> list[dict[str, int]]:
    """ "parallel.tensor = 2, 4 or 8", "mpirun -n 2 or 4", "parallel.tensor = 5 and
    parallel.pipeline = 2"
    """
    words = words.replace("mpirun -n ", "ranks = ").replace("parallel.", "")
    if " and " in words:
        return [
            {
                name: int(number)
                for name, number in (part.split(" = ") for part in words.split(" and "))
            }
        ]
    name, numbers = words.replace(" or ", ", ").split(" = ")
    return [{name: int(number)} for number in numbers.split(", ")]


def test_what_is_proposed_keeps_within_what_the_model_allows() -> None:
    assert impossible(Parallel(tensor=6), 32, {"tensor": 4}).endswith(
        "use mpirun -n 36 or 30, or parallel.tensor = 2 or 4"
    )
    assert impossible(Parallel(tensor=5, pipeline=7), 64, {"tensor": 3, "pipeline": 20}).endswith(
        "or parallel.tensor = 2 and parallel.pipeline = 8"
    )
    assert impossible(Parallel(pipeline=3), 16, {"pipeline": 1}).endswith(
        "or parallel.pipeline = 1"
    )


def test_an_order_that_matters_has_to_be_decided_before() -> None:
    assert Grid.build(Parallel(tensor=2, pipeline=2), [0] * 8).axes == (
        "tensor",
        "data",
        "pipeline",
    ), "on one node"
    assert Grid.build(Parallel(tensor=4), [0, 0, 1, 1]).axes == ("tensor", "data", "pipeline"), (
        "one axis"
    )
    with pytest.raises(AssertionError, match="has not been decided"):
        Grid.build(Parallel(tensor=2), [0, 0, 1, 1])


@pytest.mark.parametrize(
    "order",
    ["", "data", "tensor,tensor,data,pipeline", "tensor,data,pipelin", "tensor;data;pipeline"],
)
def test_an_impossible_order_lists_the_axes(order: str) -> None:
    with pytest.raises(InputError, match="the axes are tensor, data, pipeline"):
        axes_in_order(Parallel(tensor=2, pipeline=2, order=order))


def test_groups_over_several_axes_agree_on_all_small_grids() -> None:
    for parallel, node_of_rank in small_grids():
        grid, ranks = Grid.build(parallel, node_of_rank), range(len(node_of_rank))
        for axes in (("tensor", "data"), ("pipeline", "data"), AXES, ()):
            others = [axis for axis in AXES if axis not in axes]
            groups = list(grid.groups(*axes))
            assert sorted(rank for group in groups for rank in group) == list(ranks)
            for group in groups:
                assert len(group) == prod(map(grid.size, axes))
                assert (
                    len({tuple(grid.coordinate(rank, axis) for axis in others) for rank in group})
                    == 1
                )
                assert all(grid.ranks(rank, *axes) == group for rank in group)
                inner_first = [axis for axis in grid.axes[::-1] if axis in axes]
                coordinates = [
                    [grid.coordinate(rank, axis) for axis in inner_first] for rank in group
                ]
                assert coordinates == sorted(coordinates)


@pytest.mark.parametrize("order", ORDERS)
def test_an_axis_may_be_divided(order: str) -> None:
    grid = Grid.build(
        Parallel(tensor=2, pipeline=3, order=order), [rank // 4 for rank in range(36)]
    )
    divided = grid.divided("data", {"shard": 3, "replica": 2})
    for rank in range(36):
        shard, replica = divided.coordinate(rank, "shard"), divided.coordinate(rank, "replica")
        assert grid.coordinate(rank, "data") == 3 * replica + shard
        assert divided.ranks(rank, "shard", "replica") == grid.ranks(rank, "data")
        assert divided.ranks(rank, "tensor") == grid.ranks(rank, "tensor")
        assert set(divided.ranks(rank, "shard")) & set(divided.ranks(rank, "replica")) == {rank}
    with pytest.raises(AssertionError):
        grid.divided("data", {"shard": 4, "replica": 2})


def test_an_axis_of_size_one_may_be_left_out() -> None:
    assert axes_in_order(Parallel(tensor=2, order="data,tensor")) == ("data", "tensor", "pipeline")
    grid = Grid.build(Parallel(tensor=2, order="data,tensor"), [0] * 4)
    assert [
        (grid.coordinate(rank, "data"), grid.coordinate(rank, "tensor")) for rank in range(4)
    ] == [(0, 0), (1, 0), (0, 1), (1, 1)]


def test_a_hundred_thousand_ranks() -> None:
    """Exact, and asking any rank takes as long as its group is large; the tests' time-out holds
    the rest.
    """
    ranks = 8 * 800 * 16
    grid = Grid.build(
        Parallel(tensor=8, pipeline=16, order=USUAL), [rank % (ranks // 8) for rank in range(ranks)]
    )  # dealt out in turn
    assert grid.groups_across_nodes("tensor") == 0
    assert grid.groups_across_nodes("data") == 8 * 16
    for rank in range(0, ranks, 997):
        assert len(grid.ranks(rank, "data")) == 800
        assert grid.ranks(rank, "data")[grid.coordinate(rank, "data")] == rank
    lines = grid.describe()
    assert len(lines) == 4
    assert max(map(len, lines)) < 250


def test_description() -> None:
    assert Grid.build(
        Parallel(tensor=2, pipeline=2, order=USUAL), [0, 0, 0, 0, 1, 1, 1, 1]
    ).describe() == [
        "8 ranks on 2 nodes: tensor(2) x data(2) x pipeline(2), innermost axis first",
        "  tensor    4 groups of 2, inside nodes:  [0 1]  [2 3]  [4 5]  [6 7]",
        "  data      4 groups of 2, inside nodes:  [0 2]  [1 3]  [4 6]  [5 7]",
        "  pipeline  4 groups of 2, across nodes:  [0 4]  [1 5]  [2 6]  [3 7]",
    ]
    assert Grid.build(Parallel(), [0]).describe() == [
        "1 rank on 1 node: tensor(1) x data(1) x pipeline(1), innermost axis first"
    ]


def test_description_of_shards_and_replicas() -> None:
    grid = Grid.build(Parallel(tensor=2, order=USUAL), [0, 0, 0, 0, 1, 1, 1, 1])
    assert grid.describe("node") == [
        "8 ranks on 2 nodes: tensor(2) x data(4) x pipeline(1), innermost axis first",
        "  tensor    4 groups of 2, inside nodes:  [0 1]  [2 3]  [4 5]  [6 7]",
        "  data      2 groups of 4, across nodes:  [0 2 4 6]  [1 3 5 7]",
        "    shard   4 groups of 2, inside nodes:  [0 2]  [1 3]  [4 6]  [5 7]",
        "    replica 4 groups of 2, across nodes:  [0 4]  [1 5]  [2 6]  [3 7]",
    ]
    assert grid.describe(4) == grid.describe("all") == grid.describe()
    assert "shard" not in "".join(grid.describe(1)), "each rank has one copy"
    assert grid.size_by_axis("node") == {
        "tensor": 2,
        "data": 4,
        "pipeline": 1,
        "shard": 2,
        "replica": 2,
    }
    assert grid.size_by_axis("all") == {"tensor": 2, "data": 4, "pipeline": 1}


def test_axes_that_are_none_or_come_twice_are_a_mistake() -> None:
    grid = Grid.build(Parallel(), [0, 0])
    for axes in (("date",), ("data", "data")):
        with pytest.raises((AssertionError, KeyError)):
            grid.ranks(0, *axes)
        with pytest.raises(AssertionError):
            list(grid.groups(*axes))
