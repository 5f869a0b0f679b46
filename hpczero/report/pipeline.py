"""Figures of a step of the pipeline: as it ran, from the trace, beside as planned (pure)."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from hpczero.comm.trace import SPAN, Event
from hpczero.parallel.pipeline.schedule import schedule
from hpczero.parallel.pipeline.simulate import Times, simulate
from hpczero.report.bars import rows_of_spans
from hpczero.report.contents import Block, Figure, Section, Table, Text
from hpczero.svg import Span
from hpczero.train import trace_file

COLOURS = {
    "forward": "blue",
    "backward": "green",
    "waiting": "orange",
    "optimizer": "purple",
    "other": "grey",
}
TITLE = "How did the pipeline run?"
_KIND_OF = {
    "forward": "forward",
    "backward": "backward",
    "optimizer step": "optimizer",
}
_ACTIONS = ("forward", "backward")


@dataclass(frozen=True)
class Plan:
    """The pipeline of a run."""

    kind: str
    stages: int
    chunks: int
    micro_batches: int


@dataclass(frozen=True)
class Traced:
    """A traced step: the main track of one rank of each stage, from the step's begin on."""

    number: int
    stages: Sequence[Sequence[Event]]


def section(plan: Plan, traced: Traced | None, why_not: str = "") -> Section:
    """`why_not`: there is no traced step."""
    blocks: list[Block] = []
    if traced:
        ran = [pieces(events) for events in traced.stages]
        blocks.append(_as_it_ran(ran, traced.number))
        blocks.append(_as_planned(plan, [_durations(stage) for stage in traced.stages]))
        blocks.append(_table(ran))
    else:
        blocks += [Text(why_not)] if why_not else []
        blocks.append(_as_planned(plan, []))
    return Section(TITLE, blocks)


def pieces(events: Sequence[Event]) -> list[Span]:
    """Return what a rank did from moment to moment: each belongs to the innermost event."""
    main = sorted(trace_file.main_track(events), key=lambda one: (one.begin, -one.end))
    if not main:
        return []
    begin = main[0].begin
    found: list[Span] = []
    open_events: list[Event] = []
    now = begin
    for event in [*main, None]:
        until = event.begin if event else max(one.end for one in main)
        while open_events and open_events[-1].end <= until:
            inner = open_events.pop()
            _add(found, inner, now, inner.end, begin)
            now = max(now, inner.end)
        if event:
            if open_events:
                _add(found, open_events[-1], now, event.begin, begin)
            now = max(now, event.begin)
            open_events.append(event)
    return found


def _add(found: list[Span], event: Event, begin: int, end: int, zero: int) -> None:
    if end > begin:
        kind = kind_of(event)
        what = event.what
        tip = what.name if what.kind == SPAN else f"{what.kind} for {what.axis} {what.name}"
        found.append(Span((begin - zero) / 1e6, (end - zero) / 1e6, kind, tip))


def kind_of(event: Event) -> str:
    """Return the kind, one of COLOURS: what is not computing is waiting, or else other."""
    if event.what.kind != SPAN:
        return "waiting"
    return _KIND_OF.get(event.what.name, "other")


def _as_it_ran(ran: Sequence[Sequence[Span]], step: int) -> Figure:
    until = max((spans[-1].end for spans in ran if spans), default=1.0)
    rows = {f"stage {number}": spans for number, spans in enumerate(ran)}
    title = f"Step {step:,} as it ran"
    drawing = rows_of_spans(title, rows, COLOURS, "milliseconds", until)
    caption = f"The step took {until:.4g} ms; one rank of each stage. Waiting: for tensor, data or "
    caption += "pipeline ranks, and the own work on what is sent."
    return Figure("pipeline-ran", drawing, caption, None, True)


def _as_planned(plan: Plan, durations: Sequence[Mapping[str, float]]) -> Figure:
    """Return the schedule alone, with the median times of each stage's actions, else 1 and 2."""
    measured = len(durations) == plan.stages and all(
        one.get(kind, 0.0) > 0 for one in durations for kind in _ACTIONS
    )
    usual = {"forward": 1.0, "backward": 2.0}
    of_part = {
        kind: [
            durations[part % plan.stages][kind] if measured else usual[kind]
            for part in range(plan.stages * plan.chunks)
        ]
        for kind in _ACTIONS
    }
    actions = schedule(plan.kind, plan.stages, plan.chunks, plan.micro_batches)
    course = simulate(actions, plan.chunks, plan.micro_batches, Times(of_part))
    rows = {
        f"stage {number}": [
            Span(one.begin, one.end, one.action.kind, str(one.action)) for one in intervals
        ]
        for number, intervals in enumerate(course.intervals)
    }
    unit = "milliseconds" if measured else "forwards"
    title = f"The schedule as planned ({plan.kind})"
    drawing = rows_of_spans(title, rows, COLOURS, unit, course.makespan)
    idle = sum(course.idle) / plan.stages
    caption = f"With {plan.micro_batches} micro-batches the stages idle {100 * idle:.1f} % of it. "
    caption += (
        "Each action takes its stage's median time of the traced step, messages take none."
        if measured
        else "A backward is drawn as long as two forwards, messages take no time."
    )
    return Figure("pipeline-planned", drawing, caption, None, True)


def _durations(events: Sequence[Event]) -> dict[str, float]:
    """Return the median milliseconds of a stage's forwards and backwards, waits inside included."""
    found: dict[str, list[float]] = {}
    for event in events:
        if event.what.kind == SPAN and event.what.name in _ACTIONS:
            found.setdefault(event.what.name, []).append((event.end - event.begin) / 1e6)
    return {kind: median(every) for kind, every in found.items()}


def _table(ran: Sequence[Sequence[Span]]) -> Table:
    rows = []
    for number, spans in enumerate(ran):
        sums = dict.fromkeys(COLOURS, 0.0)
        for span in spans:
            sums[span.kind] += span.end - span.begin
        rows.append([str(number), *(f"{sums[kind]:.4g}" for kind in COLOURS)])
    head = ["stage", *(f"{kind} (ms)" for kind in COLOURS)]
    return Table("The step as it ran, by stage", head, rows, folded=True)


def chosen(steps: Sequence[int], seconds: Mapping[int, float]) -> int:
    """Return the step of the median time."""
    order = sorted(steps, key=lambda step: seconds.get(step, 0.0))
    return order[len(order) // 2]


def first_of_each_stage(stage_of_rank: Sequence[int]) -> Iterator[int]:
    """Yield the first rank of each stage."""
    for stage in range(max(stage_of_rank) + 1):
        yield stage_of_rank.index(stage)
