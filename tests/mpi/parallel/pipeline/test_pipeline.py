"""The pipeline's executor against one process that runs all layers: the losses, every gradient,
the messages and the memory, for every schedule.
"""

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn

from hpczero.comm.world import World
from hpczero.errors import HpczeroError
from hpczero.model.batch import MicroBatch
from hpczero.parallel.pipeline.executor import Buffers, Pipeline
from hpczero.parallel.pipeline.partition import layers_of, parts
from hpczero.parallel.pipeline.schedule import schedule
from hpczero.parallel.pipeline.simulate import simulate
from tests.support.pipeline_stages import (
    BATCHES,
    HIDDEN,
    LARGE,
    SEQ,
    Deaf,
    Scale,
    Stage,
    Sum,
    Transposed,
    View,
    cut_batches,
    model,
    serial,
)

pytestmark = [pytest.mark.mpi, pytest.mark.many_ranks]

SCHEDULES = [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 3)]
schedules = pytest.mark.parametrize(("kind", "chunks"), SCHEDULES, ids=lambda value: str(value))
batches_of_all_kinds = pytest.mark.parametrize("batches", list(BATCHES))


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill a buffer with NaN when it is given back."""

    def give_back(self: Buffers, buffer: Tensor) -> None:
        buffer.fill_(float("nan"))
        self._free.append(buffer)

    monkeypatch.setattr(Buffers, "give_back", give_back)


def shape_of(batch: MicroBatch) -> tuple[int, ...]:
    return (*batch.tokens.shape, HIDDEN)


def set_up(
    world: World, layers: list[nn.Module], kind: str, chunks: int
) -> tuple[Pipeline, Stage, list[int]]:
    """The pipeline over all ranks, this rank's part of the model, and the numbers of its layers."""
    group = world.group("pipeline", range(world.size))
    own = layers_of(parts([1] * len(layers), group.size, chunks), group.size, group.rank)
    pipeline = Pipeline(group, kind, chunks, shape_of, torch.float32)
    numbers = [layer for part in own for layer in part]
    delay = (group.rank * 7 % 3) / 1000  # no stage is as fast as the others
    return (
        pipeline,
        Stage([[layers[layer] for layer in part] for part in own], delay, pipeline.poll),
        numbers,
    )


def assert_close(found: Sequence[Tensor | None], expected: Sequence[Tensor | None]) -> None:
    assert len(found) == len(expected)
    for mine, theirs in zip(found, expected, strict=True):
        none = torch.zeros(1)  # a parameter that nothing depends on
        mine, theirs = none if mine is None else mine, none if theirs is None else theirs
        assert torch.linalg.vector_norm(mine - theirs) <= 1e-6 * torch.linalg.vector_norm(theirs)


def gradients_of(
    layers: list[nn.Module], numbers: list[int], gradients: list[Tensor | None]
) -> list[Tensor | None]:
    counts = [len(list(layer.parameters())) for layer in layers]
    starts = [sum(counts[:number]) for number in range(len(counts))]
    return [
        gradient
        for number in numbers
        for gradient in gradients[starts[number] : starts[number] + counts[number]]
    ]


def enough_layers(world: World, chunks: int) -> int:
    """7 layers, which 2, 3 and 4 stages do not divide, or one more than there are parts."""
    return max(7, world.size * chunks + 1)


@schedules
@batches_of_all_kinds
def test_losses_and_gradients_are_the_serial_ones(
    world: World, kind: str, chunks: int, batches: str
) -> None:
    layers, micro_batches = model(enough_layers(world, chunks)), cut_batches(batches)
    losses, gradients = serial(layers, micro_batches)
    pipeline, stage, numbers = set_up(world, layers, kind, chunks)
    found = pipeline.train(stage, micro_batches)
    is_last = world.rank == world.size - 1
    assert_close(found, losses if is_last else [])
    assert_close(stage.gradients(), gradients_of(layers, numbers, gradients))
    for chunk in range(chunks):
        assert [last for own, last in stage.lasts if own == chunk] == [False] * (
            len(micro_batches) - 1
        ) + [True]


@schedules
def test_steps_and_evaluations_in_turn_use_the_same_few_buffers(
    world: World, kind: str, chunks: int
) -> None:
    layers = model(enough_layers(world, chunks))
    pipeline, stage, numbers = set_up(world, layers, kind, chunks)
    made = []
    for batches in ("many", "uneven", "many", "all different", "many", "one"):
        micro_batches = cut_batches(batches)
        losses, gradients = serial(layers, micro_batches)
        before = len(stage.lasts)
        assert_close(
            pipeline.evaluate(stage, micro_batches), losses if world.rank == world.size - 1 else []
        )
        assert len(stage.lasts) == before
        assert not stage.alive
        assert_close(
            pipeline.train(stage, micro_batches), losses if world.rank == world.size - 1 else []
        )
        assert_close(stage.gradients(), gradients_of(layers, numbers, gradients))
        assert not stage.alive
        for number in numbers:
            layers[number].zero_grad()
        made.append(pipeline.buffers.made)
    peak = simulate(schedule(kind, world.size, chunks, 7), chunks, 7).peak_live[world.rank]
    assert made[0] == made[1] == made[2]
    assert made[4] == made[5] == made[2]  # larger ones, as "all different" needed them, and as many
    assert max(made) <= peak + 3


