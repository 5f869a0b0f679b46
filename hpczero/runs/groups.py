"""Runs that differ by their seed alone as groups, and the settings that groups differ in (pure)."""

import os
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from hpczero.runs.record import Run
from hpczero.spec.keys import keys
from hpczero.text import consecutive_runs, format_span, toml_repr

_NOT_COMPARED = ("name", "output", "seed")  # a folder's name and place; the seed has its own place
_END = re.compile(r"[-_. ]+(seeds?|s)?[-_. =]*$")  # of what the names of a group have in common


@dataclass(frozen=True)
class Group:
    """Runs by their places among those that are compared, in the order of their seeds."""

    name: str
    members: tuple[int, ...]
    seeds: tuple[int, ...]  # () if not known

    @property
    def spread(self) -> bool:
        return len(self.members) > 1

    @property
    def seeds_in_words(self) -> str:
        """Return "1-3, 7"."""
        return ", ".join(format_span(s[0], s[-1]) for s in consecutive_runs(self.seeds))


@dataclass(frozen=True)
class Difference:
    """A key with the values that each group has, mostly one; none where the spec is not known.

    `is_site`: it only says where and how a run ran, and makes no other group.
    """

    key: str
    is_site: bool
    values: tuple[tuple[Any, ...], ...]


def names_of(runs: Sequence[Run]) -> list[str]:
    """Return the names of the runs' folders, with the folders above where two are alike."""
    names = [run.name for run in runs]
    if len(set(names)) == len(names):
        return names
    top = os.path.commonpath([run.path.parent for run in runs])
    return [str(run.path.relative_to(top)) for run in runs]


def groups_of(runs: Sequence[Run], each: bool = False) -> list[Group]:
    """Return the groups in the order of their first runs; `each`: every run by itself.

    A second run with the same seed repeats nothing that a seed changes: it is in another group. So
    is a run whose spec is not known.
    """
    names = names_of(runs)
    members: dict[Any, list[int]] = {}
    times_seen: Counter[Any] = Counter()
    for at, run in enumerate(runs):
        key: Any = _what_counts(run) if run.settings and not each else at
        seeded = (key, run.settings.get("seed"))
        times_seen[seeded] += 1
        members.setdefault((key, times_seen[seeded]), []).append(at)
    groups = [_group(places, runs, names) for places in members.values()]
    used = Counter(group.name for group in groups)
    return [
        Group(names[group.members[0]], group.members, group.seeds)
        if used[group.name] > 1
        else group
        for group in groups
    ]


def differences(runs: Sequence[Run], groups: Sequence[Group]) -> list[Difference]:
    """Return the keys of which not all runs have the same value; those of a site come last."""
    found = []
    for name, key in keys().items():
        if name in _NOT_COMPARED:
            continue
        values = tuple(_values(name, [runs[at] for at in group.members]) for group in groups)
        if len({repr(value) for of_group in values for value in of_group}) > 1:
            found.append(Difference(name, key.role == "site", values))
    return sorted(found, key=lambda one: one.is_site)


def _values(key: str, runs: Sequence[Run]) -> tuple[Any, ...]:
    known = [run.settings[key] for run in runs if run.settings]
    return tuple({repr(value): value for value in known}.values())


def in_words(values: Sequence[Any]) -> str:
    return ", ".join(map(toml_repr, values)) if values else "?"


def _what_counts(run: Run) -> str:
    roles = keys()
    return repr(
        [
            value
            for key, value in run.settings.items()
            if key not in _NOT_COMPARED and roles[key].role != "site"
        ]
    )


def _group(places: Sequence[int], runs: Sequence[Run], names: Sequence[str]) -> Group:
    known = all(runs[at].settings for at in places)
    ordered = sorted(places, key=lambda at: runs[at].settings["seed"]) if known else places
    seeds = tuple(runs[at].settings["seed"] for at in ordered) if known else ()
    return Group(_common([names[at] for at in ordered]), tuple(ordered), seeds)


def _common(names: Sequence[str]) -> str:
    """Return what the names begin with, up to the seed: "lamb-0.02" of "lamb-0.02-1" and "-2"."""
    if len(names) == 1:
        return names[0]
    alike = takewhile(lambda letters: len(set(letters)) == 1, zip(*names, strict=False))
    begin = "".join(letters[0] for letters in alike)
    if any(name[len(begin) : len(begin) + 1].isdigit() for name in names):
        begin = begin.rstrip("0123456789")  # a number that is cut says another one
    begin = _END.sub("", begin)
    return begin if Path(begin).name else names[0]
