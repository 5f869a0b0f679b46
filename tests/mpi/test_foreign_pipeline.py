"""Modules that hpczero has not written, cut into stages by what they offer: the same numbers as on one rank."""

from itertools import product
from typing import Any

import pytest
import torch

from hpczero.comm.world import World
from hpczero.spec.schema import Data, Model, Optimizer, Parallel, Spec, Train, Zero
from tests.mpi.test_data_parallel import assert_same
from tests.mpi.training import Record, train

pytestmark = pytest.mark.mpi

WAYS = list(product((0, 1, 2, 3), (False, True)))  # stage, node-shared


def spec_of(family: str, stage: int = 0, shared: bool = False, steps: int = 4, precision: str = "fp32", **parallel: Any) -> Spec:
    """Nothing divides: 5 samples in micro-batches of 2, of 9 tokens."""
    return Spec(
        model=Model(family=f"tests.mpi.models:{family}", hidden=12, seq_len=9, vocab=31),
        data=Data(source="synthetic"),
        train=Train(global_batch=5, micro_batch=2, precision=precision, steps=steps, eval_batches=1, grad_clip=0.5),
        optimizer=Optimizer(lr=1e-2, eps=1e-6),
        zero=Zero(stage=stage, node_shared=shared),
        parallel=Parallel(**parallel),
    )


def serial(world: World, family: str, steps: int = 4) -> Record:
    alone = world.part([world.rank])
    record = train(alone, spec_of(family, steps=steps))
    alone.close()
    return record


@pytest.mark.parametrize("family", ["Layered", "layered_on_meta"])
@pytest.mark.parametrize(("schedule", "chunks"), [("gpipe", 1), ("1f1b", 1), ("interleaved", 2)])
def test_stages_equal_the_serial_run(world: World, family: str, schedule: str, chunks: int) -> None:
    expected = serial(world, family, steps=20 if world.size == 2 else 4)
    for stages in [size for size in range(2, world.size + 1) if world.size % size == 0 and size * chunks <= 6]:
        for stage, shared in WAYS:
            spec = spec_of(family, stage, shared, len(expected.losses), pipeline=stages, schedule=schedule, chunks=chunks)
            assert_same(expected, train(world, spec))
