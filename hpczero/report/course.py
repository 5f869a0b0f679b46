"""Figures of a run's course over the clock: jobs, checkpoints, restarts; and its goodput (pure)."""

from collections.abc import Iterator, Mapping, Sequence
from math import isfinite

from hpczero.report.bars import rows_of_spans, stacked_bar
from hpczero.report.contents import Block, Figure, Section, Table, Text
from hpczero.report.marks import colour_of
from hpczero.runs.columns import TIME, number, seconds_of
from hpczero.runs.record import Job, Run
from hpczero.svg import Span
from hpczero.text import format_bytes, format_count, format_duration, printable

_UNITS = ((86400.0, "days"), (3600.0, "hours"), (60.0, "minutes"), (1.0, "seconds"))
_COLOURS = {
    "training": "blue",
    "saving": "orange",
    "evaluation": "green",
    "warning": "vermillion",
    "lost steps": "purple",
}


def section(
    run: Run, booked: Mapping[str, float] | None = None, cost: Sequence[Sequence[str]] = ()
) -> Section:
    """`booked`: seconds of all ranks by what they went to, as goodput has them.

    `cost`: rows of a table of what the run had and took.
    """
    blocks: list[Block] = [*_figures(run, booked or {})]
    if cost:
        blocks.append(Table("What it cost", ["what", "how much"], cost))
    if run.jobs:
        blocks.append(_jobs(run))
    saved = run.events_named("save")
    if saved:
        blocks.append(_saves(run))
    if not blocks:
        blocks.append(Text("The run has left no event, so its course is not known."))
    return Section("What happened when?", blocks)


def _figures(run: Run, booked: Mapping[str, float]) -> Iterator[Figure]:
    timed = timeline(run)
    if timed:
        yield timed
    good = goodput(booked)
    if good:
        yield good


def goodput(booked: Mapping[str, float]) -> Figure | None:
    """Return the bar of booked seconds."""
    parts = {name: (seconds, colour_of(at)) for at, (name, seconds) in enumerate(booked.items())}
    about = "Seconds of all ranks that were allocated, by what they went to."
    return stacked_bar("goodput", "Goodput", parts, about)


def timeline(run: Run) -> Figure | None:
    """Return the rows of jobs, checkpoints, evaluations and warnings over the clock."""
    jobs = [job for job in run.jobs if isfinite(job.began)]
    if not jobs:
        return None
    begin, end = jobs[0].began, max(job.ended for job in jobs)
    factor, unit = next(
        ((factor, unit) for factor, unit in _UNITS if end - begin >= 2 * factor), _UNITS[-1]
    )

    def at(seconds: float) -> float:
        return min(max(0.0, (seconds - begin) / factor), (end - begin) / factor)

    rows: dict[str, list[Span]] = {}
    for job in jobs:
        tip = f"job {job.number}: steps {job.first + 1:,} to {job.last:,}, {_end_of(job, run)}"
        rows[f"job {job.number}"] = [Span(at(job.began), at(job.ended), "training", tip)]
    if len(rows) > _MOST_ROWS:
        rows = {"jobs": [span for spans in rows.values() for span in spans]}
    width = (end - begin) / factor / 400
    for row, event, kind in (
        ("checkpoints", "save", "saving"),
        ("evaluations", "eval", "evaluation"),
        ("warnings", "WARN", "warning"),
    ):
        spans = []
        for one in run.events_named(event):
            moment = seconds_of(one.get(TIME))
            if not isfinite(moment):
                continue
            lasted = number(one.get("seconds"))
            began = at(moment - (lasted if 0 <= lasted < 1e9 else 0.0))
            step = number(one.get("step"))
            tip = f"{kind}, step {step:,.0f}" if isfinite(step) else kind
            spans.append(Span(began, max(at(moment), began + width), kind, tip))
        if spans:
            rows[row] = spans
    title = "Jobs, checkpoints and evaluations on the clock"
    drawing = rows_of_spans(title, rows, _COLOURS, unit, (end - begin) / factor)
    return Figure("course", drawing, _caption(run), None, True)


_MOST_ROWS = 24  # of jobs


def _caption(run: Run) -> str:
    jobs = run.jobs
    words = format_count(len(jobs), "job")
    if len(jobs) > 1:
        again = steps_done_again(run)
        words += f", so {format_count(len(jobs) - 1, 'restart')}"
        words += f"; {format_count(again, 'step')} had to be done again" if again else ""
    saved = len(run.events_named("save"))
    return f"{words}; {format_count(saved, 'checkpoint')} saved."


def steps_done_again(run: Run) -> int:
    """Return how many steps jobs did that later ones began before, as far as events tell."""
    lost = 0
    for before, after in zip(run.jobs, run.jobs[1:], strict=False):
        lost += max(0, _reached(run, before) - after.first)
    return lost


def _reached(run: Run, job: Job) -> int:
    """Return the last step that an event, or a line of metrics, of the job names."""
    later = [other.began for other in run.jobs if other.began > job.began]
    end = min(later, default=float("inf"))
    steps = [
        number(event.get("step"))
        for event in run.events
        if job.began <= seconds_of(event.get(TIME)) < end
    ]
    return int(max([job.last, *(step for step in steps if isfinite(step))]))


def _end_of(job: Job, run: Run) -> str:
    if job.state:
        return f"{printable(job.state, 40)}: {printable(job.reason, 200)}".removesuffix(": ")
    is_last = job is run.jobs[-1]
    return "no word of its end: it runs, or died" if is_last else "it ended without a word"


def _jobs(run: Run) -> Table:
    rows = [
        [
            str(job.number),
            printable(str(job.start.get(TIME, "?"))[:19].replace("T", " ")),
            format_duration(max(0.0, job.ended - job.began)) if isfinite(job.began) else "?",
            f"{job.first + 1:,}" if job.last > job.first else "-",
            f"{job.last:,}",
            str(len(job.ranks) or "?"),
            _end_of(job, run),
        ]
        for job in run.jobs
    ]
    head = ["job", "began (UTC)", "took", "first step", "last step", "ranks", "end"]
    return Table("Jobs", head, rows)


def _saves(run: Run) -> Table:
    rows = []
    for event in run.events_named("save"):
        size, seconds = number(event.get("bytes")), number(event.get("seconds"))
        step = number(event.get("step"))
        rows.append(
            [
                f"{step:,.0f}" if isfinite(step) else "?",
                printable(str(event.get(TIME, "?"))[:19].replace("T", " ")),
                format_bytes(int(size)) if isfinite(size) else "?",
                f"{seconds:.3g}" if isfinite(seconds) else "?",
            ]
        )
    return Table("Checkpoints", ["step", "saved (UTC)", "size", "seconds"], rows[-200:], True)
