"""Several runs together: which one learned best, what differs, their curves (pure).

The words and figures are those of `hpczero compare`. Runs that differ by their seed alone are one
line, with a band from the lowest to the highest of them.
"""

from collections.abc import Iterator, Sequence
from math import isfinite

import numpy as np

from hpczero.report.charts import Axes, Series, series
from hpczero.report.contents import Block, Chapter, Figure, Section, Table, Text
from hpczero.report.learning import chart
from hpczero.report.marks import DASHES, SERIES, colour_of, dashes_of
from hpczero.runs.axes import Course
from hpczero.runs.compared import TRAINING, VALIDATION, Compared, compare
from hpczero.runs.compared_words import best_in_words, differing, last_figures, name_of
from hpczero.runs.curves import Curve
from hpczero.runs.record import Run

MOST = len(SERIES) * len(DASHES)  # groups that colours and dashes tell apart
_POINTS = 200
_MOST_OF_SEEDS = 60  # points of their line; each is a mean of the steps since the last one
_AXES = {"steps": "steps", "tokens": "tokens", "seconds": "seconds of steps"}


def chapter(runs: Sequence[Run], states: Sequence[str]) -> Chapter:
    compared = compare(runs, states)
    blocks: list[Block] = [Text(" ".join(best_in_words(compared)))]
    blocks += [Text(words, warns=True) for words in compared.warnings]
    head, rows = differing(compared)
    if len(head) > 1:
        blocks.append(Table(f"What differs, by {compared.by}, the best first", head, rows))
    blocks.append(Table("Figures at their ends", *_without_empty(*last_figures(compared))))
    if len(compared.groups) > MOST:
        many = len(compared.groups)
        blocks.append(Text(f"Curves of the best {MOST} of {many} groups.", warns=True))
    blocks += [one for one in _figures(compared) if one]
    facts = {"runs": str(len(runs)), "groups": str(len(compared.groups))}
    return Chapter("All together", facts, [Section("Which one learned best?", blocks)])


def _without_empty(head: list[str], rows: list[list[str]]) -> tuple[list[str], list[list[str]]]:
    used = [at for at in range(len(head)) if any(row[at] for row in rows)]
    return [head[at] for at in used], [[row[at] for at in used] for row in rows]


def _figures(compared: Compared) -> Iterator[Figure | None]:
    groups = compared.groups[:MOST]
    points = max(60, _POINTS * 6 // max(6, len(groups)))
    for axis, words in _AXES.items():
        for kind in (TRAINING, VALIDATION):
            every = [_line(compared, number, axis, kind, points) for number, _ in enumerate(groups)]
            title = f"{kind.capitalize()} over {words}"
            yield chart(f"{kind.split()[0]}-{axis}", Axes(title, words, "nats per token"), every)
    axes = Axes("Throughput", "steps", "tokens/s", from_zero=True)
    firsts = [compared.runs[group.members[0]].metrics for group in groups]
    every = [
        series(name_of(group), of["step"], of["tokens_per_second"], points, *_look(number))
        for number, (group, of) in enumerate(zip(groups, firsts, strict=True))
    ]
    several = any(group.spread for group in groups)
    yield chart("throughput", axes, every, "Of several seeds the first." if several else "")


def _look(number: int) -> tuple[str, str]:
    return colour_of(number), dashes_of(number)


def _line(compared: Compared, number: int, axis: str, kind: str, points: int) -> Series:
    """Return the losses of a group; of several seeds as far as all of them have come."""
    group = compared.groups[number]
    courses = [compared.courses[at] for at in group.members]
    if group.spread:
        return Series(name_of(group), _of_seeds(courses, axis, kind), *_look(number))
    (course,) = courses
    losses = course.loss if kind == TRAINING else course.validation
    return series(name_of(group), course.of_axis[axis], losses, points, *_look(number))


def _of_seeds(courses: Sequence[Course], axis: str, kind: str) -> Curve:
    ends = [course.end(axis) for course in courses]
    end = min(ends) if all(isfinite(end) and end > 0 for end in ends) else 0.0
    points = min(_MOST_OF_SEEDS, *(len(course.loss) for course in courses)) if end else 0
    span = end / max(1, points)
    places = np.arange(1, points + 1) * span
    losses = np.array([_losses(courses, axis, kind, x, span) for x in places])
    losses = losses.reshape(len(places), len(courses))
    known = np.isfinite(losses).all(axis=1)
    of_known = losses[known]
    return Curve(places[known], of_known.min(axis=1), of_known.mean(axis=1), of_known.max(axis=1))


def _losses(courses: Sequence[Course], axis: str, kind: str, x: float, span: float) -> list[float]:
    if kind == TRAINING:
        return [course.training_loss(axis, x, span) for course in courses]
    return [course.validation_loss(axis, x) for course in courses]
