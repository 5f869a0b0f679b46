"""`hpczero compare`: runs beside each other, and whether the best one is."""

import json
import shutil
import sys
import textwrap
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
from hpczero.runs.compared_words import Rows, best_in_words, differing, last_figures, name_of
from hpczero.runs.record import read_run
from hpczero.text import (
    first_few,
    format_count,
    format_duration,
    format_number,
    printable,
)

_POINTS = 8  # of a table
_MOST = 200_000  # points of a curve
_LONG = 600.0  # seconds: longer ones are printed as h:mm:ss
_WORDS_OF_AXIS = {
    "steps": "steps",
    "tokens": "tokens",
    "seconds": "seconds of steps",
    "clock": "seconds by the clock, with evaluations, saves and lost steps",
}


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
    yield from _print(*last_figures(compared))
    has_curve = any(len(course.evaluated) > 1 for course in compared.courses)
    kinds = [VALIDATION] if has_curve else [TRAINING]
    for table in tables:
        yield from _losses(compared, table, [TRAINING, VALIDATION] if all_kinds else kinds)
    yield ""
    first, *more = best_in_words(compared)
    yield first
    for sentence in more:
        yield from _wrapped(sentence, "      ")


def _what_differs(compared: Compared) -> Iterator[str]:
    head, rows = differing(compared)
    site = [difference.key for difference in compared.differences if difference.is_site]
    if len(head) == 1:
        yield "their specs say the same"
    else:
        yield "what differs in their specs"
        yield from _print(head, rows)
    if site:
        yield f"({first_few(site)}: only where or how they ran)"
    yield ""


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
            [name_of(group), *map(_cell, row)]
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


def _print(head: list[str], rows: Rows) -> Iterator[str]:
    """Yield a table, on its side if it fits the terminal only so, else in parts.

    Columns in which nothing stands are left out.
    """
    width = _columns_of_terminal()
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


def _wrapped(sentence: str, indent: str) -> list[str]:
    room = max(40, _columns_of_terminal() - len(indent))
    return [indent + line for line in textwrap.wrap(sentence, room, break_on_hyphens=False)]


def _columns_of_terminal() -> int:
    return shutil.get_terminal_size((120, 24)).columns


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
