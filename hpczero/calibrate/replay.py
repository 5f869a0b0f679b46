"""A traced run's step, composed again of its own spans: where its time went, by cause (pure).

The pieces are means over the steps of the trace, and over the ranks of a stage: an action with what
it waits for tensor and data ranks; a message, from the end of the action that made it to the begin
of the one that waited for it; what comes before the first forward; what follows the last backward.
What a step takes is composed of them as a predicted one is, so the two can be laid side by side.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, median

from hpczero.calibrate.run_trace import RunTrace
from hpczero.comm.trace import ADVANCE, SPAN, WAIT, Event
from hpczero.parallel.pipeline.schedule import Action, gives, needs, schedule
from hpczero.planner.composed import KINDS, Pipeline, compose
from hpczero.planner.step_costs import Edge, Seconds
from hpczero.train import trace_file

_WAITED = 20_000  # ns: a shorter wait tells nothing of a message
_OF_DATA = ("data", "data gathers", "shard", "shard gathers", "replica", "replica averages")
# of waits along an axis
_CAUSES = {"tensor": "tensor", "pipeline": "messages", **dict.fromkeys(_OF_DATA, "data")}
_OF_SPANS = {"optimizer step": "optimizer"}


@dataclass(frozen=True)
class Replayed:
    """A step by cause, composed of a run's spans, and the measured one."""

    causes: dict[str, float]
    measured: float  # seconds

    @property
    def seconds(self) -> float:
        return sum(self.causes.values())


def replay(trace: RunTrace) -> Replayed:
    """Compose the mean step of a trace."""
    spans = Spans(trace)
    causes, _ = compose(spans.pipeline, spans)
    measured = [
        (event.end - event.begin) / 1e9
        for events in trace.events.values()
        for event in events
        if event.what[:2] == (SPAN, "step") and event.number in trace.steps
    ]
    return Replayed(causes, mean(measured))


class Spans:
    """The costs of a step (`StepCosts`), as a trace has them."""

    def __init__(self, trace: RunTrace) -> None:
        spec, grid = trace.spec, trace.grid
        self._ranks = [_RankSteps(trace, rank) for rank in sorted(trace.events)]
        counts = {len(step.actions) for rank in self._ranks for step in rank.steps}
        stages = spec.parallel.pipeline
        chunks = spec.parallel.chunks if stages > 1 else 1
        self.pipeline = Pipeline(
            spec.parallel.schedule if stages > 1 else "1f1b",
            stages,
            chunks,
            max(counts) // 2 // chunks,
        )
        self._by_stage = [
            [one for one in self._ranks if grid.coordinate(one.rank, "pipeline") == stage]
            for stage in range(stages)
        ]
        self._plan = schedule(
            self.pipeline.kind, stages, self.pipeline.chunks, self.pipeline.micro_batches
        )
        self._transfers = self._messages(trace)

    # ------------------------------------------------------------------------ a micro-batch

    def like(self, stage: int) -> int:
        return stage

    def action(self, kind: str, stage: int, chunk: int) -> Seconds:
        causes = self._mean_action(kind, stage, chunk)
        return {name: seconds for name, seconds in causes.items() if name != "data"}

    def data(self, kind: str, stage: int, chunk: int) -> float:
        return self._mean_action(kind, stage, chunk).get("data", 0.0)

    def _mean_action(self, kind: str, stage: int, chunk: int) -> dict[str, float]:
        found = [
            action.causes
            for rank in self._by_stage[stage]
            for step in rank.steps
            for planned, action in zip(self._plan[stage], step.actions, strict=False)
            if (planned.kind, planned.chunk) == (kind, chunk)
        ]
        return _mean_causes(found)

    def bus(self, kind: str, stage: int, chunk: int) -> float:
        return 0.0

    def hidden(self) -> float:
        return 0.0  # what is waited for is what was not hidden

    # ---------------------------------------------------------------------------- the pipeline

    def transfer(self, part: int) -> float:
        return self._transfers.get(part, 0.0)

    def _messages(self, trace: RunTrace) -> dict[int, float]:
        """Return the median seconds of a message between a part and the next one."""
        stages, chunks = self.pipeline.stages, self.pipeline.chunks
        if stages == 1:
            return {}
        seconds: dict[int, list[float]] = {}
        for column in _columns(trace, self._by_stage):
            for steps in zip(*(rank.steps for rank in column), strict=True):
                for part, message in _waited_for(self._plan, stages, chunks, steps):
                    seconds.setdefault(part, []).append(message)
        return {part: median(messages) for part, messages in seconds.items()}

    # ------------------------------------------------------------------------ the step's ends

    def weights(self, stage: int) -> Edge:
        return Edge()

    def gradients(self, stage: int) -> Edge:
        return Edge()

    def after(self) -> Seconds:
        """Return what comes before all forwards and after all backwards, of who is last there."""
        first = min(self._by_stage, key=lambda ranks: _mean_of(ranks, "before"))
        last = min(self._by_stage, key=lambda ranks: _mean_of(ranks, "after"))
        causes: dict[str, float] = {}
        for ranks, moment in ((first, "before"), (last, "after")):
            steps = [getattr(step, moment) for rank in ranks for step in rank.steps]
            for cause, seconds in _mean_causes(steps).items():
                causes[cause] = causes.get(cause, 0.0) + seconds
        return causes

    def beside_next(self, step: float) -> float:
        return 0.0

    def checkpoint(self, step: float) -> float:
        return 0.0


