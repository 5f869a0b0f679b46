"""`hpczero compare`: runs beside each other, and whether the best one is."""

import json
import shutil
import sys
from argparse import Namespace
from collections.abc import Iterable, Iterator, Sequence
from math import isfinite
from pathlib import Path

from hpczero import safe_files
from hpczero.commands import jobs
from hpczero.errors import InputError
from hpczero.runs.axes import AXES
from hpczero.runs.compared import TRAINING, VALIDATION, Compared, Spread, Table, compare
from hpczero.runs.compared_data import as_csv, as_json
from hpczero.runs.groups import Group, in_words
from hpczero.runs.record import read_run
from hpczero.text import (
    first_few,
    format_bytes,
    format_count,
    format_duration,
    format_number,
    printable,
)

_POINTS = 8  # of a table
_MOST = 200_000  # points of a curve
_LARGE = 1e6  # a loss above it is printed with four digits
_LONG = 600.0  # seconds: longer ones are printed as h:mm:ss
_NAME = 32  # characters of a name in a table
_VALUE = 24
_WORDS_OF_AXIS = {
    "steps": "steps",
    "tokens": "tokens",
    "seconds": "seconds of steps",
    "clock": "seconds by the clock, with evaluations, saves and lost steps",
}
# Where the interval of a margin comes from (hpczero/runs/margins.py).
_NOISE = {
    "paired seeds": "from the differences seed by seed",
    "seeds": "from the spread of the seeds (Welch)",
    "seeds of one": "if the seeds of both are spread as those of the one that has several",
    "evaluations": "from the standard errors of the two evaluations",
}

Rows = list[list[str]]


def compare_(options: Namespace) -> int:
    if not 2 <= options.points <= _MOST:
        raise InputError(f"--points {options.points}: must be from 2 to {_MOST:,}")
    if options.json and options.csv == "-":
        raise InputError("--json and --csv - both write to stdout: give --csv a file")
    paths = _paths(options.runs)
    runs = [read_run(path) for path in paths]
    states, silent = jobs.states_of(paths)
    compared = compare(runs, [progress.state for progress in states], options.each)
    axes = [options.over] if options.over else AXES
    tables = [compared.table(axis, _POINTS) for axis in axes]
    if options.csv:
        _write_csv(options.csv, as_csv(compared, options.points))
    if options.json:
        print(json.dumps(as_json(compared, tables, options.points), indent=2, allow_nan=False))
    elif options.csv != "-":
        shown = tables if options.over else _of_interest(tables)
        print("\n".join(_in_words(compared, shown, bool(options.over))))
    for words in compared.warnings:
        print(f"hpczero: WARN {words}", file=sys.stderr)
    jobs.print_silent(silent)
    return 0


def _paths(names: Sequence[str]) -> list[Path]:
    """Return the runs that are named, and those below a folder that is named."""
    paths: list[Path] = []
    unreadable: list[str] = []
    for name in names:
        path = jobs.run_named(name)
        paths += sorted(jobs.below(path, unreadable)) or [path]
    for words in unreadable:
        print(f"hpczero: not looked into: {printable(words)}", file=sys.stderr)
    seen: dict[Path, Path] = {}
    for path in paths:
        if path.resolve() in seen:
            raise InputError(f"{printable(str(path))} is named twice: leave one of them out")
        seen[path.resolve()] = path
    if len(paths) < 2:
        only = f"only {printable(str(paths[0]))}" if paths else "none"
        raise InputError(
            f"compare wants two runs or more, and there is {only}: name others, or a folder with "
            "several; hpczero runs FOLDER lists those below it"
        )
    return paths


def _write_csv(file: str, text: str) -> None:
    if file == "-":
        print(text, end="")
    else:
        safe_files.write_text(Path(file), text)


def _of_interest(tables: Sequence[Table]) -> list[Table]:
    """Return the tables over tokens and time; over steps if tokens are not known."""
    steps, tokens, seconds, _ = tables
    return [tokens if tokens.points else steps, *([seconds] if seconds.points else [])]


# ------------------------------------------------------------------------------------- in words


