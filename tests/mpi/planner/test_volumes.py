"""The bytes that the planner expects are the bytes in the ledger of a real run, of every rank,
along every axis, inside nodes and between them.
"""

import random
from itertools import pairwise
from typing import Any

import pytest

from hpczero.comm.grid import Grid
from hpczero.comm.world import World
from hpczero.model import families
from hpczero.planner.sent import Sent
from hpczero.planner.volumes import Volumes, resolved
from hpczero.spec.optimizer import Outer
from hpczero.spec.schema import Comm, Optimizer, Spec
from tests.support.jobs import EXCHANGES, MODEL, any_job, job, laid_out
from tests.support.training import train

pytestmark = pytest.mark.mpi

STREAM = MODEL.seq_len * MODEL.hidden * 2  # bytes of a sequence's activations between layers

Volume = dict[str, dict[str, Sent]]  # axis -> operation -> bytes


def expected(spec: Spec, world: World) -> Volume:
    grid = Grid.build(resolved(spec, world.node_of_rank), world.node_of_rank)
    return Volumes(spec, families.layers(spec.model), grid.size("data")).of_rank(grid, world.rank)


def sent_in_steps(world: World, spec: Spec) -> list[Volume]:
    """In each step but the first, in which ranks agree on an order besides; what sends nothing
    is left out.
    """
    world.ledger.reset()
    return [difference(before, after) for before, after in pairwise(train(world, spec).sent_until)]


def difference(before: dict[str, Any], after: dict[str, Any]) -> Volume:
    found: Volume = {}
    for axis, operations in after.items():
        for name, entry in operations.items():
            first = before.get(axis, {}).get(name, {"inside": 0, "between": 0})
            sent = Sent(entry["inside"] - first["inside"], entry["between"] - first["between"])
            if sent != Sent():
                found.setdefault(axis, {})[name] = sent
    return found


# On 4 ranks: 4 data ranks at stage 2; 2 beside 2 stages, at ZeRO 3 (interleaved) and 1; 2 beside 2
# tensor ranks with sequence parallelism, at ZeRO 2 with one copy on a node. At ZeRO 3: T5 on 2
# tensor ranks, and BERT in 2 stages.
TELLING = (9, 22, 51, 31, 38, 56)


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(number, marks=[] if number in TELLING else pytest.mark.slow)
        for number in range(60)
    ],
)
@pytest.mark.usual(4)
def test_every_byte(world: World, number: int) -> None:
    choice = random.Random(1000 * world.size + number)
    with laid_out(world, choice.choice([0, 1, 2, 3, 4])) as nodes:
        spec = any_job(choice, world.size)
        for sent in sent_in_steps(nodes, spec):
            assert sent == expected(spec, nodes), spec


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("batch", [2, 23])
@pytest.mark.few(3)
def test_data_parallel_alone(world: World, stage: int, shared: bool, batch: int) -> None:
    with laid_out(world, 2) as nodes:
        spec = job(batch, zero={"stage": stage, "node_shared": shared})
        for sent in sent_in_steps(nodes, spec):
            assert sent == expected(spec, nodes)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("recompute", ["none", "block"])
def test_a_pipeline_gathers_alike_in_its_middle(world: World, recompute: str) -> None:
    """Four micro-batches: in the middle the unit asked for last stays, if backward asks again."""
    zero = {"stage": 3, "node_shared": False}
    spec = job(16, zero=zero, memory={"recompute": recompute}, pipeline=2)
    for sent in sent_in_steps(world, spec):
        assert sent == expected(spec, world)


LAYOUTS: list[dict[str, Any]] = [{}, {"tensor": 2}, {"pipeline": 2}]


def divisions(ranks: int, everything: bool) -> list[dict[str, Any]]:
    """Return jobs whose data ranks are divided into shards and replicas."""
    found = []
    for parallel in LAYOUTS if ranks % 2 == 0 else LAYOUTS[:1]:
        data = ranks // (parallel.get("tensor", 1) * parallel.get("pipeline", 1))
        for shards in ("node", *(size for size in (1, 2) if data % size == 0)):
            found += [
                {"shard_ranks": shards, "stage": stage, "node_shared": shared, **parallel}
                for stage in range(4)
                for shared in (False, "auto")
            ]
    return found