@dataclass(frozen=True)
class _Acted:
    """A forward or backward: when it was, and its seconds by cause."""

    begin: int
    end: int
    causes: Mapping[str, float]


@dataclass(frozen=True)
class _Step:
    """A rank's step: its actions, and what lay before and after them by cause."""

    actions: Sequence[_Acted]
    before: Mapping[str, float]
    after: Mapping[str, float]


class _RankSteps:
    """The steps of one rank."""

    def __init__(self, trace: RunTrace, rank: int) -> None:
        self.rank = rank
        self.steps = [_step_of(trace.of_step(rank, step)) for step in trace.steps]


def _step_of(events: Sequence[Event]) -> _Step:
    main = trace_file.main_track(events)
    actions = [event for event in main if event.what.kind == SPAN and _is_action(event)]
    actions.sort(key=lambda event: event.begin)
    begin, end = min(event.begin for event in main), max(event.end for event in main)
    first, last = actions[0].begin, actions[-1].end
    return _Step(
        [
            _Acted(one.begin, one.end, _causes(main, one.begin, one.end, "compute"))
            for one in actions
        ],
        _causes(main, begin, first, "overhead"),
        _causes(main, last, end, "overhead"),
    )


def _is_action(event: Event) -> bool:
    return event.what.name in KINDS


def _causes(main: Sequence[Event], begin: int, end: int, otherwise: str) -> dict[str, float]:
    """Return the seconds between two moments by cause."""
    inside = [
        event._replace(begin=max(begin, event.begin), end=min(end, event.end))
        for event in main
        if event.begin < end and event.end > begin
    ]
    causes: dict[str, float] = {}
    for name, seconds in trace_file.exclusive_seconds(inside).items():
        cause = _cause(name, otherwise)
        causes[cause] = causes.get(cause, 0.0) + seconds
    return causes


def _cause(name: str, otherwise: str) -> str:
    kind, _, axis = name.partition(" ")
    if kind in (WAIT, ADVANCE) and axis:
        return _CAUSES.get(axis, "overhead")
    return _OF_SPANS.get(name, otherwise)


def _mean_causes(found: Sequence[Mapping[str, float]]) -> dict[str, float]:
    names = sorted({name for causes in found for name in causes})
    return {name: mean(causes.get(name, 0.0) for causes in found) for name in names}


def _mean_of(ranks: Sequence[_RankSteps], moment: str) -> float:
    return mean(sum(getattr(step, moment).values()) for rank in ranks for step in rank.steps)


def _columns(
    trace: RunTrace, by_stage: Sequence[Sequence[_RankSteps]]
) -> Iterator[list[_RankSteps]]:
    """Yield the ranks of each pipeline, stage by stage."""
    of_rank = {one.rank: one for ranks in by_stage for one in ranks}
    for group in trace.grid.groups("pipeline"):
        yield [of_rank[rank] for rank in group]


def _waited_for(
    plan: Sequence[Sequence[Action]], stages: int, chunks: int, steps: Sequence[_Step]
) -> Iterator[tuple[int, float]]:
    """Yield (part, seconds) of the messages that a stage waited for, from end to begin."""
    ends = {}
    for stage, step in enumerate(steps):
        for action, acted in zip(plan[stage], step.actions, strict=False):
            result = gives(action, stage, stages, chunks)
            if result is not None:
                ends[result] = acted.end
    for stage, step in enumerate(steps):
        free = 0
        for action, acted in zip(plan[stage], step.actions, strict=False):
            needed = needs(action, stage, stages, chunks)
            if needed in ends and acted.begin - max(free, ends[needed]) > _WAITED:
                part = min(action.chunk * stages + stage, needed.part)
                yield part, (acted.begin - ends[needed]) / 1e9
            free = acted.end
