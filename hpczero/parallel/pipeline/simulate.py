"""Simulate a pipeline schedule (pure): check it, time it and count the activations it keeps.

Every stage carries out its actions in their order. An action begins when its stage is free and the
result that it needs has arrived from the neighbouring part; results travel while the stages go on.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from hpczero.errors import HpczeroError
from hpczero.parallel.pipeline.schedule import (
    ALL_RESULTS,
    RESULTS,
    Action,
    PartResult,
    Schedule,
    needs,
)

_SHOWN = 4  # mistakes written out


class InvalidSchedule(HpczeroError):
    """The schedule is incomplete, repeats an action, is in a wrong order, or never ends.

    `mistakes` are all of them, one line each.
    """

    def __init__(self, mistakes: Sequence[str]) -> None:
        self.mistakes = tuple(mistakes)
        more = f"; and {len(mistakes) - _SHOWN:,} more" if len(mistakes) > _SHOWN else ""
        super().__init__(f"invalid schedule: {'; '.join(mistakes[:_SHOWN])}{more}")


@dataclass(frozen=True)
class Times:
    """Durations: `actions` of each kind by part, 1 by default, and `transfers`, 0 by default.

    Transfer i is the one between part i and the next, in either direction.
    """

    actions: Mapping[str, Sequence[float]] = field(default_factory=dict)
    transfers: Sequence[float] = ()

    def of(self, kind: str, part: int) -> float:
        return self.actions[kind][part] if kind in self.actions else 1.0

    def transfer(self, part: int, other: int) -> float:
        return self.transfers[min(part, other)] if self.transfers else 0.0


@dataclass(frozen=True, slots=True)
class Interval:
    action: Action
    begin: float
    end: float


@dataclass(frozen=True)
class Simulation:
    """The intervals of each stage, and the most activations that it keeps at the same time.

    `peak_live` counts micro-batches, each once for every chunk.
    """

    intervals: tuple[tuple[Interval, ...], ...]
    peak_live: tuple[int, ...]

    @property
    def makespan(self) -> float:
        return max(intervals[-1].end for intervals in self.intervals)

    @property
    def idle(self) -> tuple[float, ...]:
        """The fraction of the time in which each stage does nothing."""
        return tuple(
            1 - sum(interval.end - interval.begin for interval in intervals) / self.makespan
            for intervals in self.intervals
        )


def simulate(
    actions: Schedule, chunks: int, micro_batches: int, times: Times | None = None
) -> Simulation:
    """Return the course of a schedule, or raise InvalidSchedule.

    A schedule without any backward is valid too: an evaluation.
    """
    made = {result for stage in actions for action in stage for result in RESULTS[action.kind]}
    results = ALL_RESULTS if made - {"output"} else ALL_RESULTS[:1]
    mistakes = [
        mistake
        for number, stage in enumerate(actions)
        for mistake in _mistakes(number, stage, chunks, micro_batches, results)
    ]
    if mistakes:
        raise InvalidSchedule(mistakes)
    intervals = _carry_out(actions, chunks, times or Times())
    return Simulation(intervals, tuple(_peak_live(stage, results[-1]) for stage in actions))


def _mistakes(
    stage: int, actions: Sequence[Action], chunks: int, micro_batches: int, results: Sequence[str]
) -> Iterator[str]:
    """Yield the mistakes: a chunk must make all results of every micro-batch once, in order."""
    made: dict[tuple[int, int], list[str]] = {
        (chunk, number): [] for chunk in range(chunks) for number in range(micro_batches)
    }
    for action in actions:
        if (action.chunk, action.micro_batch) not in made:
            limits = f"{chunks} chunks and {micro_batches} micro-batches"
            yield f"stage {stage}: {action}, but there are {limits}"
        else:
            made[action.chunk, action.micro_batch] += RESULTS[action.kind]
    for (chunk, number), names in made.items():
        if names != list(results):
            makes = ", ".join(names) or "nothing"
            expected = ", ".join(results)
            where = f"stage {stage}: micro-batch {number} in chunk {chunk}"
            yield f"{where} makes {makes} (it should be {expected})"


def _carry_out(actions: Schedule, chunks: int, times: Times) -> tuple[tuple[Interval, ...], ...]:
    """Return the intervals of each stage, or raise InvalidSchedule at a deadlock."""
    stages = len(actions)
    intervals: list[list[Interval]] = [[] for _ in actions]
    made: dict[PartResult, float] = {}
    waiting: dict[PartResult, int] = {}  # result -> the stage that waits for it
    ready = list(range(stages))
    while ready:
        stage = ready.pop()
        clock = intervals[stage][-1].end if intervals[stage] else 0.0
        for action in actions[stage][len(intervals[stage]) :]:
            part = action.chunk * stages + stage
            needed = needs(action, stage, stages, chunks)
            begin = clock
            if needed is not None:
                if needed not in made:
                    waiting[needed] = stage
                    break
                transfer = times.transfer(part, needed.part) if stages > 1 else 0.0
                begin = max(clock, made[needed] + transfer)
            clock = begin + times.of(action.kind, part)
            intervals[stage].append(Interval(action, begin, clock))
            for name in RESULTS[action.kind]:
                result = PartResult(name, part, action.micro_batch)
                made[result] = clock
                if result in waiting:
                    ready.append(waiting.pop(result))
    if waiting:
        raise InvalidSchedule(
            [
                _stuck(at, actions[at][len(intervals[at])], needed, stages)
                for needed, at in sorted(waiting.items())
            ]
        )
    return tuple(map(tuple, intervals))


def _stuck(stage: int, action: Action, needed: PartResult, stages: int) -> str:
    chunk, source = divmod(needed.part, stages)
    return (
        f"deadlock: stage {stage} stands at the {action}, waiting for the {needed.name} of "
        f"micro-batch {needed.micro_batch} from chunk {chunk} of stage {source}"
    )


def _peak_live(actions: Sequence[Action], last_result: str) -> int:
    """Return the most activations that live at the same time.

    They live from the output to the last result that is made from them; in an evaluation, during
    the action alone.
    """
    live = peak = 0
    for action in actions:
        live += "output" in RESULTS[action.kind]
        peak = max(peak, live)
        live -= last_result in RESULTS[action.kind]
    return peak
