"""Every grid trains the same model to the same numbers, at every ZeRO stage, in every schedule
and precision.
"""

from collections.abc import Iterable, Iterator
from itertools import product

import pytest

from hpczero.comm.world import World
from tests.support.covering import Case
from tests.support.grids import PLAIN, Serial, assert_agrees, bitwise, on_grid, selection, spec_of
from tests.support.training import Record, train

pytestmark = pytest.mark.mpi

ILLUSTRATION = PLAIN | {
    "grid": (4, 4),
    "sequence": True,
    "stage": 2,
    "batch": (8, 1),
    "per_node": 8,
}


def with_data(ranks: int, everything: bool) -> list[Case]:
    """Tensor, pipeline or both, next to two data ranks."""
    grids = {4: [(2, 1), (1, 2)], 8: [(2, 2)]}.get(ranks, [])
    cases = [
        PLAIN | {"grid": grid, "precision": precision}
        for grid, precision in product(grids, ("fp32", "bf16", "fp16"))
    ]
    return [case | {"sequence": case["precision"] == "bf16"} for case in cases]


def long_runs(ranks: int, everything: bool) -> list[Case]:
    """3 stages for 7 layers (and for 7 blocks), 6 heads on 4 ranks, 7 on 6, 9 on 8; more data
    ranks than samples; all axes at once.
    """
    untied = PLAIN | {"tied": False, "sequence": True, "stage": 2}
    return {
        3: [PLAIN | {"grid": (1, 3), "blocks": blocks} for blocks in (5, 7)]
        + [untied | {"grid": (3, 1)}],
        4: [
            PLAIN | {"grid": (1, 2), "schedule": "interleaved", "stage": 3},
            untied | {"grid": (4, 1)},
        ],
        6: [untied | {"grid": (3, 2)}, PLAIN | {"grid": (1, 1), "batch": (5, 1), "shared": True}],
        8: [
            PLAIN | {"grid": (2, 2), "stage": 3},
            untied | {"grid": (2, 4), "batch": (3, 2)},
            PLAIN | {"grid": (2, 1), "batch": (3, 1)},
        ],
    }.get(ranks, [])


def scaled_in_a_pipeline(ranks: int, everything: bool) -> list[Case]:
    return [PLAIN | {"grid": (1, 2), "precision": "fp16"}] if ranks in (2, 4) else []


def of_each_optimizer(ranks: int, everything: bool) -> list[Case]:
    names = ("lamb", "lion", "muon") if ranks in (2, 3) else ()
    return [PLAIN | {"grid": (ranks, 1), "optimizer": name} for name in names]


@pytest.fixture(scope="module")
def serial() -> Serial:
    return Serial()


@pytest.mark.cases(of=selection)
@pytest.mark.few(6)
def test_equals_the_serial_run(world: World, case: Case, serial: Serial) -> None:
    """Cases in which every two values of two settings meet; with --slow all combinations of
    grid, schedule, sequence, stage and sharing.
    """
    spec = spec_of(case)
    found = on_grid(world, case, spec)
    assert found.norms[0] > spec.train.grad_clip
    assert_agrees(found, serial, world, spec)


@pytest.mark.cases(of=long_runs)
@pytest.mark.few(1)
def test_twenty_steps_equal_the_serial_run(world: World, case: Case, serial: Serial) -> None:
    spec = spec_of(case, steps=20, eval_every=7, eval_batches=3)
    found = on_grid(world, case, spec)
    assert found.validation_losses[-1] < found.validation_losses[0]
    assert_agrees(found, serial, world, spec)


@pytest.mark.cases(of=scaled_in_a_pipeline)
def test_a_pipelines_loss_is_scaled(world: World, case: Case, serial: Serial) -> None:
    spec = spec_of(case)
    assert_agrees(on_grid(world, case, spec), serial, world, spec)


