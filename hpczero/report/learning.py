"""Figures of how well a run learned: loss, validation, gradient norm, learning rate (pure)."""

from collections.abc import Iterator, Sequence

import numpy as np

from hpczero.report.charts import Axes, Series, lines, series
from hpczero.report.contents import Figure, Section, Text, points_of
from hpczero.report.marks import colour_of, dashes_of
from hpczero.runs.record import Run
from hpczero.text import format_count, format_number

POINTS = 300  # of a line
_SOURCES = "validation_losses"


def section(run: Run, points: int = POINTS) -> Section:
    figures = [one for one in _figures(run, points) if one]
    notes = list(_notes(run))
    if not figures:
        notes.append(Text("The run did not finish a step, so there is nothing to draw."))
    return Section("Did it learn?", [*notes, *figures])


def restarts(run: Run) -> list[tuple[float, str]]:
    """Return the step after which each job but the first went on."""
    return [
        (float(job.first), f"job {job.number} goes on after step {job.first:,}")
        for job in run.jobs[1:]
    ]


def loss(run: Run, points: int = POINTS) -> Figure | None:
    """Return the figure of training and validation loss."""
    steps, metrics = run.metrics["step"], run.metrics
    column = metrics["validation_loss"]
    every = [
        series("training", steps, metrics["loss"], points, "blue"),
        series("validation", steps, column, points, "vermillion", "6 3"),
    ]
    return chart("loss", Axes("Loss", "step", "nats per token", marked=restarts(run)), every)


def chart(name: str, axes: Axes, every: Sequence[Series], more: str = "") -> Figure | None:
    """Return a figure with its caption and points; None if there is no point."""
    drawing = lines(axes, every)
    if drawing is None:
        return None
    ends = [f"{one.name} {axes.words(one.last)}" for one in every[:4] if len(one.curve)]
    words = [f"At the end: {', '.join(ends)}."] if ends else []
    if any(one.curve.is_reduced for one in every):
        words.append("Bands reach from the lowest to the highest value, lines show means.")
    if axes.marked:
        words.append("Dashed uprights: restarts.")
    words.append(more)
    caption = " ".join(word for word in words if word)
    return Figure(name, drawing, caption, points_of(every, axes.x))


def _figures(run: Run, points: int) -> Iterator[Figure | None]:
    steps, metrics = run.metrics["step"], run.metrics
    yield loss(run, points)
    yield _sources(run, points)
    norm = series("gradient norm", steps, metrics["grad_norm"], points, "blue")
    axes = Axes("Gradient norm", "step", "norm", may_be_by_factors=True, marked=restarts(run))
    limit = run.settings.get("train.grad_clip")
    clipped = f"It is clipped at {limit:g}." if limit else ""
    yield chart("gradient-norm", axes, [norm], clipped)
    rate = series("learning rate", steps, metrics["lr"], points, "green")
    axes = Axes("Learning rate", "step", "learning rate", from_zero=True, marked=restarts(run))
    yield chart("learning-rate", axes, [rate])


def _sources(run: Run, points: int) -> Figure | None:
    """Return the validation loss of each source of a mixture."""
    inside = run.metrics.inside(_SOURCES)
    every = [
        series(name, run.metrics["step"], column, points, colour_of(at), dashes_of(at))
        for at, (name, column) in enumerate(inside.items())
    ]
    axes = Axes("Validation loss by source", "step", "nats per token")
    return chart("validation-by-source", axes, every) if every else None


def _notes(run: Run) -> Iterator[Text]:
    column = run.metrics["loss"]
    unknown = int(np.count_nonzero(~np.isfinite(column)))
    if unknown:
        at = int(run.metrics["step"][int(np.flatnonzero(~np.isfinite(column))[0])])
        what = format_count(unknown, "step")
        yield Text(f"The loss of {what} is not a finite number, first at step {at:,}.", warns=True)
    entropy = run.summary.get("unigram_entropy")
    if isinstance(entropy, int | float):
        words = "one who knew only how often each token comes would have a loss of"
        yield Text(f"For comparison: {words} {format_number(entropy)}.")
