"""Every grid trains the same model to the same numbers, at every ZeRO stage (design 11)."""

from itertools import product
from typing import Any

import pytest

from hpczero.comm.world import World
from hpczero.spec.schema import Data, Model, Optimizer, Parallel, Spec, Train, Zero
from tests.mpi.test_data_parallel import assert_same
from tests.mpi.training import Record, train

pytestmark = pytest.mark.mpi


def spec_of(stage: int, shared: bool | str, precision: str = "fp32", steps: int = 4, **parallel: Any) -> Spec:
    """Nothing divides: 6 heads, vocabulary 257, batch 5, sequence 33."""
    return Spec(
        model=Model(layers=3, hidden=24, heads=6, seq_len=33, vocab=257, dropout=0.1),
        data=Data(source="synthetic"),
        train=Train(global_batch=5, micro_batch=2, precision=precision, steps=steps, eval_batches=1, grad_clip=0.5),
        optimizer=Optimizer(lr=1e-2, eps=1e-6),
        zero=Zero(stage=stage, node_shared=shared),
        parallel=Parallel(**parallel),
    )


def serial(world: World, precision: str = "fp32", steps: int = 4) -> Record:
    alone = world.part([world.rank])
    record = train(alone, spec_of(0, False, precision, steps))
    alone.close()
    return record


@pytest.mark.parametrize("sequence", [False, True])
def test_tensor_by_data_equals_the_serial_run(world: World, sequence: bool) -> None:
    expected = serial(world, steps=20 if world.size == 2 else 4)
    for tensor in [size for size in range(2, world.size + 1) if world.size % size == 0]:
        for stage, shared in product(range(4), (False, True)):
            spec = spec_of(stage, shared, steps=len(expected.losses), tensor=tensor, sequence_parallel=sequence)
            assert_same(expected, train(world, spec))


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved"])
def test_pipelines_equal_the_serial_run(world: World, schedule: str) -> None:
    """3 blocks, embedding and head: 5 layers, cut into 2 to 4 stages, or twice as many parts."""
    expected = serial(world)
    for stages in [size for size in range(2, world.size + 1) if world.size % size == 0]:
        chunks = 2 if schedule == "interleaved" and stages == 2 else 1
        if schedule == "interleaved" and chunks == 1:
            continue
        for stage, shared in product(range(4), (False, True)):
            assert_same(expected, train(world, spec_of(stage, shared, pipeline=stages, schedule=schedule, chunks=chunks)))


def test_overflow_skips_alike_on_all_tensor_ranks(world: World) -> None:
    if world.size < 2:
        return
    spec = spec_of(2, False, "fp16", steps=6, tensor=2 if world.size % 2 == 0 else world.size)
    spec = spec.model_copy(update={"train": spec.train.model_copy(update={"loss_scale": 2.0**40})})
    record = train(world, spec)
    skipped = [metrics.get("skipped", False) for metrics in record.metrics_seen]
    assert any(skipped)
    everyones = world.collect(skipped)
    assert everyones is None or all(of_rank == skipped for of_rank in everyones)


def test_no_tensor_traffic_leaves_a_node(world: World) -> None:
    if world.size != 4:
        return
    nodes = world.part(range(4), ranks_per_node=2)
    nodes.ledger.reset()
    train(nodes, spec_of(1, False, tensor=2, order="tensor,data,pipeline"))
    entries = nodes.ledger.as_dict()
    assert all(entry["between"] == 0 for entry in entries["tensor"].values())
    assert any(entry["between"] for entry in entries["data"].values())
    nodes.close()
