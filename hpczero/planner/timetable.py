"""The course of a pipeline for any durations, quickly (pure).

`parallel.pipeline.simulate` says when each action of a schedule runs. Here the order in which
actions can be looked at is kept for each schedule, so that new durations take one pass over a list.
A schedule repeats itself in its middle, after as many micro-batches as there are stages: long ones
are carried on from a few.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from hpczero.parallel.pipeline.schedule import PartResult, gives, needs, schedule
from hpczero.parallel.pipeline.simulate import simulate

_EXACT = 6000  # actions that are all looked at
_PERIODS = 4  # of micro-batches, where there are more

_Row = tuple[int, int, bool, int, int, int]


@dataclass(frozen=True)
class Durations:
    """Seconds by part: of forward and backward, and of messages from one part to the next."""

    forward: Sequence[float]
    backward: Sequence[float]
    transfers: Sequence[float]


def ends(
    kind: str, stages: int, chunks: int, micro_batches: int, durations: Durations
) -> tuple[list[float], list[float]]:
    """Return when each stage begins its first action, and when it ends its last one."""
    few = micro_batches
    if 2 * stages * chunks * micro_batches > _EXACT and micro_batches > _PERIODS * stages:
        few = (_PERIODS - 1) * stages + micro_batches % stages
    begin, end = _run(_rows(kind, stages, chunks, few), stages, durations)
    if few == micro_batches:
        return begin, end
    _, before = _run(_rows(kind, stages, chunks, few - stages), stages, durations)
    periods = (micro_batches - few) / stages
    return begin, [late + periods * (late - early) for late, early in zip(end, before, strict=True)]


@lru_cache(maxsize=512)
def _rows(kind: str, stages: int, chunks: int, micro_batches: int) -> list[_Row]:
    """Return the actions, each after all that it waits for.

    A row has stage, part, whether it is a forward, the number of the row whose result it takes (-1:
    none), the transfer that this result takes (-1: none).
    """
    plan = schedule(kind, stages, chunks, micro_batches)
    course = simulate(plan, chunks, micro_batches)
    # in the order of their ends with equal durations, none of them 0: no result comes too late
    actions = sorted(
        (interval.end, stage, number)
        for stage, intervals in enumerate(course.intervals)
        for number, interval in enumerate(intervals)
    )
    made: dict[PartResult, int] = {}
    rows = []
    for row, (_, stage, number) in enumerate(actions):
        action = plan[stage][number]
        part = action.chunk * stages + stage
        needed = needs(action, stage, stages, chunks)
        given = gives(action, stage, stages, chunks)
        source = -1 if needed is None else made[needed]
        link = -1 if needed is None or stages == 1 else min(part, needed.part)
        if given is not None:
            made[given] = row
        rows.append((stage, part, action.kind == "forward", source, link, row))
    return rows


def _run(
    rows: Sequence[_Row], stages: int, durations: Durations
) -> tuple[list[float], list[float]]:
    forward, backward, transfers = durations.forward, durations.backward, durations.transfers
    clock = [0.0] * stages
    begins: list[float | None] = [None] * stages
    done = [0.0] * len(rows)
    for stage, part, is_forward, source, link, number in rows:
        begin = clock[stage]
        if source >= 0:
            arrived = done[source] + (transfers[link] if link >= 0 else 0.0)
            begin = max(begin, arrived)
        if begins[stage] is None:
            begins[stage] = begin
        end = begin + (forward[part] if is_forward else backward[part])
        clock[stage] = done[number] = end
    return [begin or 0.0 for begin in begins], clock
