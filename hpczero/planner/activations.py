"""Estimates of activation memory, from the pipeline's schedule.

Activations are the tensors that PyTorch's operations keep for backward in the models of
`hpczero.model`. The temporary tensors of each moment that may be the widest count too, with
gradients on their way into the engine. Measured peaks of GPTs were 0.85 to 1.2 times this estimate,
with an allocator that returns freed memory. It leaves out what malloc keeps (up to 0.1 GB on small
models) and the buffers for messages from other stages, which `arrived` counts.

All functions are pure. A schedule repeats itself, in its middle, after as many micro-batches as
there are stages, so only the first few are simulated. One that keeps all micro-batches (GPipe)
keeps proportionally more for every further one. The widest moments of a schedule are counted once,
in micro-batches, for whatever size these have.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from operator import mul
from typing import NamedTuple

from hpczero.model.families import family, layers
from hpczero.model.shapes import ChunkLayout, Layer, Moments, Peak
from hpczero.parallel.activations.choice import STAY, loss_rows, partitions, recomputed
from hpczero.parallel.pipeline.partition import Chunks, layers_that_run
from hpczero.parallel.pipeline.schedule import (
    RECEIVED_AHEAD,
    Action,
    Schedule,
    forward_only,
    most_arrived,
    schedule,
    schedule_of_stage,
    scheduled_actions,
)
from hpczero.spec.schema import Memory, Parallel, Spec


def element_bytes(spec: Spec) -> int:
    """Return the bytes of a number in the model's precision."""
    return 4 if spec.train.precision == "fp32" else 2


def simulated_micro_batches(parallel: Parallel, micro_batches: int) -> int:
    """Return how many micro-batches to simulate."""
    period = parallel.pipeline
    return min(micro_batches, 3 * period + micro_batches % period)


def actions(parallel: Parallel, chunks: int, stage: int, micro_batches: int) -> Sequence[Action]:
    """Return the stage's schedule; without a pipeline micro-batches run one after the other."""
    kind = "1f1b" if parallel.pipeline == 1 else parallel.schedule
    return _schedule(kind, parallel.pipeline, chunks, micro_batches)[stage]


class _Moment(NamedTuple):
    """An action of a stage, and the micro-batches that each of its chunks keeps beside it."""

    kind: str
    chunk: int
    kept: tuple[int, ...]


def peak(parallel: Parallel, chunks: Sequence[Moments], stage: int, micro_batches: int) -> Peak:
    """Return the bytes at the widest moment of a step, from those of the stage's chunks."""
    if not micro_batches:
        return Peak()
    few = _until_full(parallel, micro_batches)
    sizes = [chunk.kept for chunk in chunks]
    most = Peak()
    for kind, number, kept in _widest(*_layout(parallel, len(chunks)), few, stage):
        action = chunks[number].forward if kind == "forward" else chunks[number].backward
        beside = sum(map(mul, kept, sizes))
        if (action.widest + beside, action.kept + beside) > (most.widest, most.kept):
            most = action.beside(beside)
    return most.beside((micro_batches - few) * chunks[0].kept * _keeps_all(parallel))


def arrived(parallel: Parallel, stage: int, micro_batches: int, evaluates: bool) -> int:
    """Return the most messages to the stage, on their way or in use, at the same time."""
    if parallel.pipeline == 1:
        return 0
    few = _until_full(parallel, micro_batches)
    most = _arrived(*_layout(parallel, parallel.chunks), few, stage, evaluates)
    return most + (micro_batches - few) * (_keeps_all(parallel) and stage > 0)


def _until_full(parallel: Parallel, micro_batches: int) -> int:
    """Return how many micro-batches fill the pipeline as much as all of them."""
    return min(micro_batches, 2 * parallel.pipeline)


def _layout(parallel: Parallel, chunks: int) -> tuple[str, int, int]:
    kind = "1f1b" if parallel.pipeline == 1 else parallel.schedule
    return kind, parallel.pipeline, chunks


@lru_cache(maxsize=1 << 16)
def _widest(
    kind: str, stages: int, chunks: int, micro_batches: int, stage: int
) -> tuple[_Moment, ...]:
    """Return the moments beside which no other keeps as much or more of every chunk."""
    kept = [0] * chunks
    of_actions: dict[tuple[str, int], set[tuple[int, ...]]] = {}
    for action in schedule_of_stage(kind, stages, chunks, micro_batches, stage):
        forward = action.kind == "forward"
        kept[action.chunk] -= not forward
        of_actions.setdefault((action.kind, action.chunk), set()).add(tuple(kept))
        kept[action.chunk] += forward
    return tuple(
        _Moment(*action, most) for action, counts in of_actions.items() for most in _largest(counts)
    )