def _in_words(compared: Compared, tables: Iterable[Table], all_kinds: bool) -> Iterator[str]:
    """Yield what differs, the last figures, losses at equal points, and which run is the best.

    The losses are those of the evaluations if there are several; with `all_kinds` training's too.
    """
    count = format_count(len(compared.runs), "run")
    yield f"{count} in {format_count(len(compared.groups), 'group')}, by {compared.by}"
    yield ""
    yield from _what_differs(compared)
    error = "the evaluation's standard error"
    if any(group.spread for group in compared.groups):
        error = f"standard deviation of seeds, of a single run {error}"
    yield f"figures at their ends (±: {error})"
    yield from _print(*_figures(compared))
    has_curve = any(len(course.evaluated) > 1 for course in compared.courses)
    kinds = [VALIDATION] if has_curve else [TRAINING]
    for table in tables:
        yield from _losses(compared, table, [TRAINING, VALIDATION] if all_kinds else kinds)
    yield from _best(compared)


def _what_differs(compared: Compared) -> Iterator[str]:
    head = ["run", *(["seed"] if _shows_seeds(compared) else [])]
    rows = [[_name(group), group.seeds_in_words or "?"][: len(head)] for group in compared.groups]
    for difference in compared.differences:
        head.append(difference.key)
        for row, values in zip(rows, difference.values, strict=True):
            row.append(printable(in_words(values), _VALUE))
    site = [difference.key for difference in compared.differences if difference.is_site]
    if len(head) == 1:
        yield "their specs say the same"
    else:
        yield "what differs in their specs"
        yield from _print(head, rows)
    if site:
        yield f"({first_few(site)}: only where or how they ran)"
    yield ""


def _shows_seeds(compared: Compared) -> bool:
    return len({group.seeds for group in compared.groups}) > 1 or any(
        group.spread for group in compared.groups
    )


def _figures(compared: Compared) -> tuple[list[str], Rows]:
    head = ["run", "state", "validation", "range", "best", "training", "step", "tokens"]
    head += ["tokens/s", "time", "ranks", "memory"]
    return head, [_figures_of(compared, group) for group in compared.groups]


def _figures_of(compared: Compared, group: Group) -> list[str]:
    """Return the cells of a group's last figures; of sizes the largest."""
    of_runs = [compared.figures[at] for at in group.members]
    validation = compared.spread(group, "validation_loss")
    error = validation.deviation if group.spread else of_runs[0].standard_error
    best = compared.spread(group, "best_validation_loss")
    at = {one.best_validation_step for one in of_runs}
    where = f" @{at.pop():,.0f}" if len(at) == 1 and isfinite(best.mean) else ""
    most = {
        name: max((value for one in of_runs if isfinite(value := getattr(one, name))), default=None)
        for name in ("step", "tokens", "seconds", "ranks", "held")
    }
    held, seconds = most["held"], most["seconds"]
    step = most["step"]
    return [
        _name(group),
        ", ".join(dict.fromkeys(compared.states[at] for at in group.members)),
        _loss(validation.mean) + (f" ± {error:.4f}" if isfinite(error) else ""),
        f"{_loss(validation.low)}–{_loss(validation.high)}" if group.spread else "",
        _loss(best.mean) + where,
        _loss(compared.spread(group, "training_loss").mean),
        "?" if step is None else f"{step:,.0f}",
        format_number(most["tokens"]),
        format_number(_or_none(compared.spread(group, "tokens_per_second").mean)),
        "?" if seconds is None else format_duration(seconds),
        "?" if most["ranks"] is None else f"{most['ranks']:,.0f}",
        "?" if held is None or not 0 <= held < 1e18 else format_bytes(int(held)),
    ]


