"""Values, names and sizes as messages show them: one line, no control characters, no longer than a reader wants."""

import datetime
from collections.abc import Sequence
from typing import Any

from hpczero.errors import escaped

_LONGEST = 60
_MOST_ITEMS = 8
_FEW = 5


def printable(text: str, longest: int = 500) -> str:
    """The text, cut and `escaped`, as one line of a message."""
    safe = escaped(text if len(text) <= longest else text[: longest - 1] + "…")
    return safe if len(safe) <= longest else safe[: longest - 1] + "…"


def shown(value: Any) -> str:
    """A value from a spec, much as TOML writes it."""
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
        items = ["[…]" if isinstance(item, list | tuple) else shown(item) for item in value[:_MOST_ITEMS]]
        return "[" + ", ".join(items + ["…"] * (len(value) > _MOST_ITEMS)) + "]"
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    return printable(repr(value), _LONGEST)


def listed(words: list[str], last: str = "and") -> str:
    """a, b and c"""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} {last} {words[-1]}"


def first_few(words: Sequence[str], between: str = ", ") -> str:
    """a, b, c, d, e and 3 more"""
    more = f" and {len(words) - _FEW:,} more" if len(words) > _FEW else ""
    return between.join(words[:_FEW]) + more


def counted(count: int, what: str) -> str:
    """ "1 rank", "2,000 ranks" """
    return f"{count:,} {what}" if count == 1 else f"{count:,} {what}s"


def in_bytes(size: int) -> str:
    """Three digits."""
    if size < 1000:
        return f"{size} B"
    amount, units = float(size), iter(("kB", "MB", "GB", "TB", "PB", "EB"))
    unit = ""
    while amount >= 999.5:
        amount, unit = amount / 1000, next(units, "000 EB")
    return f"{amount:.{max(0, 2 - (amount >= 9.995) - (amount >= 99.95))}f} {unit}"
