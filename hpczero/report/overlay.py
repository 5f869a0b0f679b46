"""Several runs together: their curves over each other, what differs, final figures (pure)."""

from collections.abc import Callable, Iterator, Sequence
from math import isfinite
from typing import Any

import numpy as np

from hpczero.report.charts import Axes, Series, series
from hpczero.report.contents import Block, Chapter, Figure, Section, Table, Text
from hpczero.report.learning import chart
from hpczero.report.marks import DASHES, SERIES, colour_of, dashes_of
from hpczero.runs.columns import Numbers, number
from hpczero.runs.record import Run
from hpczero.text import format_loss, format_number, printable, toml_repr

MOST = len(SERIES) * len(DASHES)  # runs that colours and dashes tell apart
_POINTS = 200
_ALWAYS_DIFFER = ("name", "output")
_LONGEST = 60


def chapter(runs: Sequence[Run]) -> Chapter:
    names = labels(runs)
    blocks: list[Block] = []
    if len(runs) > MOST:
        blocks.append(Text(f"Curves of the first {MOST} of {len(runs)} runs.", warns=True))
    blocks += [one for one in _figures(runs[:MOST], names[:MOST]) if one]
    return Chapter(
        "All together",
        {"runs": str(len(runs))},
        [Section("Which one learned best?", [_final(runs), *blocks])],
    )


def differing(runs: Sequence[Run]) -> list[str]:
    """Return the settings that are not the same in all runs."""
    known = [run.settings for run in runs if run.settings]
    return [
        key
        for key in (known[0] if known else ())
        if key not in _ALWAYS_DIFFER and any(one[key] != known[0][key] for one in known)
    ]


def labels(runs: Sequence[Run]) -> list[str]:
    """Return a name for each run that says what differs; its own name where that does not tell."""
    keys = differing(runs)
    said = [
        ", ".join(f"{_short(key)} {_value(run.settings[key])}" for key in keys)
        if run.settings and keys
        else run.name
        for run in runs
    ]
    return [
        printable(one if said.count(one) == 1 and len(one) <= _LONGEST else run.name, _LONGEST)
        for one, run in zip(said, runs, strict=True)
    ]


def _short(key: str) -> str:
    """Return the last word of a key; "optimizer" for "optimizer.name"."""
    table, _, leaf = key.rpartition(".")
    return table if leaf == "name" else leaf


def _value(value: Any) -> str:
    return value if isinstance(value, str) and value else toml_repr(value)


def _figures(runs: Sequence[Run], names: Sequence[str]) -> Iterator[Figure | None]:
    points = max(60, _POINTS * 6 // max(6, len(runs)))

    def every(x: Callable[[Run], Numbers], column: str) -> list[Series]:
        return [
            series(name, x(run), run.metrics[column], points, colour_of(at), dashes_of(at))
            for at, (run, name) in enumerate(zip(runs, names, strict=True))
        ]

    def steps(run: Run) -> Numbers:
        return run.metrics["step"]

    axes = Axes("Training loss", "step", "nats per token")
    yield chart("loss", axes, every(steps, "loss"))
    axes = Axes("Validation loss", "step", "nats per token")
    yield chart("validation", axes, every(steps, "validation_loss"))
    if len({tuple(tokens(run)[:1]) for run in runs}) > 1:
        axes = Axes("Training loss over tokens", "tokens", "nats per token")
        yield chart("loss-over-tokens", axes, every(tokens, "loss"))
    axes = Axes("Training loss over time in steps", "seconds", "nats per token")
    yield chart("loss-over-time", axes, every(seconds, "loss"))
    axes = Axes("Throughput", "step", "tokens/s", from_zero=True)
    yield chart("throughput", axes, every(steps, "tokens_per_second"))


def tokens(run: Run) -> Numbers:
    """Return how many tokens a run had seen after each step whose line is there."""
    return np.cumsum(np.nan_to_num(run.metrics["tokens"]))


def seconds(run: Run) -> Numbers:
    return np.cumsum(np.nan_to_num(run.metrics["step_seconds"]))


def _final(runs: Sequence[Run]) -> Table:
    """Return the final figures, the run with the lowest validation loss first."""
    keys = differing(runs)
    rows = []
    for run in runs:
        summary = run.summary
        settings = [toml_repr(run.settings[key]) if key in run.settings else "?" for key in keys]
        losses = [number(summary.get(key)) for key in ("final_loss", "validation_loss")]
        rate = number(summary.get("tokens_per_second"))
        state = printable(str(summary.get("state", "no summary")), 40)
        cells = [
            printable(run.name, 80),
            *settings,
            state,
            f"{run.steps:,}",
            *(format_loss(one) if isfinite(one) else "-" for one in losses),
            format_number(rate) if isfinite(rate) else "-",
        ]
        order = losses[1] if isfinite(losses[1]) else float("inf")
        rows.append((order, cells))
    rows.sort(key=lambda row: row[0])
    head = ["run", *keys, "state", "steps", "loss", "validation loss", "tokens/s"]
    return Table("Final figures, the lowest validation loss first", head, [row for _, row in rows])
