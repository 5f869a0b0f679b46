"""From runs to a report: which chapters and sections there are, in which order."""

from collections.abc import Callable, Iterator, Sequence
from math import isfinite

from hpczero import env, safe_files
from hpczero.errors import InputError
from hpczero.report import (
    course,
    layout,
    learning,
    memory,
    overlay,
    pipeline,
    ranks,
    settings,
    speed,
    traces,
)
from hpczero.report.contents import Chapter, Report, Section, Text
from hpczero.runs import energy, rank_times
from hpczero.runs.columns import number
from hpczero.runs.goodput import Goodput, goodput_of
from hpczero.runs.record import Run
from hpczero.runs.stragglers import stragglers
from hpczero.text import format_duration, format_energy, format_loss, format_number, printable

_MOST_CHAPTERS = 12  # of runs, behind their comparison
# what a stranger's files may make of a figure: it is left out, and said so
_DAMAGED = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, OSError)


def report_of(runs: Sequence[Run]) -> Report:
    points = _points(len(runs))
    title = f"Run {runs[0].name}" if len(runs) == 1 else f"{len(runs)} runs"
    chapters = [chapter_of(run, points) for run in runs[:_MOST_CHAPTERS]]
    if len(runs) > 1:
        chapters.insert(0, overlay.chapter(runs, list(map(state_of, runs))))
    return Report(printable(title), chapters, f"Written by hpczero {env.VERSION}.")


def chapter_of(run: Run, points: int) -> Chapter:
    makers: list[tuple[str, Callable[[], Section]]] = [
        ("Did it learn?", lambda: learning.section(run, points)),
        ("How fast was it?", lambda: speed.section(run, points)),
        (ranks.TITLE, lambda: _ranks(run)),
        (pipeline.TITLE, lambda: _pipeline(run)),
        ("What did it hold in memory?", lambda: memory.section(run)),
        (layout.TITLE, lambda: _layout(run)),
        ("What happened when?", lambda: _course(run)),
        ("What was it told?", lambda: settings.spec_section(run)),
        ("Events", lambda: settings.events_section(run)),
        ("Where did it run?", lambda: settings.environment_section(run)),
    ]
    sections = [_made(title, maker) for title, maker in makers]
    return Chapter(printable(run.name), dict(facts(run)), sections)


def _course(run: Run) -> Section:
    found = goodput_of(run)
    parts = {name: seconds for name, seconds in found.of_kind.items() if 0 < seconds < 1e18}
    return course.section(run, parts, cost(run, found))


def cost(run: Run, found: Goodput) -> list[list[str]]:
    """Return what the run had and took, in words: rows of a table."""
    if not 0 < found.allocated < 1e18:
        return []
    used = energy.read(run.path, found.tokens)
    each = used.a_thousand_tokens
    queued = "not known" if found.queued is None else format_duration(found.queued)
    rows = [
        ["time of all ranks", f"{found.allocated / 3600:,.4g} rank-hours"],
        ["of it trained", f"{found.share or 0.0:.1%}"],
        ["in the queue", queued],
    ]
    if used.joules is not None:
        rows.append(["energy", format_energy(used.joules)])
        parts = format_energy(used.processors), format_energy(used.gpus)
        rows.append(["of it processors, GPUs", ", ".join(parts)])
        rows += [["energy of 1,000 tokens", f"{each:,.4g} J"]] if each else []
    if used.missing:
        rows.append(["energy that is not measured", used.missing])
    return rows


def _ranks(run: Run) -> Section:
    jobs = rank_times.read(run.path)
    return ranks.section(jobs, [one.words for one in stragglers(run, jobs)])


def _pipeline(run: Run) -> Section:
    found = traces.layout_of(run)
    if found is None:
        return Section(pipeline.TITLE, [Text("The layout of the run is not known.")])
    plan = traces.plan_of(run, found)
    if plan is None:
        return Section(pipeline.TITLE, [Text("The run had a single stage: it had no pipeline.")])
    if not safe_files.is_seen(run.path / traces.TRACE):
        why = "The run left no trace, so this is the plan alone; train.trace = true records one."
        return pipeline.section(plan, None, why)
    try:
        traced = traces.traced_step(run, found)
    except (InputError, *_DAMAGED) as error:
        return pipeline.section(plan, None, f"No step as it ran: {error}.")
    return pipeline.section(plan, traced)


def _layout(run: Run) -> Section:
    found = traces.layout_of(run)
    if found is None:
        return layout.section(None, [], run.summary)
    return layout.section(found.grid, found.hosts, run.summary)


def state_of(run: Run) -> str:
    last = run.jobs[-1].state if run.jobs else ""
    return printable(str(run.summary.get("state") or last or "no summary: runs, or died"), 60)


def facts(run: Run) -> Iterator[tuple[str, str]]:
    """Yield what stands at the head of a chapter."""
    summary = run.summary
    yield "state", state_of(run)
    wanted = run.settings.get("train.steps")
    yield "steps", f"{run.steps:,}" + (f" of {wanted:,}" if wanted else "")
    for name, key in (("loss", "final_loss"), ("validation loss", "validation_loss")):
        figure = number(summary.get(key))
        if isfinite(figure):
            yield name, format_loss(figure)
    for name, key in (
        ("parameters", "parameters"),
        ("tokens", "tokens"),
        ("tokens/s", "tokens_per_second"),
        ("ranks", "ranks"),
    ):
        figure = number(summary.get(key))
        if isfinite(figure):
            yield name, f"{figure:.0f}" if figure < 1000 else format_number(figure)
    wall = number(summary.get("wall_seconds"))
    if 0 <= wall < 1e12:
        yield "wall time of the last job", format_duration(wall)
    if len(run.jobs) > 1:
        yield "jobs", str(len(run.jobs))


def _points(runs: int) -> int:
    """Return how many points a line has: fewer in a report of many runs, so that it stays small."""
    return max(60, learning.POINTS // max(1, runs))


def _made(title: str, maker: Callable[[], Section]) -> Section:
    try:
        return maker()
    except (InputError, *_DAMAGED) as error:
        words = f"The run's files do not say this in a form that can be read: {error!r}"
        return Section(title, [Text(printable(words), warns=True)])
