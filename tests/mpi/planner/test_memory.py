"""The memory predicted for a rank of any grid is what a real run allocates, and what its
tensors take at the widest moment of a step.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from hpczero.comm.grid import Grid
from hpczero.comm.trace import Trace
from hpczero.comm.world import World
from hpczero.data.samples import micro_batch_sizes
from hpczero.model import families
from hpczero.model.batch import MicroBatch
from hpczero.parallel.parallelize import assemble
from hpczero.parallel.step import StepRunner
from hpczero.planner.memory import need
from hpczero.planner.placement import placement
from hpczero.planner.volumes import resolved
from hpczero.spec.schema import Data, Model, Parallel, Spec, Train, Zero
from hpczero.train.batches import Batches
from tests.support.jobs import EXCHANGES, any_job, job, laid_out
from tests.support.training import LearnableSource

pytestmark = pytest.mark.mpi


class Job:
    """A spec's engine and its micro-batches, without the loop around them."""

    def __init__(self, spec: Spec, world: World) -> None:
        grid = Grid.build(resolved(spec, world.node_of_rank), world.node_of_rank)
        source = LearnableSource(spec)
        self.batches = Batches(spec, source, grid.coordinate(world.rank, "data"), grid.size("data"))
        self.largest = micro_batch_sizes(
            spec.train.global_batch, spec.train.micro_batch, grid.size("data")
        )[2]
        self.needed = need(spec, families.layers(spec.model), placement(spec, grid, world.rank))
        self.way: StepRunner = assemble(
            spec, world, grid, accumulates=len(self.batches.parts()) > 1
        )

    def step(self, number: int) -> list[MicroBatch]:
        micro_batches = self.batches.training(number)
        self.way.train(micro_batches, 100, Trace())
        self.way.engine.finish_step(0.0)
        return micro_batches


# On 4 ranks, 2 of them data ranks: beside 2 stages at ZeRO 2 (interleaved) and 3 (one copy on a
# node), beside 2 tensor ranks at ZeRO 0.
TELLING = (1, 11, 4)


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(number, marks=[] if number in TELLING else pytest.mark.slow)
        for number in range(12)
    ],
)
@pytest.mark.usual(4)
def test_what_is_predicted_is_allocated(world: World, number: int) -> None:
    """To the byte, padding included, and the buffers of activations and gradients from other
    stages.
    """
    choice = random.Random(100 * world.size + number)
    with laid_out(world, choice.choice([0, 1, 2, 3])) as nodes:
        spec = any_job(choice, world.size)
        held = Job(spec, nodes)
        samples = max(len(batch.samples) for batch in held.step(0) + held.step(1))
        allocated = held.way.memory()
        expected = held.needed.each | held.needed.together
        if "pipeline" in allocated:
            assert allocated.pop("pipeline") * held.largest == expected["pipeline"] * samples, (
                "a rank's buffers hold its own largest micro-batch"
            )
        if "activations" in allocated:  # inputs of blocks, cut over tensor ranks: a part of them
            cut = allocated.pop("activations")
            assert cut <= expected["activations"]
            of_ranks = nodes.everyone.stack(torch.tensor(cut))  # a stage may have no such block
            assert of_ranks.any().item() == (spec.memory.recompute == "block")
        assert allocated == {kind: expected[kind] for kind in allocated}
        held.way.engine.close()


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("stage", [0, 2])
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_what_replicas_keep_is_predicted(world: World, exchange: str, stage: int) -> None:
    """To the byte on the first one; the last ones may make averages of fewer elements."""
    with laid_out(world, 2) as nodes:
        zero = {"stage": stage, "shard_ranks": 2 if world.size == 4 else 1}
        held = Job(job(zero=zero).model_copy(update=EXCHANGES[exchange]), nodes)
        allocated = held.way.memory().get("exchange", 0)
        expected = held.needed.each.get("exchange", 0)
        replicas = held.way.engine.axis.replicas
        assert replicas
        assert allocated == expected if replicas.number == 0 else allocated <= expected
        assert (expected > 0) == (exchange != "compressed")
        held.way.engine.close()


WIDE = Model(layers=6, hidden=128, heads=8, vocab=4000, seq_len=64)
MODELS = {"wide": WIDE, "narrow": WIDE.model_copy(update={"vocab": 300})}
GRIDS: list[dict[str, Any]] = [
    {"pipeline": 2},
    {"pipeline": 2, "schedule": "gpipe"},
    {"pipeline": 2, "schedule": "interleaved", "chunks": 2},
    {"tensor": 2},
    {"tensor": 2, "sequence_parallel": True},
    {"tensor": 2, "pipeline": 2},
    {"tensor": 2, "pipeline": 2, "sequence_parallel": True, "schedule": "gpipe"},
    {"pipeline": 4},
    {"pipeline": 4, "schedule": "interleaved", "chunks": 2},
]


def grids_of(ranks: int, everything: bool) -> list[dict[str, Any]]:
    grids = [grid for grid in GRIDS if grid.get("tensor", 1) * grid.get("pipeline", 1) == ranks]
    return [{"model": model, "parallel": grid} for model in MODELS for grid in grids]


@pytest.mark.cases(of=grids_of)
@pytest.mark.few(2)
def test_activations_at_the_widest_moment(world: World, case: dict[str, Any]) -> None:
    train, parallel = (
        Train(global_batch=32, micro_batch=4, eval_batches=0),
        Parallel(**case["parallel"]),
    )
    held = Job(
        Spec(
            model=MODELS[case["model"]],
            data=Data(source="synthetic"),
            train=train,
            zero=Zero(stage=0),
            parallel=parallel,
        ),
        world,
    )
    held.step(0)
    micro_batches, peaks = held.batches.training(1), []
    # a neighbour that happens to be late leaves messages unsent for longer:
    # the least of three says what a stage needs
    for _ in range(3):
        with peak_of_allocations() as peak:
            held.way.train(micro_batches, 100, Trace())
        held.way.engine.finish_step(0.0)
        peaks += peak
    held.way.engine.close()
    widest = held.needed.each["activations"] + held.needed.each["workspace"]
    assert 0.85 < min(peaks) / widest < 1.1


@contextmanager
def peak_of_allocations() -> Iterator[list[int]]:
    """How many bytes of tensors there were at most, besides those that were there before: in the
    list at the end.
    """
    found: list[int] = []
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        yield found
    events = [
        event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"
    ]
    now = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    found.append(most)
