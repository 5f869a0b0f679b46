"""Figures of what each rank did in a step: maps of heat of its own work and its waiting (pure)."""

from collections.abc import Iterator, Sequence

import numpy as np

from hpczero.report.bars import heat
from hpczero.report.contents import Block, Figure, Section, Table, Text
from hpczero.runs.columns import Numbers
from hpczero.runs.curves import means
from hpczero.runs.rank_times import RankTimes
from hpczero.text import format_count, format_span

_COLUMNS = 160  # of a map
_ROWS = 64
_SLOWEST = 8  # ranks in the table
TITLE = "Were all ranks alike?"


def section(jobs: Sequence[RankTimes], slow: Sequence[str] = ()) -> Section:
    """`jobs`: the rows of each of the run's jobs that has any; `slow`: words on slow ranks."""
    if not jobs:
        words = "The run left no times of its ranks (rank_times/), so stragglers cannot be seen."
        return Section(TITLE, [Text(words)])
    blocks: list[Block] = [Text(words) for words in slow]
    for ranks in sorted({job.ranks for job in jobs}):
        alike = [job for job in jobs if job.ranks == ranks]
        which = f"-of-{ranks}" if len({job.ranks for job in jobs}) > 1 else ""
        blocks += _figures(alike, which)
        blocks.append(_slowest(alike))
    return Section(TITLE, blocks)


def own_work(job: RankTimes) -> Numbers:
    """Return the mean seconds of a step in which a rank did not wait [rows, ranks]."""
    return np.maximum(0.0, job.a_step("step") - job.a_step("wait"))


def grouped(values: Numbers, most: int = _ROWS) -> tuple[list[str], Numbers]:
    """Return names and rows [groups, rows] of [rows, ranks]; of several ranks the largest."""
    ranks = values.shape[1]
    begins = np.unique(np.linspace(0, ranks, min(most, ranks) + 1).astype(int))[:-1]
    names = [
        f"ranks {format_span(begin, end - 1)}" if end - begin > 1 else f"rank {begin}"
        for begin, end in zip(begins.tolist(), [*begins[1:].tolist(), ranks], strict=True)
    ]
    return names, np.maximum.reduceat(values, begins, axis=1).T


def _figures(jobs: Sequence[RankTimes], which: str) -> Iterator[Figure]:
    steps = np.concatenate([(job.first + job.last) / 2 for job in jobs])
    every = (
        ("step-of-ranks", "Seconds of a step, by rank", [job.a_step("step") for job in jobs]),
        (
            "work-of-ranks",
            "Seconds of a step in which a rank did not wait",
            [own_work(job) for job in jobs],
        ),
        (
            "wait-of-ranks",
            "Seconds of a step in which a rank waited for others",
            [job.a_step("wait") for job in jobs],
        ),
    )
    said = {
        "step-of-ranks": "Ranks wait for each other in every step, so its time is much alike.",
        "work-of-ranks": "A bright row is a rank that the others wait for.",
        "wait-of-ranks": "A dark row is a rank that waits for nobody: look at its own work.",
    }
    for name, title, parts in every:
        values = np.concatenate(parts)
        names, rows = grouped(values)
        x, _, largest = means(steps, rows.T, _COLUMNS)
        drawing = heat(title, names, x, largest.T, "s", "step")
        ranks = values.shape[1]
        caption = f"{format_count(ranks, 'rank')}, means of the steps between two rows of the file"
        caption += (
            "; of several the largest. " if len(names) < ranks or len(x) < len(steps) else ". "
        )
        yield Figure(f"{name}{which}", drawing, caption + said[name], wide=True)


def _slowest(jobs: Sequence[RankTimes]) -> Table:
    """Return the ranks whose own work took longest."""
    steps = sum(float(job.steps.sum()) for job in jobs)
    step, wait = (
        sum(job.of_field[name].sum(axis=0) for job in jobs) / steps for name in ("step", "wait")
    )
    work = np.maximum(0.0, step - wait)
    usual = float(np.median(work))
    rows = []
    for rank in np.argsort(-work)[:_SLOWEST].tolist():
        share = (work[rank] / usual - 1) if usual > 0 else 0.0
        rows.append([str(rank), f"{work[rank]:.4g}", f"{100 * share:+.1f} %", f"{wait[rank]:.4g}"])
    head = ["rank", "own work (s a step)", "than the median", "waited (s a step)"]
    return Table(f"The ranks with the most work of {len(work)}", head, rows)
