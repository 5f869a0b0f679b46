"""Runs a pipeline schedule on paper (pure): is it valid, how much does it keep, how long does it take?

Every stage carries out its actions in their order. An action begins when its stage is free and what it needs has arrived from the neighbouring
part; results travel while the stages go on.
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
    """The schedule leaves something out, does something twice, in the wrong order, or never ends; `mistakes` says what."""

    def __init__(self, mistakes: Sequence[str]) -> None:
        self.mistakes = tuple(mistakes)
        more = f"; and {len(mistakes) - _SHOWN:,} more" if len(mistakes) > _SHOWN else ""
        super().__init__(f"invalid schedule: {'; '.join(mistakes[:_SHOWN])}{more}")


@dataclass(frozen=True)
class Times:
    """Of each kind of action, by part; of a transfer between part i and the next, in either direction. What is not given takes 1 and 0."""

    actions: Mapping[str, Sequence[float]] = field(default_factory=dict)
    transfers: Sequence[float] = ()

    def of(self, kind: str, part: int) -> float:
        return self.actions[kind][part] if kind in self.actions else 1.0

    def transfer(self, part: int, other: int) -> float:
        return self.transfers[min(part, other)] if self.transfers else 0.0


@dataclass(frozen=True, slots=True)
class Span:
    action: Action
    begin: float
    end: float


@dataclass(frozen=True)
class Simulation:
    """`spans`: when each stage does what. `peak_live`: on each stage, micro-batches times chunks whose activations are kept, at most."""

    spans: tuple[tuple[Span, ...], ...]
    peak_live: tuple[int, ...]

    @property
    def makespan(self) -> float:
        return max(spans[-1].end for spans in self.spans)

    @property
    def idle(self) -> tuple[float, ...]:
        """Of each stage, the share of the whole time in which it does nothing."""
        return tuple(
            1 - sum(span.end - span.begin for span in spans) / self.makespan for spans in self.spans
        )


def simulate(
    actions: Schedule, chunks: int, micro_batches: int, times: Times | None = None
) -> Simulation:
    """InvalidSchedule, or what comes of it. A schedule without any backward is valid too: an evaluation."""
    results = (
        ALL_RESULTS
        if any(set(RESULTS[action.kind]) - {"output"} for stage in actions for action in stage)
        else ALL_RESULTS[:1]
    )
    mistakes = [
        mistake
        for number, stage in enumerate(actions)
        for mistake in _mistakes(number, stage, chunks, micro_batches, results)
    ]
    if mistakes:
        raise InvalidSchedule(mistakes)
    spans = _carry_out(actions, chunks, times or Times())
    return Simulation(spans, tuple(_peak_live(stage, results[-1]) for stage in actions))


def _mistakes(
    stage: int, actions: Sequence[Action], chunks: int, micro_batches: int, results: Sequence[str]
) -> Iterator[str]:
    """Each chunk of a stage must make all results of every micro-batch once, in their order."""
    made: dict[tuple[int, int], list[str]] = {
        (chunk, number): [] for chunk in range(chunks) for number in range(micro_batches)
    }
    for action in actions:
        if (action.chunk, action.micro_batch) not in made:
            yield f"stage {stage}: {action}, but there are {chunks} chunks and {micro_batches} micro-batches"
        else:
            made[action.chunk, action.micro_batch] += RESULTS[action.kind]
    for (chunk, number), found in made.items():
        if found != list(results):
            what = ", ".join(found) or "nothing"
            yield f"stage {stage}: micro-batch {number} in chunk {chunk} makes {what} (it should be {', '.join(results)})"


def _carry_out(actions: Schedule, chunks: int, times: Times) -> tuple[tuple[Span, ...], ...]:
    stages = len(actions)
    spans: list[list[Span]] = [[] for _ in actions]
    made: dict[PartResult, float] = {}
    waiting: dict[PartResult, int] = {}  # for what -> the stage that waits for it
    ready = list(range(stages))
    while ready:
        stage = ready.pop()
        clock = spans[stage][-1].end if spans[stage] else 0.0
        for action in actions[stage][len(spans[stage]) :]:
            part, needed = action.chunk * stages + stage, needs(action, stage, stages, chunks)
            if needed is not None and needed not in made:
                waiting[needed] = stage
                break
            begin = (
                clock
                if needed is None
                else max(
                    clock, made[needed] + (times.transfer(part, needed.part) if stages > 1 else 0.0)
                )
            )
            clock = begin + times.of(action.kind, part)
            spans[stage].append(Span(action, begin, clock))
            for name in RESULTS[action.kind]:
                result = PartResult(name, part, action.micro_batch)
                made[result] = clock
                if result in waiting:
                    ready.append(waiting.pop(result))
    if waiting:
        raise InvalidSchedule(
            [
                _stuck(stage, actions[stage][len(spans[stage])], needed, stages)
                for needed, stage in sorted(waiting.items())
            ]
        )
    return tuple(map(tuple, spans))


def _stuck(stage: int, action: Action, needed: PartResult, stages: int) -> str:
    whom = f"the {needed.name} of micro-batch {needed.micro_batch} from chunk {needed.part // stages} of stage {needed.part % stages}"
    return f"deadlock: stage {stage} stands at the {action}, waiting for {whom}"


def _peak_live(actions: Sequence[Action], last_result: str) -> int:
    """Activations live from the output to the last result that is made from them; an evaluation keeps them during the action alone."""
    live = peak = 0
    for action in actions:
        live += "output" in RESULTS[action.kind]
        peak = max(peak, live)
        live -= last_result in RESULTS[action.kind]
    return peak
