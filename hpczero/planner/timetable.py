"""The course of a pipeline for any durations, quickly (pure).

`parallel.pipeline.simulate` says when each action of a schedule runs. Here the order in which
actions can be looked at is kept for each schedule, so that new durations take one pass over a list.
A schedule repeats itself in its middle, after as many micro-batches as there are stages: long ones
are carried on from a few.

`shortest_course` has closed forms, the longest of some chains of actions that wait for each other:
no course is shorter, and few are longer to speak of.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from hpczero.parallel.pipeline.schedule import PartResult, gives, needs, schedule

_EXACT = 6000  # actions that are all looked at
_PERIODS = 4  # of micro-batches, where there are more

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


@lru_cache(maxsize=512)
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


# ------------------------------------------------------------------------------------ closed forms


def shortest_course(
    kind: str, stages: int, chunks: int, micro_batches: int, durations: Durations
) -> Course:
    """Return a course that ends no later than the real one, on any stage.

    Work reaches a stage through the stages before it, and leaves through them.
    """
    if stages == 1:
        return course_of(kind, stages, chunks, micro_batches, durations)
    forward, backward = (
        np.array(seconds).reshape(chunks, stages)
        for seconds in (durations.forward, durations.backward)
    )
    transfers = np.array([*durations.transfers, 0.0]).reshape(chunks, stages)
    if kind == "gpipe":
        busy = _all_forwards_first(forward[0], backward[0], transfers[0], micro_batches)
    elif chunks == 1:
        busy = _in_turn(forward[0] + backward[0], transfers[0], micro_batches)
    else:
        busy = _by_chunks(forward, backward, transfers, micro_batches)
    enter, leave = (_before(seconds[0] + transfers[0]) for seconds in (forward, backward))
    # the work of a stage leaves through those before it, so none of them ends earlier
    ends = np.maximum.accumulate((enter + busy + leave)[::-1])[::-1] - leave
    return Course(enter.tolist(), ends.tolist())


_Seconds = NDArray[np.float64]


def _before(seconds: _Seconds) -> _Seconds:
    """Return the sums of the stages before each one."""
    return np.concatenate([[0.0], np.cumsum(seconds[:-1])])


def _all_forwards_first(
    forward: _Seconds, backward: _Seconds, transfers: _Seconds, count: int
) -> _Seconds:
    """Return the seconds from a stage's first action to its last one: the slowest holds up all."""
    enter, leave = _before(forward + transfers), _before(backward + transfers)
    onward = enter[-1] - enter + forward[-1] - forward
    turn = float(np.max(enter + count * forward + onward))
    behind = leave[-1] - leave + backward[-1] - backward
    return turn - enter + behind + count * backward


def _in_turn(both: _Seconds, transfers: _Seconds, count: int) -> _Seconds:
    """Return the seconds of forwards and backwards in turn, those of each stage.

    A micro-batch that goes on from stage a to e and comes back waits for messages on its way; e - a
    + 1 micro-batches are on it together. So many rounds of it, and the stage's own work on the
    rest, are a chain.
    """
    stages = len(both)
    first, last = np.arange(stages)[:, None], np.arange(stages)[None, :]
    together = np.maximum(last - first + 1, 1)
    rounds = (count - 1) // together
    reached = np.cumsum(both)
    messages = 2 * _before(transfers)
    round_trip = (reached + messages)[None, :] - (reached - both + messages)[:, None]
    chains = rounds * round_trip + (count - rounds * together) * both[None, :]
    return np.where(last >= first, chains, 0.0).max(axis=0)


def _by_chunks(forward: _Seconds, backward: _Seconds, transfers: _Seconds, count: int) -> _Seconds:
    """Return the seconds of a stage's work on all chunks, and of its waits at both ends.

    There a group of micro-batches may be back for the next chunk only after the stage has done all
    of it.
    """
    stages = forward.shape[1]
    busy = count * (forward + backward).sum(axis=0)
    first_group, last_group = min(count, stages), (count - 1) % stages + 1
    there, back = forward + transfers, backward + transfers
    for chunk in range(len(forward) - 1):
        here, after = there[chunk], there[chunk + 1]
        around = here.sum() - _before(here) + _before(after)
        busy += np.maximum(0.0, around - first_group * forward[chunk])
        here, after = back[chunk], back[chunk + 1]
        around = _before(after) + backward[chunk + 1] - backward[chunk] + here.sum() - _before(here)
        busy += np.maximum(0.0, around - last_group * backward[chunk + 1])
    return busy
