"""The table [sweep] of a spec: the runs that one spec describes, and their names (pure).

A sweep has a run for each combination of

    list     tables of settings, one after the other
    grid     key -> its values, each with each
    random   key -> a span or values; `runs` draws of all these keys
    seeds    values of `seed`

A draw is a hash of the spec's seed, its number and the key: more runs, or more keys, leave the
others as they are, but for draws that would repeat an earlier one. A run's name holds its own
settings alone, so that it stays when the sweep grows. Reading the table is `sweep_table`'s part,
checking the runs that of `load`.
"""

import hashlib
import json
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import product
from typing import Any

from hpczero.spec.keys import Origin, flat, keys
from hpczero.spec.schema import Spec

MOST = 1000  # runs of a sweep: as many tasks as an array has at most sites
_LONGEST = 100  # characters of a run's name (spec.table.NAME)
_PLAIN = re.compile(r"[A-Za-z0-9._]{1,24}")
_DIGITS = 4  # significant ones of a fraction that is drawn
_ATTEMPTS = 100  # draws that are tried for a run that differs from those before it
_OF_A_PLACE = ("name", "output")  # keys that differ between any two runs


@dataclass(frozen=True)
class Setting:
    """A key of a run, and the place in the sweep that its value came from."""

    key: str
    value: Any
    source: Origin


@dataclass(frozen=True)
class Entry:
    """A table of `list`: its settings, and the label that stands for them in a run's name."""

    settings: tuple[Setting, ...]
    label: str = ""


@dataclass(frozen=True)
class Span:
    """The numbers that a key of `random` may have."""

    low: float
    high: float
    log: bool = False
    whole: bool = False

    def at(self, fraction: float) -> float:
        """Return the number at a fraction of the span, from 0 to below 1."""
        if self.whole and not self.log:
            return int(self.low) + int(fraction * (int(self.high) - int(self.low) + 1))
        low, high = (math.log(self.low), math.log(self.high)) if self.log else (self.low, self.high)
        number = low + fraction * (high - low)
        number = math.exp(number) if self.log else number
        number = round(number) if self.whole else float(f"{number:.{_DIGITS}g}")
        return min(max(number, self.low), self.high)


@dataclass(frozen=True)
class Drawn:
    """A key of `random`."""

    among: Span | tuple[Any, ...]
    source: Origin

    def at(self, fraction: float) -> Any:
        if isinstance(self.among, Span):
            return self.among.at(fraction)
        return self.among[int(fraction * len(self.among))]


@dataclass(frozen=True)
class SweepRun:
    number: int  # from 0
    name: str
    settings: tuple[Setting, ...]

    @property
    def differs(self) -> dict[str, Any]:
        """The settings that this run has, and others have not."""
        return {setting.key: setting.value for setting in self.settings}


@dataclass(frozen=True)
class Sweep:
    """The table as it was read; a part that is not there has no influence."""

    entries: tuple[Entry, ...] = ()
    grid: Mapping[str, tuple[Setting, ...]] = field(default_factory=dict)
    random: Mapping[str, Drawn] = field(default_factory=dict)
    draws: int = 0
    seeds: tuple[Setting, ...] = ()
    at_once: int = 0  # runs of an array that are started at the same time; 0: any number

    @property
    def keys(self) -> list[str]:
        """Each key as often as a part of the sweep sets it."""
        of_list = {setting.key for entry in self.entries for setting in entry.settings}
        return [*of_list, *self.grid, *self.random, *(["seed"] if self.seeds else [])]

    @property
    def sizes(self) -> dict[str, int]:
        """Part -> the number of its choices; their product is the number of runs."""
        sizes = {"list": len(self.entries), **{key: len(of) for key, of in self.grid.items()}}
        sizes |= {"random": self.draws if self.random else 0, "seeds": len(self.seeds)}
        return {part: size for part, size in sizes.items() if size}

    def runs(self, name: str, seed: int) -> list[SweepRun]:
        """Return the runs, the seeds of one choice side by side.

        `name`, `seed`: of the spec. `sizes` tells beforehand how many there would be.
        """
        parts: list[Sequence[tuple[str, tuple[Setting, ...]]]] = []
        if self.entries:
            parts.append([(entry.label, entry.settings) for entry in self.entries])
        parts += [[("", (setting,)) for setting in of] for of in self.grid.values()]
        if self.random:
            parts.append([("", draw) for draw in self._draws(seed)])
        if self.seeds:
            parts.append([("", (setting,)) for setting in self.seeds])
        runs = []
        for number, choice in enumerate(product(*parts)):
            settings = tuple(setting for _, some in choice for setting in some)
            labelled = {setting.key for label, some in choice if label for setting in some}
            named = [setting for setting in settings if setting.key not in labelled]
            label = "".join(label for label, _ in choice)
            runs.append(SweepRun(number, run_name(name, label, named), settings))
        return runs

    def _draws(self, seed: int) -> Iterator[tuple[Setting, ...]]:
        """Yield the draws; one that repeats an earlier one is drawn anew, as far as there are
        others.
        """
        seen = set()
        for number in range(self.draws):
            for attempt in range(_ATTEMPTS):
                draw = tuple(
                    Setting(key, drawn.at(_fraction(seed, number, attempt, key)), drawn.source)
                    for key, drawn in self.random.items()
                )
                values = frozenset((setting.key, _canonical(setting.value)) for setting in draw)
                if values not in seen:
                    break
            seen.add(values)
            yield draw