@pytest.mark.cases(of=divisions)
@pytest.mark.few(3)
def test_shards_inside_replicas_between(world: World, case: dict[str, Any]) -> None:
    zero = {key: case[key] for key in ("shard_ranks", "stage", "node_shared")}
    parallel = {key: size for key, size in case.items() if key not in zero}
    with laid_out(world, 2) as nodes:
        spec = job(13, zero=zero, **parallel)
        for sent in sent_in_steps(nodes, spec):
            assert sent == expected(spec, nodes), spec


def exchanges(ranks: int, everything: bool) -> list[dict[str, Any]]:
    return [
        {"exchange": exchange, "stage": stage, **parallel}
        for parallel in (LAYOUTS if ranks % 2 == 0 else LAYOUTS[:1])
        for exchange in EXCHANGES
        for stage in range(4)
    ]


@pytest.mark.cases(of=exchanges)
@pytest.mark.few(4)
def test_replicas_that_exchange_in_other_forms(world: World, case: dict[str, Any]) -> None:
    """Each rank is a replica, or two of a node are one: averages are those of the last replicas."""
    parallel = {key: size for key, size in case.items() if key not in ("exchange", "stage")}
    data = world.size // (parallel.get("tensor", 1) * parallel.get("pipeline", 1))
    zero = {"stage": case["stage"], "shard_ranks": 2 if data == 4 else 1}
    with laid_out(world, 2) as nodes:
        spec = job(7, zero=zero, **parallel).model_copy(update=EXCHANGES[case["exchange"]])
        steps = sent_in_steps(nodes, spec)
        for sent in steps[:-1]:  # after the last one workers of local steps come together
            assert sent == expected(spec, nodes), spec


# of two workers the second alone has ranks on two nodes
PARTLY = {"shared": False, "per_node": 3, "precision": "bf16", "shards": 2}


def compressed_gathers(ranks: int, everything: bool) -> list[dict[str, Any]]:
    return [
        {"stage": stage, "shared": shared, "per_node": per_node, "precision": precision, **parallel}
        for parallel in (LAYOUTS if ranks % 4 == 0 else LAYOUTS[:1])
        for precision in ("bf16", "fp32")
        for per_node in (1, 2)
        for stage in range(4)
        for shared in (False, True)
    ] + [PARTLY | {"stage": stage} for stage in (1, 3) if ranks == 4]


@pytest.mark.cases(of=compressed_gathers)
@pytest.mark.few(3)
def test_weights_that_are_gathered_in_8_bits(world: World, case: dict[str, Any]) -> None:
    parallel = {axis: case[axis] for axis in ("tensor", "pipeline") if axis in case}
    zero = {"stage": case["stage"], "node_shared": case["shared"]}
    zero["shard_ranks"] = case.get("shards", "all")
    with laid_out(world, case["per_node"]) as nodes:
        spec = job(7, zero=zero, precision=case["precision"], **parallel)
        for each in (spec, spec.model_copy(update={"comm": Comm(compress="int8")})):
            found = sent_in_steps(nodes, each)
            assert found == [expected(each, nodes)] * len(found), each


@pytest.mark.ranks(2, 3, 4)
def test_8_bits_are_half_of_16(world: World) -> None:
    """And a scale for each block of 256; of stage 1, between nodes, weights of every unit once."""
    spec = job(7, zero={"stage": 1, "node_shared": False})
    with laid_out(world, 1) as nodes:
        plain, narrow = (
            sent_in_steps(nodes, each)[0]["data"]
            for each in (spec, spec.model_copy(update={"comm": Comm(compress="int8")}))
        )
    norm = 8 * (world.size - 1)
    ratio = (narrow["all_gather"].between - norm) / (plain["all_gather"].between - norm)
    assert plain["reduce_scatter"] == narrow["reduce_scatter"]
    assert 0.5 < ratio < 0.53


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("fragments", [1, 2])
def test_local_steps_exchange_once_in_a_while(world: World, fragments: int) -> None:
    """The bytes of a step are those of two, on average."""
    with laid_out(world, 1) as nodes:
        outer = Optimizer(outer=Outer(every=2, fragments=fragments))
        spec = job(7, zero={"shard_ranks": 1})
        longer = spec.train.model_copy(update={"steps": 4})  # the last also ends a round
        spec = spec.model_copy(update={"optimizer": outer, "train": longer})
        first, second, _ = sent_in_steps(nodes, spec)
        foreseen = expected(spec, nodes)["replica"]
        for name, each in foreseen.items():
            turns = [step.get("replica", {}).get(name, Sent()) for step in (first, second)]
            assert 2 * each.between <= sum(turn.between for turn in turns) <= 2 * each.between + 1
            assert all(turn.between for turn in turns) == (fragments == 2)


