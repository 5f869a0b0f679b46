"""Values, names, sizes and durations as text: for messages, log lines and schedulers.

What a message shows of a value is one line, has no control characters, and is cut where it is long.
"""

import datetime
import re
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from itertools import groupby
from typing import Any

from hpczero.errors import escaped

_LONGEST = 60
_MOST_ITEMS = 8
_FEW = 5
_NEAREST = 3  # names that a pattern may have meant
_AGES = (("d", 86400), ("h", 3600), ("min", 60), ("s", 1))


def printable(text: str, longest: int = 500) -> str:
    """Return the text as one line of a message: cut and `escaped`."""
    safe = escaped(text if len(text) <= longest else text[: longest - 1] + "…")
    return safe if len(safe) <= longest else safe[: longest - 1] + "…"


def toml_repr(value: Any) -> str:
    """Return a value of a spec, much as TOML writes it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return '"' + printable(value.replace("\\", "\\\\").replace('"', '\\"'), _LONGEST) + '"'
    if isinstance(value, int) and abs(value) >= 10**18:
        return f"a whole number of {value.bit_length()} bits"
    if isinstance(value, dict):
        return "a table"
    if isinstance(value, list | tuple):
        if any(isinstance(item, dict) for item in value):
            return "an array of tables"
        items = [_item_repr(item) for item in value[:_MOST_ITEMS]]
        return "[" + ", ".join(items + ["…"] * (len(value) > _MOST_ITEMS)) + "]"
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    return printable(repr(value), _LONGEST)


def _item_repr(item: Any) -> str:
    """Return an entry of a list; a list in it is shown if it has a few numbers."""
    if not isinstance(item, list | tuple):
        return toml_repr(item)
    few = len(item) <= _FEW and all(isinstance(one, int | float) for one in item)
    return toml_repr(item) if few else "[…]"


def join_words(words: list[str], last: str = "and") -> str:
    """Return "a, b and c"."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} {last} {words[-1]}"


def first_few(words: Sequence[str], between: str = ", ") -> str:
    """Return "a, b, c, d, e and 3 more"."""
    more = f" and {len(words) - _FEW:,} more" if len(words) > _FEW else ""
    return between.join(words[:_FEW]) + more


def matches_nothing(pattern: str, names: Sequence[str]) -> str:
    """Return "'layer.*' matches no parameter; the nearest names are …"."""
    nearest = get_close_matches(pattern.replace("*", ""), names, _NEAREST, 0.0)
    return f"{pattern!r} matches no parameter; the nearest names are {', '.join(nearest)}"


def shorten(words: Sequence[str], most: int) -> list[str]:
    """Return at most so many words: of more the first ones, "…", and the last one."""
    return list(words) if len(words) <= most else [*words[: most - 2], "…", words[-1]]


def consecutive_runs(numbers: Sequence[int]) -> Iterator[list[int]]:
    for _, run in groupby(enumerate(numbers), key=lambda item: item[1] - item[0]):
        yield [number for _, number in run]


def format_span(first: int, last: int) -> str:
    """Return "3" or "3-8"."""
    return str(first) if first == last else f"{first}-{last}"


def format_count(count: int, what: str) -> str:
    """Return "1 rank" or "2,000 ranks"."""
    return f"{count:,} {what}" if count == 1 else f"{count:,} {what}s"


def format_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return lines of cells, each column as wide as its widest cell."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lines = []
    for row in (head, *rows):
        cells = (f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True))
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def format_bytes(size: int) -> str:
    """Return a number of bytes with three significant digits, as in "4.57 GB"."""
    if size < 1000:
        return f"{size} B"
    units = iter(("kB", "MB", "GB", "TB", "PB", "EB"))
    amount = float(size)
    unit = ""
    while amount >= 999.5:
        amount /= 1000
        unit = next(units, "000 EB")
    return f"{_three_digits(amount)} {unit}"


