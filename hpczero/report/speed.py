"""Figures of how fast a run was, and where the time of its steps went (pure)."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from hpczero.report.bars import stacked_bar
from hpczero.report.charts import Axes, Layer, series, stacked
from hpczero.report.contents import Figure, Section, Table, Text
from hpczero.report.learning import POINTS, chart, restarts
from hpczero.report.marks import colour_of
from hpczero.runs.columns import Numbers
from hpczero.runs.curves import means
from hpczero.runs.record import Run
from hpczero.text import format_number

# columns of metrics.jsonl, what they are called, their colours
PARTS = (
    ("compute_seconds", "computing", "blue"),
    ("comm_seconds", "waiting for others", "orange"),
    ("data_seconds", "waiting for data", "green"),
)
OTHER = "other"
_MOST_PARTS = 9  # of a bar; the smallest are added up


def section(run: Run, points: int = POINTS) -> Section:
    figures = [one for one in _figures(run, points) if one]
    none: list[Text] = [] if figures else [Text("There is no step whose time is known.")]
    return Section("How fast was it?", [*none, *figures])


def parts_of_steps(run: Run, points: int) -> tuple[Numbers, dict[str, Numbers]]:
    """Return steps and, for each of them, the mean seconds by part; they add up to its time."""
    metrics = run.metrics
    whole = metrics["step_seconds"]
    known = np.isfinite(whole)
    rows = [np.nan_to_num(metrics[name]) for name, *_ in PARTS]
    rest = np.maximum(0.0, np.nan_to_num(whole) - sum(rows, np.zeros(len(whole))))
    columns = np.stack([*rows, rest], axis=1)[known]
    steps, mean, _ = means(metrics["step"][known], columns, points)
    names = [*(name for _, name, _ in PARTS), OTHER]
    return steps, dict(zip(names, mean.T, strict=True))


def _figures(run: Run, points: int) -> Iterator[Figure | None]:
    steps, metrics = run.metrics["step"], run.metrics
    rate = series("throughput", steps, metrics["tokens_per_second"], points, "blue")
    axes = Axes("Throughput", "step", "tokens/s", from_zero=True, marked=restarts(run))
    yield chart("throughput", axes, [rate])
    with np.errstate(invalid="ignore", divide="ignore"):
        share = 100 * metrics["compute_seconds"] / metrics["step_seconds"]
    used = series("computing", steps, share, points, "green")
    axes = Axes("Utilisation", "step", "% of a step computing", from_zero=True)
    about = "The mean of all ranks' shares of a step in which they compute."
    yield chart("utilisation", axes, [used], about)
    yield _where_steps_go(run, points)
    yield _by_cause(run.summary)


def _where_steps_go(run: Run, points: int) -> Figure | None:
    steps, parts = parts_of_steps(run, points)
    colours = {name: colour for _, name, colour in PARTS} | {OTHER: "grey"}
    layers = [Layer(name, values, colours[name]) for name, values in parts.items()]
    axes = Axes("Where a step's time goes", "step", "seconds of a step")
    drawing = stacked(axes, steps, layers)
    if drawing is None:
        return None
    whole = sum(float(values.mean()) for values in parts.values()) or 1.0
    rows = [
        [name, f"{values.mean():.4g}", f"{100 * values.mean() / whole:.1f} %"]
        for name, values in parts.items()
    ]
    table = Table("Means", ["part", "seconds of a step", "share"], rows, folded=True)
    caption = f"A step takes {format_number(whole)} s on average."
    return Figure("step-time", drawing, f"{caption} Parts add up to it.", table)


def _by_cause(summary: Mapping[str, Any]) -> Figure | None:
    """Return the mean step of the trace by cause, which `summary.json` has of traced runs."""
    trace = summary.get("trace")
    mean = trace.get("mean_step") if isinstance(trace, dict) else None
    causes = mean.get("seconds") if isinstance(mean, dict) else None
    if not isinstance(causes, dict):
        return None
    known = {str(name): float(one) for name, one in causes.items() if _is_positive(one)}
    if not known:
        return None
    largest = sorted(known.items(), key=lambda item: -item[1])
    few = dict(largest[: _MOST_PARTS - 1])
    rest = sum(seconds for _, seconds in largest[_MOST_PARTS - 1 :])
    booked = few | ({f"{len(known) - len(few)} others": rest} if rest else {})
    return stacked_bar(
        "step-by-cause",
        "A traced step, by what the ranks were doing",
        {name: (seconds, colour_of(at)) for at, (name, seconds) in enumerate(booked.items())},
        "Means over ranks and traced steps. Wait: for ranks along this axis; advance: the own work "
        "on what is sent along it.",
    )


def _is_positive(value: object) -> bool:
    return isinstance(value, int | float) and 0 < value < float("inf")