@pytest.mark.ranks(4)
def test_weights_are_gathered_inside_nodes(world: World) -> None:
    """At stage 3 only sums over replicas leave a node, and the norm."""
    with laid_out(world, 2) as nodes:
        spec = job(13, zero={"stage": 3, "shard_ranks": "node", "node_shared": False})
        for sent in sent_in_steps(nodes, spec):
            assert sent["shard"]["all_gather"].inside > 0
            assert all(operation.between == 0 for operation in sent["shard"].values())
            assert sent["data"] == {"all_gather": Sent(8, 16)}, "the norm"
            assert sent["replica"]["all_reduce"].between > 0


def counts(before: dict[str, Any], after: dict[str, Any], axis: str) -> dict[str, int]:
    """How many operations of a step send something, or would to others."""
    return {
        name: entry["count"] - before[axis][name]["count"] for name, entry in after[axis].items()
    }


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_tensor_parallelism_moves_four_sums_a_block_and_micro_batch(
    world: World, sequence_parallel: bool
) -> None:
    """All-reduces of the stream; or as many reduce-scatters and all-gathers, and an all-gather
    more for each of a block's column-parallel layers.
    """
    spec = job(5, tensor=world.size, sequence_parallel=sequence_parallel)
    world.ledger.reset()
    _, before, after = train(world, spec).sent_until
    micro_batches, blocks, ranks = 3, MODEL.layers, world.size
    found, sent = counts(before, after, "tensor"), difference(before, after)["tensor"]
    loss = 2 * (4 + 8) * 5 * MODEL.seq_len * (ranks - 1) // ranks
    sums = 4 * blocks + 2  # and of the embedding in forward, of the head's input in backward
    if not sequence_parallel:
        assert found == {"all_reduce": micro_batches * (sums + 2), "all_gather": 1}
        assert sent["all_reduce"].inside == 2 * sums * 5 * STREAM * (ranks - 1) // ranks + loss
        return
    norms = 2 * blocks + 1
    padded = 5 * -(-MODEL.seq_len // ranks) * ranks * MODEL.hidden * 2 * (ranks - 1) // ranks
    assert found["reduce_scatter"] == micro_batches * sums
    assert sent["reduce_scatter"].inside == sums * padded
    assert found["all_gather"] == micro_batches * (sums + norms) + 1, (
        "a column-parallel layer follows each norm"
    )
    assert sent["all_gather"].inside == (sums + norms) * padded + 8 * (ranks - 1)
    assert found["all_reduce"] == micro_batches * (norms + 2)


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize(("schedule", "chunks"), [("gpipe", 1), ("1f1b", 1), ("interleaved", 2)])
def test_a_pipeline_moves_the_activations_at_the_boundaries(
    world: World, schedule: str, chunks: int
) -> None:
    """There, and their gradients back, of every sequence once."""
    spec = job(7, pipeline=world.size, schedule=schedule, chunks=chunks, tied=False)
    world.ledger.reset()
    _, before, after = train(world, spec).sent_until
    inner = 2 * chunks  # each part has a boundary on either side, but for the model's ends
    boundaries = inner - (world.rank == 0) - (world.rank == world.size - 1)
    assert difference(before, after)["pipeline"]["send"] == Sent(boundaries * 7 * STREAM, 0)
    assert counts(before, after, "pipeline") == {
        "send": boundaries * 4,
        "receive": boundaries * 4,
        "all_gather": 1,
    }


@pytest.mark.ranks(8)
@pytest.mark.parametrize(
    "parallel",
    [{"tensor": 4}, {"tensor": 2, "pipeline": 2}, {"tensor": 4, "pipeline": 2}, {"tensor": 2}],
    ids=str,
)
@pytest.mark.parametrize("stage", range(4))
def test_two_nodes_of_four_keep_tensor_traffic_inside(
    world: World, stage: int, parallel: dict[str, int]
) -> None:
    """By the order that hpczero chooses itself, where more activations than parameters are sent."""
    with laid_out(world, 4) as nodes:
        spec = job(28, 7, zero={"stage": stage}, **parallel)
        for sent in sent_in_steps(nodes, spec):
            assert sent == expected(spec, nodes)
            assert all(
                operation.between == 0 < operation.inside for operation in sent["tensor"].values()
            )
            assert any(operation.between for axis in sent for operation in sent[axis].values()), (
                "some other axis crosses"
            )
