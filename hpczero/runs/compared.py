"""Runs held against each other: their last figures, their losses at equal points, the best (pure).

All that is said of a group is said of all of its runs: where one of them has no figure, or has not
come to a point, the group has none. Otherwise it would look better for what failed in it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite, nan, sqrt
from statistics import fmean, median_low, stdev
from typing import Any

import numpy as np

from hpczero.runs.axes import Course, course_of, mean_loss
from hpczero.runs.columns import number
from hpczero.runs.groups import Difference, Group, differences, groups_of, names_of
from hpczero.runs.margins import Margin, Sample, margin
from hpczero.runs.record import Run
from hpczero.text import first_few, format_count, printable

PART = 20  # a training loss is the mean over one of so many parts of an axis, or of a run's steps
_EQUAL = 0.01  # numbers of tokens that differ by a smaller part are the same
_EARLY = 0.25  # of the longest run: runs that ended before shorten no table
_LARGEST = 1e15  # a larger figure is nonsense
VALIDATION, TRAINING = "validation loss", "training loss"


@dataclass(frozen=True)
class Spread:
    """A figure of the runs of a group; NaN unless all have it. `deviation`: with n - 1."""

    mean: float = nan
    deviation: float = nan
    low: float = nan
    high: float = nan

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        if not values or not all(isfinite(value) and abs(value) < _LARGEST for value in values):
            return cls()
        deviation = stdev(values) if len(values) > 1 else nan
        return cls(fmean(values), deviation, min(values), max(values))


@dataclass(frozen=True)
class Figures:
    """The last figures of a run; NaN where one is not known."""

    step: float
    tokens: float
    seconds: float  # of its steps
    tokens_per_second: float
    ranks: float
    held: float  # bytes, of the fullest rank
    training_loss: float  # mean of the last `training_steps`
    training_error: float
    training_steps: int
    validation_loss: float
    standard_error: float
    validation_step: float
    validation_tokens: float  # that it was trained on before
    best_validation_loss: float
    best_validation_step: float


@dataclass(frozen=True)
class Table:
    """Losses of each group [group][point] at equal points of an axis."""

    axis: str
    points: Sequence[float]
    span: float  # a training loss is the mean over so much of the axis
    training: Sequence[Sequence[Spread]]
    validation: Sequence[Sequence[Spread]]
    common: float  # the last point that all runs have


@dataclass(frozen=True)
class Best:
    group: int
    next: int
    by: str  # VALIDATION or TRAINING
    margin: Margin
    same_windows: bool  # both read the same validation text


@dataclass(frozen=True)
class Compared:
    runs: Sequence[Run]
    names: Sequence[str]
    states: Sequence[str]
    courses: Sequence[Course]
    figures: Sequence[Figures]
    groups: Sequence[Group]  # the best first
    by: str  # what they are ordered by
    differences: Sequence[Difference]
    best: Best | None
    warnings: Sequence[str]

    def spread(self, group: Group, figure: str) -> Spread:
        return Spread.of([float(getattr(self.figures[at], figure)) for at in group.members])

    def table(self, axis: str, points: int) -> Table:
        """Return the losses at equal points up to where half of the runs have ended.

        If that is early, it is up to the longest run's end. One point is the last that all have.
        """
        ends = [end for course in self.courses if isfinite(end := course.end(axis)) and end > 0]
        if not ends:
            return Table(axis, [], nan, [[]] * len(self.groups), [[]] * len(self.groups), nan)
        common, longest, half = min(ends), max(ends), median_low(ends)
        last = half if half >= longest * _EARLY else longest
        places = [last * (at + 1) / points for at in range(points)]
        nearest = min(range(points), key=lambda at: abs(places[at] - common))
        places[nearest] = common
        if axis == "steps":
            places = sorted({float(round(place)) for place in places if place >= 1})
        span = float(max(last // PART, 1)) if axis == "steps" else last / PART

        def row(group: Group, loss: Any) -> list[Spread]:
            courses = [self.courses[at] for at in group.members]
            return [Spread.of([loss(course, x) for course in courses]) for x in places]

        return Table(
            axis,
            places,
            span,
            [row(group, lambda of, x: of.training_loss(axis, x, span)) for group in self.groups],
            [row(group, lambda of, x: of.validation_loss(axis, x)) for group in self.groups],
            common,
        )


def compare(runs: Sequence[Run], states: Sequence[str], each: bool = False) -> Compared:
    """Hold runs against each other; `each`: every run by itself, also if only its seed differs."""
    names = names_of(runs)
    courses = list(map(course_of, runs))
    figures = [figures_of(run, course) for run, course in zip(runs, courses, strict=True)]
    groups = groups_of(runs, each)
    knows = any(isfinite(one.validation_loss) for one in figures)
    by = VALIDATION if knows else TRAINING
    score = {group: _score(group, figures, by).mean for group in groups}
    groups.sort(key=lambda group: score[group] if isfinite(score[group]) else np.inf)
    texts = [_text_of(run, runs) for run in runs]
    ranked = [group for group in groups if isfinite(score[group])]
    best = None
    if len(ranked) > 1 and len(set(texts)) == 1:
        first, second = ranked[:2]
        found = margin(_sample(first, figures, by), _sample(second, figures, by))
        same = by == VALIDATION and _has_same_windows(runs, first, second)
        best = Best(0, 1, by, found, same)
    warnings = [
        *_of_single_runs(runs, names, courses),
        *_of_texts(runs, names, texts),
        *_of_order(groups, ranked, figures, by),
    ]
    differing = differences(runs, groups)
    return Compared(runs, names, states, courses, figures, groups, by, differing, best, warnings)


# ------------------------------------------------------------------------------- figures of a run


def figures_of(run: Run, course: Course) -> Figures:
    """Return the last figures by its metrics, else by its summary."""
    said = {name: number(value) for name, value in run.summary.items()}
    tokens, seconds = (
        _first_known(course.end(name), said.get(name, nan)) for name in ("tokens", "seconds")
    )
    steps = max(1, len(course.loss) // PART)
    last = course.loss[-steps:]
    loss = mean_loss(last, course.tokens[-steps:])
    error = float(np.std(last, ddof=1)) / sqrt(steps) if steps > 1 and isfinite(loss) else nan
    return Figures(
        _first_known(course.end("steps"), said.get("steps", nan)),
        tokens,
        seconds,
        tokens / seconds if seconds > 0 else nan,
        _ranks(run, said),
        _held(run),
        loss if len(last) else said.get("final_loss", nan),
        error,
        steps,
        *_validation(course, said),
    )


def _validation(course: Course, said: Mapping[str, float]) -> tuple[float, ...]:
    """Return the fields of `Figures` from `validation_loss` on."""
    at = course.evaluated
    if not len(at):
        step, tokens = said.get("validation_step", nan), said.get("tokens", nan)
        loss, error = (said.get(f"validation_{name}", nan) for name in ("loss", "standard_error"))
        return loss, error, step, tokens if step == said.get("steps") else nan, loss, step
    last, best = at[-1], at[np.argmin(course.validation[at])]
    steps, tokens_so_far = course.of_axis["steps"], course.of_axis["tokens"]
    return (
        float(course.validation[last]),
        float(course.standard_error[last]),
        float(steps[last]),
        float(tokens_so_far[last]),
        float(course.validation[best]),
        float(steps[best]),
    )


def _first_known(*values: float) -> float:
    return next((value for value in values if isfinite(value)), nan)


def _ranks(run: Run, said: Mapping[str, float]) -> float:
    of_jobs = [len(job.ranks) for job in run.jobs if job.ranks]
    return float(of_jobs[-1]) if of_jobs else said.get("ranks", nan)


def _held(run: Run) -> float:
    fullest = run.summary.get("fullest")
    if isinstance(fullest, dict):
        return number(fullest.get("held"))
    held = [number(line.get("held")) for line in run.memory]
    return max((one for one in held if isfinite(one)), default=nan)


# --------------------------------------------------------------------------- the order of groups


def _score(group: Group, figures: Sequence[Figures], by: str) -> Spread:
    loss = "validation_loss" if by == VALIDATION else "training_loss"
    return Spread.of([float(getattr(figures[at], loss)) for at in group.members])


def _sample(group: Group, figures: Sequence[Figures], by: str) -> Sample:
    of_runs = [figures[at] for at in group.members]
    seeds = group.seeds or range(len(of_runs))
    if by == VALIDATION:
        losses = [one.validation_loss for one in of_runs]
        errors = [one.standard_error for one in of_runs]
    else:
        losses = [one.training_loss for one in of_runs]
        errors = [one.training_error for one in of_runs]
    return Sample(dict(zip(seeds, losses, strict=True)), tuple(errors))


def _text_of(run: Run, others: Sequence[Run]) -> object:
    """Return what the run's validation text is known by, and what of it is predicted.

    A run that has not said yet has the text of another with the same settings of data.
    """
    masks = run.spec.model.family if run.spec and run.spec.model.masks else ""
    alike = (one for one in others if _data_settings(one) == _data_settings(run))
    known = (_fingerprint(one) for one in (run, *alike))
    return masks, next((one for one in known if one), _data_settings(run))


def _data_settings(run: Run) -> str:
    return repr([value for key, value in run.settings.items() if key.startswith("data.")])


def _fingerprint(run: Run) -> str:
    """Return "" if the run has not said; random tokens are alike whatever their seed."""
    data = run.summary.get("data")
    if not isinstance(data, dict):
        return ""
    if data.get("path") == "synthetic":
        return f"synthetic {data.get('vocabulary')}"
    return str(data.get("fingerprint") or "")


def _has_same_windows(runs: Sequence[Run], one: Group, two: Group) -> bool:
    specs = [runs[at].spec for group in (one, two) for at in group.members]
    read = {
        (spec.seq_len, spec.data.documents, spec.train.global_batch * spec.train.eval_batches)
        for spec in specs
        if spec
    }
    return bool(one.seeds) and one.seeds == two.seeds and len(read) == 1


# -------------------------------------------------------------------------------------- warnings


def _of_single_runs(
    runs: Sequence[Run], names: Sequence[str], courses: Sequence[Course]
) -> list[str]:
    words = []
    for run, name, course in zip(runs, names, courses, strict=True):
        words += [f"{name}: {problem}" for problem in run.problems]
        lines = len(course.loss)
        lacking = int((~np.isfinite(course.loss)).sum())
        if not lines:
            words.append(f"{name} has no step in metrics.jsonl: it has no losses to compare")
        elif lacking:
            count = format_count(lines, "step")
            words.append(f"{name}: no finite loss in {lacking:,} of {count}")
        unknown = [axis for axis in ("tokens", "seconds") if lines and np.isnan(course.end(axis))]
        if unknown:
            words.append(f"{name}: metrics.jsonl does not have all of its {' and '.join(unknown)}")
    return [printable(one, 300) for one in words]


def _of_texts(runs: Sequence[Run], names: Sequence[str], texts: Sequence[object]) -> list[str]:
    words = []
    of_text: dict[object, list[str]] = {}
    for name, text in zip(names, texts, strict=True):
        of_text.setdefault(text, []).append(printable(name, 60))
    if len(of_text) > 1:
        parts = "; ".join(first_few(named) for named in of_text.values())
        words.append(
            "losses of different texts cannot be compared, and no run is the best: these are "
            f"evaluated on different ones, or predict something else of them: {parts}"
        )
    lengths = sorted({run.spec.seq_len for run in runs if run.spec})
    if len(lengths) > 1:
        said = " and ".join(f"{length:,}" for length in lengths)
        words.append(
            f"they are evaluated in sequences of {said} tokens: the longer, the more each token "
            "has before it, and the lower the loss by that alone"
        )
    return words


def _of_order(
    groups: Sequence[Group], ranked: Sequence[Group], figures: Sequence[Figures], by: str
) -> list[str]:
    words = []
    field = "validation_loss" if by == VALIDATION else "training_loss"
    for group in groups:
        lacking = sum(not isfinite(getattr(figures[at], field)) for at in group.members)
        if lacking:
            name = printable(group.name, 60)
            count = format_count(len(group.members), "run")
            words.append(f"{name} has no place in the order: {lacking} of {count} has no {by}")
    read = [
        figures[at].validation_tokens if by == VALIDATION else figures[at].tokens
        for group in ranked
        for at in group.members
    ]
    known = [tokens for tokens in read if isfinite(tokens)]
    if known and min(known) < max(known) * (1 - _EQUAL):
        words.append(
            f"when their last {by} was taken they had read from {min(known):,.0f} to "
            f"{max(known):,.0f} tokens: the order is that of where they stand, not at equal tokens"
        )
    return words