def _largest(counts: Iterable[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Return those that no other one equals or exceeds in every place."""
    largest: list[tuple[int, ...]] = []
    for count in sorted(counts, key=sum, reverse=True):
        if not any(all(map(int.__ge__, other, count)) for other in largest):
            largest.append(count)
    return largest


@lru_cache(maxsize=1 << 16)
def _arrived(
    kind: str, stages: int, chunks: int, micro_batches: int, stage: int, evaluates: bool
) -> int:
    """Return the messages of a pipeline that these micro-batches fill, if that is possible.

    With one chunk, or two micro-batches a stage, they follow from those that are in flight.
    """
    last = stage == stages - 1
    ahead = RECEIVED_AHEAD + 1
    if chunks == 1 and stage > 0 and not last:
        most = micro_batches if kind == "gpipe" else min(stages - stage, micro_batches)
        return min(2 * micro_batches, most + ahead)
    if chunks == 1 and last:
        most = micro_batches if kind == "gpipe" else ahead if evaluates else 2
        return min(micro_batches, most)
    if chunks == 1:
        return min(micro_batches, 2 if kind == "1f1b" and stages == 2 else ahead)
    if micro_batches >= 2 * stages:
        own = 2 * stages - 1 if stage == 0 else 0  # inputs of the model, which nobody sends
        return 2 * (stages - stage - 1) + (chunks - 1) * stages + 1 + ahead - own
    trained = _schedule(kind, stages, chunks, micro_batches)
    schedules = [trained, forward_only(trained)] if evaluates else [trained]
    return max(
        most_arrived(scheduled_actions(every, chunks, stage, RECEIVED_AHEAD)) for every in schedules
    )


def _keeps_all(parallel: Parallel) -> bool:
    return parallel.schedule == "gpipe" and parallel.pipeline > 1


@lru_cache(maxsize=4)
def _schedule(kind: str, stages: int, chunks: int, micro_batches: int) -> Schedule:
    return schedule(kind, stages, chunks, micro_batches) if micro_batches else [()] * stages


def activations(
    spec: Spec,
    samples: int,
    chunks: Chunks | None = None,
    stage: int = 0,
    micro_batches: int = 1,
    kernels: frozenset[str] = frozenset(),
    offloads: bool = False,
    count: "CountMoments | None" = None,
) -> Peak:
    """Return the bytes at the widest moment of a step with micro-batches of so many samples.

    `chunks` are the stage's; by default the whole model. `offloads`: what a device's blocks keep is
    on the host, but for a few of each chunk. `count` is `moments_of`, or a cache of it.
    """
    held = chunks or [layers(spec.model)]
    here = 0 if offloads else None
    count = count or moments_of
    moments = [count(spec, samples, chunk, kernels, here) for chunk in held]
    stay = 0.0
    if offloads:
        few = (count(spec, samples, chunk, kernels, STAY) for chunk in held)
        stay = sum(some.kept - none.kept for some, none in zip(few, moments, strict=True))
    return peak(spec.parallel, moments, stage, micro_batches).beside(stay)


def sent_to_host(
    spec: Spec,
    samples: int,
    chunks: Chunks,
    kernels: frozenset[str],
    count: "CountMoments | None" = None,
) -> list[Moments]:
    """Return the bytes of a micro-batch that each chunk's blocks keep on the host."""
    count = count or moments_of
    sizes = [
        count(spec, samples, chunk, kernels, None).kept
        - count(spec, samples, chunk, kernels, 0).kept
        for chunk in chunks
    ]
    return [Moments(size, Peak(size, size), Peak(size, size)) for size in sizes]


CountMoments = Callable[
    [Spec, int, Sequence[Layer], frozenset[str], int | None], Moments
]  # `moments_of`


def moments_of(
    spec: Spec,
    samples: int,
    chunk: Sequence[Layer],
    kernels: frozenset[str],
    blocks_here: int | None = None,
) -> Moments:
    """Return the bytes of a micro-batch of so many samples in one chunk of the model.

    `blocks_here`: the blocks that keep on the device what they keep, where others do on the host.
    """
    parallel = spec.parallel
    running = layers_that_run([chunk])
    tokens = samples * spec.seq_len
    part = ChunkLayout(
        Counter(layer.kind for layer in running),
        parallel.tensor,
        parallel.sequence_parallel and parallel.tensor > 1,
        parallel.pipeline > 1,
        kernels,
        Counter((layer.kind, recomputed(spec.memory, layer)) for layer in running),
        loss_rows(spec.memory, tokens),
        partitions(spec),
        blocks_here,
        samples * spec.model.target_count(spec.seq_len) if spec.model.masks else 0,
        family(spec.model).picked is not None,
        spec.seq_len,
    )
    return family(spec.model).activations(spec.model, tokens, element_bytes(spec), part)


def kinds_of(chunk: Sequence[Layer], memory: Memory) -> frozenset[tuple[tuple[str, str], int]]:
    """Return how many layers of each kind a chunk has, and what is computed again of them."""
    running = layers_that_run([chunk])
    return frozenset(Counter((one.kind, recomputed(memory, one)) for one in running).items())