@schedules
def test_no_more_activations_live_than_the_simulator_says(
    world: World, kind: str, chunks: int
) -> None:
    micro_batches = cut_batches("many")
    pipeline, stage, _ = set_up(world, model(enough_layers(world, chunks)), kind, chunks)
    pipeline.train(stage, micro_batches)
    found = simulate(
        schedule(kind, world.size, chunks, len(micro_batches)), chunks, len(micro_batches)
    )
    assert stage.most_alive == found.peak_live[world.rank]
    assert not stage.alive


@schedules
def test_exactly_the_activations_at_the_boundaries_are_sent(
    world: World, kind: str, chunks: int
) -> None:
    micro_batches = cut_batches("uneven")
    pipeline, stage, _ = set_up(world, model(enough_layers(world, chunks)), kind, chunks)
    entry = world.ledger.entry("pipeline", "send")
    last_part = world.size * chunks - 1
    own_parts = range(world.rank, last_part + 1, world.size)
    forwards = sum(part < last_part for part in own_parts) * (world.size > 1)
    backwards = sum(part > 0 for part in own_parts) * (world.size > 1)
    activations = 5 * SEQ * HIDDEN * 4
    for work, messages in ((pipeline.train, forwards + backwards), (pipeline.evaluate, forwards)):
        world.ledger.reset()
        work(stage, micro_batches)
        assert (entry.bytes, entry.count) == (messages * activations, messages * len(micro_batches))


@pytest.mark.parametrize(("kind", "chunks"), [("1f1b", 1), ("interleaved", 2)])
@pytest.mark.parametrize(
    "inner", [View, Transposed, lambda: Deaf(HIDDEN)], ids=["view", "transposed", "deaf"]
)
def test_odd_layers(world: World, kind: str, chunks: int, inner: Callable[[], nn.Module]) -> None:
    """All inner layers are odd: their outputs and gradients are views of the buffers, not
    contiguous, or missing.
    """
    count = world.size * chunks
    layers = model(max(count, 2), inner=[inner] * max(count - 2, 0))
    micro_batches = cut_batches("uneven")
    losses, gradients = serial(layers, micro_batches)
    pipeline, stage, numbers = set_up(world, layers, kind, chunks)
    last = world.rank == world.size - 1
    assert_close(pipeline.evaluate(stage, micro_batches), losses if last else [])
    assert_close(pipeline.train(stage, micro_batches), losses if last else [])
    assert_close(stage.gradients(), gradients_of(layers, numbers, gradients))


@schedules
@pytest.mark.parametrize("inner", [Scale, View])
def test_large_messages_cross(
    world: World, kind: str, chunks: int, inner: Callable[[], nn.Module]
) -> None:
    """Activations of 1.3 MB: every MPI library waits for the receiver before it takes them. Those
    of View are still in flight when the buffer of its own input is used again.
    """
    layers = [Scale(), *(inner() for _ in range(world.size * chunks - 1)), Sum()]
    micro_batches = cut_batches("many")
    losses, gradients = serial(layers, micro_batches)
    pipeline, stage, numbers = set_up(world, layers, kind, chunks)
    pipeline.shape_of = lambda batch: (*batch.tokens.shape, LARGE)
    assert_close(
        pipeline.train(stage, micro_batches), losses if world.rank == world.size - 1 else []
    )
    assert_close(stage.gradients(), gradients_of(layers, numbers, gradients))
    assert_close(
        pipeline.evaluate(stage, micro_batches), losses if world.rank == world.size - 1 else []
    )


def test_an_output_that_the_next_part_does_not_expect_is_an_error(whole: World) -> None:
    alone = whole.part([whole.rank])
    try:
        pipeline, stage, _ = set_up(alone, model(4), "interleaved", 2)
        pipeline.shape_of = lambda batch: (*batch.tokens.shape, HIDDEN + 1)
        refusal = (
            r"part 0 of the pipeline gives torch.float32 \[2, 5, 12\].*"
            r"expects torch.float32 \[2, 5, 13\]"
        )
        with pytest.raises(HpczeroError, match=refusal):
            pipeline.train(stage, cut_batches("one"))
        pipeline.shape_of, pipeline.dtype = shape_of, torch.bfloat16
        with pytest.raises(HpczeroError, match=r"gives torch.float32 .* expects torch.bfloat16"):
            pipeline.evaluate(stage, cut_batches("one"))
    finally:
        alone.close()