def _fraction(*address: object) -> float:
    """Return a number from 0 to below 1 that depends on nothing but the address."""
    digest = hashlib.blake2b(json.dumps(address).encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "big") >> 11) / (1 << 53)


def _canonical(value: Any) -> str:
    """Return a text that equal values of a key share, 1 and 1.0 among them."""
    if isinstance(value, float) and value.is_integer() and abs(value) < 1 << 53:
        value = int(value)
    try:
        return json.dumps(value, sort_keys=True, default=str)
    except ValueError:  # more digits than Python writes: no key takes such a number
        return "a number of too many digits"


# ------------------------------------------------------------------------------- names of runs


def run_name(name: str, label: str, settings: Sequence[Setting]) -> str:
    """Return the name of a sweep's run: what it sets, in the order of the schema, the seed last."""
    order = {key: place for place, key in enumerate(keys())} | {"seed": len(keys())}
    sorted_settings = sorted(settings, key=lambda setting: order[setting.key])
    parts = [label] if label else []
    parts += [_part(setting.key, setting.value) for setting in sorted_settings]
    full = "-".join([name, *parts])
    if len(full) <= _LONGEST:
        return full
    return f"{full[: _LONGEST - 9]}-{_hash(full, 8)}"


def _part(key: str, value: Any) -> str:
    """Return "lr0.001" or "precision_bf16"."""
    short = _short(key)
    word = value_word(value)
    return f"{short}{word}" if short[-1].isalpha() and word[0].isdigit() else f"{short}_{word}"


@cache
def _leaf_owners() -> dict[str, str]:
    """Return leaf -> the first key of the schema that ends in it."""
    owners: dict[str, str] = {}
    for key in keys().values():
        owners.setdefault(key.leaf, key.name)
    return owners


def _short(key: str) -> str:
    """Return the last word of a key, or all of it where another key has that word for its own."""
    leaf = key.rpartition(".")[2]
    return leaf if _leaf_owners()[leaf] == key else key


def value_word(value: Any) -> str:
    """Return a value as a word of a file's name; another value of the key has another one."""
    plain = _plain_word(value)
    if isinstance(value, list | tuple) and len(value) > 1:  # [3] is another value than 3
        words = ["" if isinstance(item, str) else _plain_word(item) for item in value]
        joined = "_".join(words)
        plain = joined if all(words) and _PLAIN.fullmatch(joined) else ""
    if plain:
        return plain
    text = value if isinstance(value, str) else _canonical(value)
    shown = re.sub(r"[^A-Za-z0-9.]+", "_", os.path.basename(text.rstrip("/")))[:16].strip("_.")
    return "_".join(filter(None, [shown, _hash(_canonical(value), 6)]))


def _plain_word(value: Any) -> str:
    """Return the word that says the whole value; "" if there is none."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        rounded = f"{value:.12g}"
        return (rounded if float(rounded) == value else repr(value)).replace("+", "")
    if isinstance(value, int):
        return str(value) if abs(value) < 10**20 else ""
    return value if isinstance(value, str) and _PLAIN.fullmatch(value) else ""


def _hash(text: str, digits: int) -> str:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass")).hexdigest()[:digits]


# ------------------------------------------------------------------------- what differs in runs


def differing(specs: Mapping[str, Spec]) -> dict[str, dict[str, Any]]:
    """Return run -> key -> value, of the keys in which these runs differ.

    The keys stand in the order of the schema; names and folders do not count.
    """
    values = {run: flat(spec) for run, spec in specs.items()}
    several = [
        key
        for key in keys()
        if key not in _OF_A_PLACE and len({repr(of_run[key]) for of_run in values.values()}) > 1
    ]
    return {run: {key: of_run[key] for key in several} for run, of_run in values.items()}
