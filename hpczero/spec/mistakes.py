"""What is wrong with a spec, in words: one line a mistake, in the order in which they stand in the files."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hpczero.spec.keys import keys, nearest, tables
from hpczero.text import listed, printable, shown

_MOST_SHOWN = 20  # mistakes in one message


@dataclass(frozen=True)
class Source:
    """Where a value came from. `text` says it to people: "spec.toml:12", "--set train.steps=5", "default"."""

    file: str
    line: int | None
    text: str


@dataclass(frozen=True)
class Mistake:
    source: Source
    describe: Callable[[], str]  # called for those that are shown: a file of nonsense has thousands


def message(path: str, files: list[str], mistakes: list[Mistake]) -> str:
    """`files`: the order in which they are reported (the command line, which has no file, comes last)."""
    order = {file: place for place, file in enumerate(dict.fromkeys(files)) if file}
    mistakes = sorted(mistakes, key=lambda mistake: (order.get(mistake.source.file, len(order)), mistake.source.line or 0))
    lines = [f"{mistake.source.text}: {mistake.describe()}" for mistake in mistakes[:_MOST_SHOWN]]
    if len(mistakes) == 1:
        return lines[0]
    if len(mistakes) > _MOST_SHOWN:
        lines.append(f"... and {len(mistakes) - _MOST_SHOWN} more")
    return "\n  ".join([f"{len(mistakes)} mistakes in {printable(path)}:", *lines])


def not_allowed(name: str, value: Any) -> str:
    return f"{name} = {shown(value)}: must be {keys()[name].allowed}"


def unknown(table: str, leaf: str, value: Any) -> str:
    if not table and leaf in tables():
        how = f"once, as [{leaf}], not [[{leaf}]]" if isinstance(value, list) else f"as [{leaf}], with its keys below"
        return f"{leaf} = {shown(value)}: {leaf} is a table: write it {how}"
    name = printable(f"{table}.{leaf}" if table else leaf, 100)
    others = [known for known in tables() if known]
    if not table and isinstance(value, dict):
        close = nearest(leaf, others)
        return f"[{name}]: unknown table; " + (f"did you mean [{close}]?" if close else f"the tables are {listed(others)}")
    close = nearest(f"{table}.{leaf}" if table else leaf, [*keys(), "extends"])
    if close:
        return f"{name}: unknown key; did you mean {close}{_place(close, table)}?"
    here = f"the keys of [{table}] are" if table else "the keys above all tables are extends,"
    return f"{name}: unknown key; {here} {listed(list(tables()[table]))}"


def no_such_key(name: str) -> str:
    if name in tables():
        return f"{name} is a table; its keys are {listed([key.name for key in tables()[name].values()])}"
    close = nearest(name, keys())
    return f"{printable(name, 100)} is no key of the spec; " + (f"did you mean {close}?" if close else "hpczero spec prints them all")


def _place(name: str, table: str) -> str:
    there = name.rpartition(".")[0]
    return "" if there == table else f" (under [{there}])" if there else " (above all tables)"
