"""What a stage of the pipeline keeps at the same time, by its very schedule (pure).

Once it is under way, a schedule repeats itself after as many micro-batches as there are stages, so only the first ones are looked at. One that keeps
all micro-batches keeps as much more for every further one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from hpczero.parallel.messages import AHEAD, most_arrived, steps
from hpczero.parallel.pipeline.schedule import Action, Schedule, forward_only, schedule
from hpczero.spec.schema import Parallel


@dataclass(frozen=True)
class Moments:
    """Bytes of a micro-batch in one part of the model: what its forward leaves for backward, and the most there is of it in forward, in backward."""

    kept: float
    forward: float
    backward: float


def looked_at(parallel: Parallel, micro_batches: int) -> int:
    period = parallel.pipeline
    return min(micro_batches, 3 * period + micro_batches % period)


def actions(parallel: Parallel, chunks: int, stage: int, micro_batches: int) -> Sequence[Action]:
    """On one rank a micro-batch comes after the other, whatever the schedule is."""
    return _schedule("1f1b" if parallel.pipeline == 1 else parallel.schedule, parallel.pipeline, chunks, micro_batches)[stage]


def peak(parallel: Parallel, parts: Sequence[Moments], stage: int, micro_batches: int) -> float:
    """Bytes at the widest moment of a step; `parts` are those of the stage's chunks."""
    few = looked_at(parallel, micro_batches)
    now = most = 0.0
    for action in actions(parallel, len(parts), stage, few):
        part = parts[action.chunk]
        if action.kind == "forward":
            most = max(most, now + part.forward)
            now += part.kept
        else:
            now -= part.kept
            most = max(most, now + part.backward)
    return most + (micro_batches - few) * parts[0].kept * _keeps_all(parallel)


def arrived(parallel: Parallel, stage: int, micro_batches: int, evaluates: bool) -> int:
    """Messages that are on their way to the stage, or have arrived and are in use, at the same time."""
    if parallel.pipeline == 1:
        return 0
    few = looked_at(parallel, micro_batches)
    trained = _schedule(parallel.schedule, parallel.pipeline, parallel.chunks, few)
    schedules = [trained, forward_only(trained)] if evaluates else [trained]
    most = max(most_arrived(steps(every, parallel.chunks, stage, AHEAD)) for every in schedules)
    return most + (micro_batches - few) * (_keeps_all(parallel) and stage > 0)


def _keeps_all(parallel: Parallel) -> bool:
    return parallel.schedule == "gpipe" and parallel.pipeline > 1


@lru_cache(maxsize=4)
def _schedule(kind: str, stages: int, chunks: int, micro_batches: int) -> Schedule:
    return schedule(kind, stages, chunks, micro_batches) if micro_batches else [()] * stages