def format_memory(size: int) -> str:
    """Return a number of bytes in GB or MB, with one digit after the point."""
    return f"{size / 1e9:.1f} GB" if size >= 10**9 else f"{size / 1e6:.1f} MB"


def format_binary(size: int) -> str:
    """Return a number of bytes in GiB or MiB, with one digit after the point."""
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"


def format_energy(joules: float) -> str:
    """Return "400 J (0.000111 kWh)"."""
    return f"{joules:,.4g} J ({joules / 3.6e6:,.3g} kWh)"


def log_line(event: str, values: Mapping[str, object]) -> str:
    """Return a line of a log: time in UTC, event, key=value for each value."""
    stamp = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return " ".join([stamp, event, *(f"{key}={log_value(item)}" for key, item in values.items())])


def log_value(item: object) -> str:
    """Return a value of a log line: escaped, and quoted where it has spaces, quotes or "="."""
    if isinstance(item, bool) or item is None:
        return str(item).lower()
    if isinstance(item, float):
        return f"{item:.5g}"
    if isinstance(item, Mapping):
        item = ",".join(f"{key}:{_entry(entry)}" for key, entry in item.items())
    elif isinstance(item, (list, tuple)):
        item = ",".join(map(str, item))
    text = escaped(str(item).replace("\\", "\\\\"))
    if text and not any(character in text for character in ' "='):
        return text
    return '"' + text.replace('"', '\\"') + '"'


def _entry(value: object) -> str:
    return f"{value:.5g}" if isinstance(value, float) else str(value)


def format_loss(figure: float | None) -> str:
    """Return four decimals, of a loss of a million or more four digits."""
    return "?" if figure is None else format(figure, ".4g" if abs(figure) >= 1e6 else ".4f")


def format_number(figure: float | None) -> str:
    """Return three significant digits: 0.0123, 4.57, 18.2k, 1.20M; small ones as 3.00e-04."""
    if figure is None:
        return "?"
    size = abs(figure)
    if size != size or size == float("inf"):
        return str(figure)
    if 0 < size < 1e-2:
        return f"{figure:.2e}"
    for limit, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if size >= limit * 0.9995:
            return _three_digits(figure / limit) + unit
    return _three_digits(figure)


def _three_digits(figure: float) -> str:
    size = abs(figure)
    digits = 4 - sum(size >= limit for limit in (0.09995, 0.9995, 9.995, 99.95)) if size else 3
    return f"{figure:.{digits}f}"


def format_duration(seconds: float) -> str:
    """Return h:mm:ss."""
    total = round(seconds)
    return f"{total // 3600}:{total // 60 % 60:02d}:{total % 60:02d}"


def format_age(seconds: float | None) -> str:
    """Return the largest unit alone, rounded down: "2 d", "5 h", "12 min", "40 s"."""
    if seconds is None:
        return "?"
    unit, length = next((one for one in _AGES if seconds >= one[1]), _AGES[-1])
    return f"{seconds // length:.0f} {unit}"


# ------------------------------------------- durations as specs write them and schedulers read them

_SECONDS = {"d": 86400, "h": 3600, "m": 60, "s": 1}


def parse_duration(text: str) -> int:
    """Return the seconds in "1h30m", "12:00:00" or "1-12:00:00" (spec.table.WALLTIME)."""
    if ":" not in text:
        parts = re.findall(r"(\d+)([dhms])", text)
        return sum(int(count) * _SECONDS[unit] for count, unit in parts)
    days, _, clock = text.rpartition("-")
    hours, minutes, over = map(int, clock.split(":"))
    return int(days or 0) * 86400 + hours * 3600 + minutes * 60 + over


def scheduler_duration(duration: int) -> str:
    """Return hh:mm:ss, hours past 24 included: a form that both Slurm and PBS read."""
    return f"{duration // 3600:02d}:{duration // 60 % 60:02d}:{duration % 60:02d}"
