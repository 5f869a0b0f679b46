"""A comparison of runs as data for other programs: JSON, and the curves as rows of a CSV (pure)."""

import csv
import io
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from math import isfinite
from typing import Any

import numpy as np

from hpczero.runs.axes import AXES, Course
from hpczero.runs.columns import Numbers
from hpczero.runs.compared import Compared, Spread, Table
from hpczero.runs.curves import curve
from hpczero.text import printable

_HEAD = ("run", "group", "seed", "figure", *AXES, "loss", "low", "high", "standard_error")
_FORMULAS = tuple("=+-@")  # a spreadsheet computes what begins so


def as_json(compared: Compared, tables: Sequence[Table], points: int) -> dict[str, Any]:
    """Return everything; what is not known is null."""
    best = compared.best
    return _known(
        {
            "runs": [_run(compared, at, points) for at in range(len(compared.runs))],
            "groups": [
                {
                    "name": group.name,
                    "runs": [compared.names[at] for at in group.members],
                    "seeds": list(group.seeds),
                    **{name: asdict(compared.spread(group, name)) for name in _spread_figures()},
                }
                for group in compared.groups
            ],
            "order": compared.by,
            "differences": [
                {"key": one.key, "site": one.is_site, "values": [list(v) for v in one.values]}
                for one in compared.differences
            ],
            "tables": {table.axis: _table(table) for table in tables},
            "best": best
            and {
                "group": compared.groups[best.group].name,
                "next": compared.groups[best.next].name,
                "by": best.by,
                "margin": best.margin.margin,
                "half_interval": best.margin.half,
                "noise": best.margin.source,
                "more_than_noise": best.margin.is_more_than_noise,
                "same_windows": best.same_windows,
            },
            "warnings": list(compared.warnings),
        }
    )


def as_csv(compared: Compared, points: int) -> str:
    """Return a row a point: the training losses, and each evaluation."""
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(_HEAD)
    for group in compared.groups:
        for at in group.members:
            seed = compared.runs[at].settings.get("seed", "")
            names = [_cell(compared.names[at]), _cell(group.name), seed]
            for figure, numbers in _curves(compared.courses[at], points):
                cells = (repr(float(one)) if isfinite(one) else "" for one in numbers)
                rows.writerow([*names, figure, *cells])
    return text.getvalue()


def _curves(course: Course, points: int) -> Iterator[tuple[str, list[float]]]:
    """Yield the kind of each point, and its numbers in the order of `_HEAD`."""
    steps = course.of_axis["steps"]
    training = curve(steps, course.loss, points)
    places = [_at(training.x, steps, course.of_axis[axis]) for axis in AXES]
    columns = [*places, training.mean, training.low, training.high]
    for row in zip(*columns, strict=True):
        yield "training", [*row, np.nan]
    for line in course.evaluated:
        loss, error = course.validation[line], course.standard_error[line]
        where = [course.of_axis[axis][line] for axis in AXES]
        yield "validation", [*where, loss, loss, loss, error]


def _at(x: Numbers, steps: Numbers, of_axis: Numbers) -> Numbers:
    return np.interp(x, steps, of_axis) if len(steps) else x


def _run(compared: Compared, at: int, points: int) -> dict[str, Any]:
    run = compared.runs[at]
    numbers = list(_curves(compared.courses[at], points))
    return {
        "name": compared.names[at],
        "path": str(run.path),
        "state": compared.states[at],
        "seed": run.settings.get("seed"),
        **asdict(compared.figures[at]),
        "curves": {
            figure: {
                name: [row[place] for kind, row in numbers if kind == figure]
                for place, name in enumerate(_HEAD[4:])
            }
            for figure in ("training", "validation")
        },
    }


def _spread_figures() -> tuple[str, ...]:
    return ("validation_loss", "best_validation_loss", "training_loss", "tokens_per_second")


def _table(table: Table) -> dict[str, Any]:
    def rows(of_groups: Sequence[Sequence[Spread]]) -> list[list[dict[str, float]]]:
        return [[asdict(spread) for spread in row] for row in of_groups]

    return {
        "points": list(table.points),
        "common": table.common,
        "span_of_training_loss": table.span,
        "training": rows(table.training),
        "validation": rows(table.validation),
    }


def _known(value: Any) -> Any:
    """Replace NaN and infinity, which JSON does not have, and what else it does not know."""
    if isinstance(value, dict):
        return {str(name): _known(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_known(item) for item in value]
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return float(value) if isfinite(value) else None
    return str(value)


def _cell(name: str) -> str:
    safe = printable(name)
    return f"'{safe}" if safe.startswith(_FORMULAS) else safe
