"""The course of a pipeline for any durations, quickly (pure).

`parallel.pipeline.simulate` says when each action of a schedule runs. Here the order in which
actions can be looked at is kept for each schedule, so that new durations take one pass over a list.
A schedule repeats itself in its middle, after as many micro-batches as there are stages: long ones
are carried on from a few.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from hpczero.parallel.pipeline.schedule import PartResult, gives, needs, schedule

_EXACT = 6000  # actions that are all looked at
_PERIODS = 10  # of micro-batches, where there are more: a slow stage shows late

_Row = tuple[int, int, bool, int, int]


@dataclass(frozen=True)
class Durations:
    """Seconds by part: of forward and backward, and of messages from one part to the next."""

    forward: Sequence[float]
    backward: Sequence[float]
    transfers: Sequence[float]


@dataclass(frozen=True)
class Course:
    """When each stage begins its first action, and when it ends its last one."""

    begins: Sequence[float]
    ends: Sequence[float]


def course_of(
    kind: str, stages: int, chunks: int, micro_batches: int, durations: Durations
) -> Course:
    if stages == 1:
        each = sum(durations.forward) + sum(durations.backward)
        return Course([0.0], [each * micro_batches])
    few = micro_batches
    if 2 * stages * chunks * micro_batches > _EXACT and micro_batches > _PERIODS * stages:
        few = (_PERIODS - 1) * stages + micro_batches % stages
    course = _run(_rows(kind, stages, chunks, few), stages, durations)
    if few == micro_batches:
        return course
    before = _run(_rows(kind, stages, chunks, few - stages), stages, durations)
    periods = (micro_batches - few) / stages
    ends = [
        late + periods * (late - early)
        for late, early in zip(course.ends, before.ends, strict=True)
    ]
    return replace(course, ends=ends)


@lru_cache(maxsize=64)
def _rows(kind: str, stages: int, chunks: int, micro_batches: int) -> list[_Row]:
    """Return the actions, each after all that it waits for.

    A row has its stage and part, True for a forward, the number of the row whose result it takes
    and that of the transfer between them (-1: none).
    """
    plan = schedule(kind, stages, chunks, micro_batches)
    made: dict[PartResult, int] = {}
    waiting: dict[PartResult, int] = {}  # result -> the stage that waits for it
    ready = list(range(stages))
    ahead = [0] * stages  # the next action of each stage
    rows: list[_Row] = []
    while ready:
        stage = ready.pop()
        for action in plan[stage][ahead[stage] :]:
            part = action.chunk * stages + stage
            needed = needs(action, stage, stages, chunks)
            source = link = -1
            if needed is not None:
                if needed not in made:
                    waiting[needed] = stage
                    break
                source, link = made[needed], min(part, needed.part)
            given = gives(action, stage, stages, chunks)
            if given is not None:
                made[given] = len(rows)
                if given in waiting:
                    ready.append(waiting.pop(given))
            rows.append((stage, part, action.kind == "forward", source, link))
            ahead[stage] += 1
    return rows


def _run(rows: Sequence[_Row], stages: int, durations: Durations) -> Course:
    forward, backward, transfers = durations.forward, durations.backward, durations.transfers
    clock = [0.0] * stages
    begins: dict[int, float] = {}
    done = [0.0] * len(rows)
    for number, (stage, part, is_forward, source, link) in enumerate(rows):
        begin = clock[stage]
        if source >= 0:
            begin = max(begin, done[source] + transfers[link])
        begins.setdefault(stage, begin)
        clock[stage] = done[number] = begin + (forward[part] if is_forward else backward[part])
    return Course([begins[stage] for stage in range(stages)], clock)