@pytest.mark.slow
@pytest.mark.cases(of=of_each_optimizer)
def test_each_optimizer_on_tensor_ranks_equals_the_serial_run(
    world: World, case: Case, serial: Serial
) -> None:
    """In 20 steps; Lion in 3, as a sign that turns in late and small steps is not recognised.

    That the steps are those of the papers: tests/mpi/parallel/zero/test_other_optimizers.py.
    """
    spec = spec_of(case, steps=3 if case["optimizer"] == "lion" else 20)
    assert_agrees(on_grid(world, case, spec), serial, world, spec)


def at_stages(world: World, case: Case, stages: Iterable[int]) -> Iterator[Record]:
    """Node-shared or not."""
    for stage, shared in product(stages, (False, True)):
        yield on_grid(world, case, spec_of(case | {"stage": stage, "shared": shared}))


@pytest.mark.cases(of=with_data)
@pytest.mark.few(1)
def test_all_stages_are_bitwise_equal_with_one_micro_batch(world: World, case: Case) -> None:
    first, *others = at_stages(world, case | {"batch": (4, 2)}, range(4))
    assert [bitwise(first, other) for other in others] == [True] * 7


@pytest.mark.cases(of=with_data)
@pytest.mark.slow
def test_accumulating_stages_are_bitwise_equal_in_pairs(world: World, case: Case) -> None:
    for pair in ((0, 1), (2, 3)):
        first, *others = at_stages(world, case | {"batch": (7, 2)}, pair)
        assert [bitwise(first, other) for other in others] == [True] * 3


@pytest.mark.ranks(4)
def test_no_tensor_traffic_leaves_a_node(world: World) -> None:
    """On 2 nodes of 2; of 4: tests/mpi/planner/test_volumes.py."""
    nodes = world.part(range(4), 2)
    train(nodes, spec_of(PLAIN | {"grid": (2, 1), "order": "tensor,data,pipeline"}))
    entries = nodes.ledger.as_dict()
    nodes.close()
    assert any(entry["inside"] for entry in entries["tensor"].values())
    assert all(entry["between"] == 0 for entry in entries["tensor"].values())
    assert any(entry["between"] for entry in entries["data"].values())


@pytest.mark.ranks(6)
@pytest.mark.parametrize("stage", range(4))
def test_nodes_that_divide_data_ranks_differently(world: World, stage: int, serial: Serial) -> None:
    """3 ranks on a node and 2 tensor ranks: sums node by node would round differently (what
    tensor ranks have in common is compared).
    """
    nodes, case = (
        world.part(range(6), 3),
        PLAIN
        | {
            "grid": (2, 1),
            "order": "tensor,data,pipeline",
            "stage": stage,
            "shared": True,
            "batch": (6, 1),
        },
    )
    spec = spec_of(case, steps=8)
    found = train(nodes, spec)
    nodes.close()
    assert_agrees(found, serial, world, spec)


@pytest.mark.ranks(3, 4, 6, 8)
@pytest.mark.parametrize("sequence", [False, True])
def test_more_tensor_ranks_than_tokens_and_columns(
    world: World, sequence: bool, serial: Serial
) -> None:
    """Some ranks hold nothing of the vocabulary, and nothing of the feed-forward part."""
    case = PLAIN | {"grid": (world.size, 1), "sequence": sequence, "stage": 3}
    spec = spec_of(case, steps=20)
    spec = spec.model_copy(
        update={
            "model": spec.model.model_copy(update={"vocab": world.size - 1, "ffn": 1, "layers": 2})
        }
    )
    assert_agrees(on_grid(world, case, spec), serial, world, spec)


@pytest.mark.many_ranks
@pytest.mark.cases(of=lambda ranks, everything: [ILLUSTRATION] if ranks == 32 else [])
def test_the_published_illustration(world: World, case: Case, serial: Serial) -> None:
    """32 ranks on 4 nodes: 4 stages x 4 tensor ranks x 2 data ranks."""
    spec = spec_of(case, steps=4)
    assert_agrees(on_grid(world, case, spec), serial, world, spec)
