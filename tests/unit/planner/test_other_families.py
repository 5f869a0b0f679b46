"""Volumes of models that hpczero has no family of yet: ties of any stages, norms without a bias."""

from dataclasses import replace

import pytest

from hpczero.comm.grid import Grid
from hpczero.model import families
from hpczero.parallel.pipeline.partition import stages_of_ties
from hpczero.planner.sent import Sent
from hpczero.planner.volumes import Volumes
from hpczero.spec.schema import Model, Parallel, Spec, Train, Zero

MODEL = Model(layers=6, hidden=64, heads=4, vocab=257, seq_len=32, tied_embeddings=False)


def job(**parallel: object) -> Spec:
    return Spec(
        model=MODEL,
        train=Train(global_batch=4, micro_batch=2),
        zero=Zero(stage=1),
        parallel=Parallel(order="tensor,pipeline,data", **parallel),
    )


@pytest.mark.parametrize(
    ("users", "node_of_rank", "sixths"),
    [
        (["blocks.3"], [0, 0, 1, 1], {1: Sent(0, 6), 2: Sent(0, 6)}),
        (["blocks.3"], [0, 1, 1, 2], {1: Sent(6, 0), 2: Sent(6, 0)}),
        (["blocks.3", "blocks.5"], [0, 0, 0, 1], {1: Sent(4, 4), 2: Sent(4, 4), 3: Sent(0, 8)}),
    ],
    ids=["two stages on two nodes", "two stages of a node", "three stages"],
)
def test_ties_of_any_stages(
    users: list[str], node_of_rank: list[int], sixths: dict[int, Sent]
) -> None:
    """The stages that hold a tied parameter have an all-reduce of its gradient; no other has one.

    Each sends 2 (N - 1) / N of the gradient, written here in sixths of it.
    """
    name = "blocks.2.feed_forward.up.weight"
    spec = job(pipeline=4)
    layers = [
        replace(layer, uses=(name,)) if layer.name in users else layer
        for layer in families.layers(MODEL)
    ]
    grid = Grid.build(spec.parallel, node_of_rank)
    volumes = Volumes(spec, layers, grid.size("data"))
    assert stages_of_ties(volumes.chunks) == {name: tuple(sixths)}
    gradient = 4 * MODEL.hidden * MODEL.hidden * 2
    for stage in range(4):
        sent = volumes.of_rank(grid, stage)["pipeline"].get("all_reduce", Sent())
        expected = sixths.get(stage, Sent())
        assert abs(sent.inside - gradient * expected.inside / 6) <= 1, stage
        assert abs(sent.between - gradient * expected.between / 6) <= 1, stage


def test_norms_count_with_the_parameters_that_they_have() -> None:
    spec = job(tensor=2, sequence_parallel=True)
    layers = families.layers(MODEL)
    without_bias = [
        replace(
            layer,
            parameters=tuple(one for one in layer.parameters if not one.name.endswith("norm.bias")),
        )
        for layer in layers
    ]
    grid = Grid.build(spec.parallel, [0, 0])
    sent, less = (
        Volumes(spec, each, 1).of_rank(grid, 0)["tensor"]["all_reduce"].inside
        for each in (layers, without_bias)
    )
    norms = 2 * MODEL.layers + 1
    micro_batches = 2
    assert sent - less == micro_batches * norms * MODEL.hidden * 2


def test_an_axis_of_which_nothing_is_known_is_an_error() -> None:
    spec = job()
    grid = Grid.build(spec.parallel, [0, 0])
    volumes = Volumes(spec, families.layers(MODEL), 2)
    with pytest.raises(AssertionError, match="along the axis expert"):
        volumes._of_group(volumes._at(grid), "expert", [0, 1])
