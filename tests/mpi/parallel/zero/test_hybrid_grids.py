"""States sharded among the ranks of a node, or among fewer, with replicas on the others: any grid
trains the serial run's numbers, and the replicas stay equal to the bit.
"""

from collections.abc import Iterator
from functools import cache
from hashlib import sha256
from itertools import product

import pytest

from hpczero.comm.world import World
from hpczero.model import families
from hpczero.parallel.layout import unit_layout
from tests.support.covering import Case, covering
from tests.support.grids import (
    PLAIN,
    Serial,
    assert_agrees,
    differences,
    factors,
    on_grid,
    possible,
    spec_of,
)
from tests.support.training import Record

pytestmark = pytest.mark.mpi

RANKS_OF_NODES = {3: [2], 4: [2], 6: [3, 2], 8: [4]}  # world -> ranks per node; 3: 2 + 1
SHARDS = ["node", 1, 2]
TOGETHER = ("stage", "shards", "grid", "shared")  # whose full product --slow tries
VARIED = ("grid", "schedule", "sequence", "stage", "shared", "precision", "tied")


def can_be(case: Case, ranks: int) -> bool:
    """Leave out grids without replicas, and settings of an axis that is not there."""
    tensor, pipeline = case.get("grid", (1, 1))
    shards = case.get("shards", 1)
    data = ranks // (tensor * pipeline)
    has_replicas = data > 1 if shards == "node" else data % shards == 0 and data > shards
    return possible(case) and has_replicas


@cache
def cases(ranks: int, everything: bool) -> list[Case]:
    if ranks not in RANKS_OF_NODES:
        return []
    varied = {name: values for name, values in factors(ranks).items() if name in VARIED}
    varied |= {"shards": SHARDS, "per_node": RANKS_OF_NODES[ranks]}
    varied["batch"] = [(12, 1), (13, 2), (5, 3)]  # several micro-batches; others; one or none
    wanted = TOGETHER if everything else ()
    found = covering(varied, wanted, lambda case: can_be(case, ranks))
    return [{"dropout": 0.1} | case for case in found]


def on_two_nodes(ranks: int, everything: bool) -> list[Case]:
    grids = {4: [(1, 1)], 8: [(1, 1), (2, 1), (1, 2)]}.get(ranks, [])
    return [
        PLAIN | {"grid": grid, "shards": shards, "per_node": ranks // 2, "precision": precision}
        for grid, shards, precision in product(grids, ("node", 1), ("fp32", "bf16"))
    ]


def long_runs(ranks: int, everything: bool) -> list[Case]:
    found = {
        4: [{"grid": (1, 1), "stage": 3}, {"grid": (1, 2), "stage": 2, "shards": 1}],
        6: [{"grid": (1, 1), "stage": 2, "per_node": 3}],
        8: [{"grid": (2, 1), "stage": 1, "per_node": 4}],
    }.get(ranks, [])
    return [PLAIN | {"shards": "node", "per_node": 2} | case for case in found]


@pytest.fixture(scope="module")
def serial() -> Serial:
    return Serial()


@pytest.mark.cases(of=cases)
@pytest.mark.usual(4)
@pytest.mark.few(2)
def test_equals_the_serial_run(world: World, case: Case, serial: Serial) -> None:
    """Cases in which every two values of two settings meet; with --slow all combinations of
    stage, shards, grid and sharing, on each number of ranks.
    """
    spec = spec_of(case)
    found = on_grid(world, case, spec)
    assert_equal_replicas(world, found)
    assert found.norms[0] > spec.train.grad_clip
    assert_agrees(found, serial, world, spec)


@pytest.mark.cases(of=long_runs)
@pytest.mark.usual(4)
@pytest.mark.slow
def test_twenty_steps_equal_the_serial_run(world: World, case: Case, serial: Serial) -> None:
    spec = spec_of(case, steps=20)
    found = on_grid(world, case, spec)
    assert_equal_replicas(world, found)
    assert found.losses[-1] < found.losses[0]
    assert_agrees(found, serial, world, spec)


def assert_equal_replicas(world: World, found: Record) -> None:
    digest = sha256()
    for name in sorted(found.weights):
        digest.update(name.encode() + found.weights[name].numpy().tobytes())
    assert found.weights
    digests = world.all_gather_objects(digest.hexdigest())
    assert digests == digests[:1] * world.size


def at_stages(world: World, case: Case, *stages: int) -> Iterator[Record]:
    """Node-shared or not."""
    for stage, shared in product(stages, (False, True)):
        yield on_grid(world, case, spec_of(case | {"stage": stage, "shared": shared}))


@pytest.mark.cases(of=on_two_nodes)
@pytest.mark.usual(4)
@pytest.mark.slow
def test_all_stages_are_bitwise_equal_with_one_micro_batch(world: World, case: Case) -> None:
    first, *others = at_stages(world, case | {"batch": (world.size, 4)}, 0, 1, 2, 3)
    assert [differences(first, other) for other in others] == [[]] * 7


@pytest.mark.cases(of=on_two_nodes)
@pytest.mark.usual(4)
@pytest.mark.slow
def test_accumulating_stages_are_bitwise_equal_in_pairs(world: World, case: Case) -> None:
    for pair in ((0, 1), (2, 3)):
        first, *others = at_stages(world, case | {"batch": (13, 1)}, *pair)
        assert [differences(first, other) for other in others] == [[]] * 3


@pytest.mark.ranks(4)
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.few(2)
def test_gradients_alone_go_between_nodes(world: World, stage: int) -> None:
    """Once in a step, of each shard; two replicas send each other half of it, and half of the sum.

    Weights, and the sums of a node's ranks, stay on it; all ranks make the norm, of a few bytes.
    """
    case = PLAIN | {"grid": (1, 1), "stage": stage, "shards": "node", "per_node": 2}
    spec = spec_of(case)
    sent = on_grid(world, case, spec).sent_until[-1]
    layers = [layer for layer in families.layers(spec.model) if layer.parameters]
    shards = sum(unit_layout(layer, 2).shard_size for layer in layers)
    of_replicas = sent["replica"].pop("all_reduce")
    assert of_replicas["between"] == spec.train.steps * 4 * shards
    assert of_replicas["inside"] == 0
    assert not sent["replica"]
    assert sum(entry["between"] for entry in sent["shard"].values()) == 0
    assert sum(entry["inside"] for entry in sent["shard"].values()) > 0
    assert sum(entry["between"] for entry in sent["data"].values()) < 100 * spec.train.steps