def _losses(compared: Compared, table: Table, kinds: Sequence[str]) -> Iterator[str]:
    axis = _WORDS_OF_AXIS[table.axis]
    if not table.points:
        yield f"\nno losses over {axis}: no run has them"
    for kind in kinds if table.points else ():
        how = f"mean of the last {_span(table)} before each point"
        if kind == VALIDATION:
            how = "on the line from one evaluation to the next"
        yield f"\n{kind} over {axis} ({how})"
        of_groups = table.validation if kind == VALIDATION else table.training
        rows = [
            [_name(group), *map(_cell, row)]
            for group, row in zip(compared.groups, of_groups, strict=True)
        ]
        yield from _print(["run", *(_place(table, point) for point in table.points)], rows)


def _span(table: Table) -> str:
    if table.axis == "steps":
        return format_count(int(table.span), "step")
    return f"{format_number(table.span)} {'tokens' if table.axis == 'tokens' else 's'}"


def _place(table: Table, point: float) -> str:
    if table.axis == "steps":
        return f"{point:,.0f}"
    is_long = table.axis != "tokens" and table.points[-1] >= _LONG
    return format_duration(point) if is_long else format_number(point)


def _cell(spread: Spread) -> str:
    if not isfinite(spread.mean):
        return ""
    return f"{spread.mean:.3f}" + (
        f" ± {spread.deviation:.3f}" if isfinite(spread.deviation) else ""
    )


def _best(compared: Compared) -> Iterator[str]:
    best = compared.best
    yield ""
    if best is None:
        yield "best: cannot be told; at least two must have comparable losses"
        return
    group, other = compared.groups[best.group], compared.groups[best.next]
    margin = best.margin
    yield f"best: {_name(group)}, by {_loss(margin.margin)} of {best.by} over {_name(other)}"
    verdict = {
        True: "more than the noise",
        False: "not shown to be more than the noise",
        None: "whether that is more than the noise cannot be told",
    }[margin.is_more_than_noise]
    if margin.is_more_than_noise is None:
        lacking = (
            "the evaluations have no standard errors"
            if best.by == VALIDATION
            else "they are of one step"
        )
        yield f"      {verdict}: {lacking}"
    else:
        low, high = margin.margin - margin.half, margin.margin + margin.half
        yield f"      {verdict}: its 95 % interval is {low:.4f} to {high:.4f},"
        yield f"      {_NOISE[margin.source]}"
    if margin.source == "evaluations":
        yield from _of_one_seed(best.same_windows)


def _of_one_seed(same_windows: bool) -> Iterator[str]:
    if same_windows:
        yield "      (both read the same windows of the text: the interval is too wide)"
    yield "      what other seeds would change cannot be told: run both with the same two or more"


def _name(group: Group) -> str:
    return printable(group.name, _NAME)


def _or_none(figure: float) -> float | None:
    return figure if isfinite(figure) else None


def _loss(loss: float) -> str:
    return format(loss, ".4f" if abs(loss) < _LARGE else ".4g") if isfinite(loss) else "?"


def _print(head: list[str], rows: Rows) -> Iterator[str]:
    """Yield a table, on its side if it fits the terminal only so, else in parts.

    Columns in which nothing stands are left out.
    """
    width = shutil.get_terminal_size((120, 24)).columns
    columns = [[name, *(row[at] for row in rows)] for at, name in enumerate(head)]
    columns = [column for column in columns if any(column[1:])]
    on_its_side = [list(line) for line in zip(*columns, strict=True)]
    if len(_parts(_widths(columns), width)) > 1 == len(_parts(_widths(on_its_side), width)):
        columns = on_its_side
    widths = _widths(columns)
    for places in _parts(widths, width):
        for cells in zip(*(columns[at] for at in places), strict=True):
            fit = (f"{cell:<{widths[at]}}" for at, cell in zip(places, cells, strict=True))
            yield "  " + "  ".join(fit).rstrip()


def _widths(columns: Rows) -> list[int]:
    return [max(map(len, column)) for column in columns]


def _parts(widths: Sequence[int], width: int) -> list[list[int]]:
    """Return the columns of each part; two blanks stand before each column."""
    parts: list[list[int]] = []
    for at in range(1, len(widths)):
        columns = [*parts[-1], at] if parts else []
        if columns and sum(widths[one] + 2 for one in columns) <= width:
            parts[-1] = columns
        else:
            parts.append([0, at])
    return parts
