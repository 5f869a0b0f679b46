"""Figures of a file of JSON lines as columns: one array of numbers for each name.

A line that is half written, or no object, is left out and counted; what is no number is NaN. So is
a figure that a line lacks: not every step has a validation loss.
"""

import contextlib
import itertools
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from math import nan
from pathlib import Path
from typing import Any

import numpy as np

from hpczero import safe_files

Numbers = np.ndarray[Any, np.dtype[np.float64]]

TIME = "time"  # seconds since 1970
_BLOCK = 20_000  # lines that are taken apart at once
_MOST_COLUMNS = 500
_LONGEST = 16 << 20  # bytes of a line
_LARGEST = 1e15  # a step, or a time: larger ones are nonsense
_NUMBERS = (int, float)


@dataclass(frozen=True)
class Columns:
    """Columns of equal length, in the order of the steps, which grow from line to line."""

    of_name: Mapping[str, Numbers] = field(default_factory=dict)
    damaged: int = 0  # lines that were left out

    def __len__(self) -> int:
        return len(self.of_name.get("step", ()))

    def __contains__(self, name: str) -> bool:
        return name in self.of_name

    def __getitem__(self, name: str) -> Numbers:
        """Return a column; NaN throughout where no line has this figure."""
        column = self.of_name.get(name)
        return np.full(len(self), nan) if column is None else column

    def inside(self, table: str) -> dict[str, Numbers]:
        """Return the columns of a table in the lines, as the losses of each source."""
        begin = f"{table}/"
        return {
            name.removeprefix(begin): column
            for name, column in self.of_name.items()
            if name.startswith(begin)
        }


def lines(path: Path) -> Iterator[dict[str, Any] | None]:
    """Yield the objects of a file of JSON lines, None for a line that is none; a file may lack."""
    try:
        file = os.fdopen(safe_files.open_to_read(path), "rb")
    except OSError:
        return
    with file, contextlib.suppress(OSError):
        while line := file.readline(_LONGEST):
            try:
                value = json.loads(line)
            except (ValueError, RecursionError):
                yield None
            else:
                yield value if isinstance(value, dict) else None


def read(path: Path) -> Columns:
    """Return the columns of a file whose lines each have a step.

    A step that was computed again counts as its last line says.
    """
    parts: list[dict[str, Numbers]] = []
    names: dict[str, None] = {}
    damaged = 0
    found = lines(path)
    while block := list(itertools.islice(found, _BLOCK)):
        objects = [one for one in block if one is not None and _is_step(one.get("step"))]
        damaged += len(block) - len(objects)
        part = _columns(objects)
        names |= dict.fromkeys(part)
        parts.append(part)
    wanted = list(names)[:_MOST_COLUMNS]
    lengths = [len(part["step"]) for part in parts]
    whole = {
        name: np.concatenate(
            [
                part.get(name, np.full(length, nan))
                for part, length in zip(parts, lengths, strict=True)
            ]
        )
        for name in wanted
    }
    return Columns(_in_order(whole), damaged)


def seconds_of(moment: object) -> float:
    """Return the seconds since 1970 of a time in ISO's form; NaN for anything else."""
    if not isinstance(moment, str):
        return nan
    try:
        seconds = datetime.fromisoformat(moment).timestamp()
    except (ValueError, OverflowError):
        return nan
    return seconds if abs(seconds) < _LARGEST else nan


def number(value: object) -> float:
    """Return a number of JSON, true and false as 1 and 0; NaN for anything else."""
    if not isinstance(value, _NUMBERS):
        return nan
    try:
        return float(value)
    except OverflowError:  # JSON's whole numbers have any length
        return nan


def _is_step(value: object) -> bool:
    return type(value) is int and 0 <= value < _LARGEST


def _columns(objects: list[dict[str, Any]]) -> dict[str, Numbers]:
    times = [seconds_of(one.pop(TIME, None)) for one in objects]
    for one in objects:
        for name in [name for name, value in one.items() if type(value) is dict]:
            inner = one.pop(name)
            one |= {f"{name}/{inner_name}": value for inner_name, value in inner.items()}
    names = list(dict.fromkeys(itertools.chain(["step"], *objects)))[:_MOST_COLUMNS]
    columns = {name: _numbers(one.get(name) for one in objects) for name in names}
    known = {name: column for name, column in columns.items() if not np.isnan(column).all()}
    return {"step": columns["step"], TIME: np.array(times, dtype=np.float64), **known}


def _numbers(values: Iterable[Any]) -> Numbers:
    every = list(values)
    kinds = set(map(type, every))
    if kinds <= {float} or not every:
        return np.array(every, dtype=np.float64)
    return np.fromiter(map(number, every), np.float64, len(every))


def _in_order(columns: dict[str, Numbers]) -> dict[str, Numbers]:
    """Drop lines of steps that come again later."""
    steps = columns.get("step")
    if steps is None or not len(steps):
        return columns
    later = np.minimum.accumulate(steps[::-1])[::-1]
    kept = np.append(steps[:-1] < later[1:], True)
    if kept.all():
        return columns
    return {name: column[kept] for name, column in columns.items()}
