"""Plans for several numbers of nodes, and two plans side by side (pure)."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from hpczero.errors import InputError
from hpczero.planner.bill import Bill
from hpczero.planner.layout_space import round_numbers
from hpczero.planner.room import Room
from hpczero.planner.search import Found, Planned
from hpczero.text import printable

_MOST_NODES = 1_000_000
_LEAST = 1e-6  # of all: differences that are told


def node_counts(text: str, most: int) -> list[int]:
    """Return the numbers in "8" or "1-64", of many the round ones; `most` that there are or 0."""
    words = text.split("-")
    if len(words) > 2 or not all(word.isdecimal() and len(word) < 8 for word in words):
        raise InputError(f"--nodes {printable(text, 40)}: a number of nodes as in 8, or 1-64")
    first, last = int(words[0]), int(words[-1])
    if not 1 <= first <= last <= _MOST_NODES:
        raise InputError(
            f"--nodes {printable(text, 40)}: from 1 to {_MOST_NODES:,}, the smaller number first"
        )
    if most and last > most:
        raise InputError(f"--nodes {printable(text, 40)}: the cluster has {most:,} nodes")
    return [count for count in round_numbers(last) if count >= first] if last > first else [last]


def pareto(bests: Iterable[tuple[Planned, Bill]]) -> list[tuple[Planned, Bill]]:
    """Return those that no other beats both in time and in node-hours, the fastest first."""
    front: list[tuple[Planned, Bill]] = []
    for planned, cost in sorted(bests, key=lambda each: (each[1].seconds, each[1].node_hours)):
        if not front or cost.node_hours < front[-1][1].node_hours:
            front.append((planned, cost))
    return front


@dataclass(frozen=True)
class Difference:
    """What a layout loses against the best one."""

    planned: Planned
    best: Planned
    seconds: Mapping[str, float]  # more than the best has, by cause; the largest first
    memory: Mapping[str, int]  # bytes more of the fullest rank, by kind
    stage: int  # of the pipeline: where it is the fullest
    exceeds: str  # the account that is too small, and by how much; "" if it may fit


def why(planned: Planned, found: Found, room: Room) -> Difference:
    """Return what parts a layout from the best one that fits, which there is."""
    best = found.first
    account = planned.fit.first.name
    place, own = room.fullest(planned.spec, account)
    _, other = room.fullest(best.spec, account)
    return Difference(
        planned,
        best,
        _more(planned.time.causes, best.time.causes),
        {kind: int(size) for kind, size in _more(own, other).items()},
        place.stage,
        _too_small(planned),
    )


def _more(own: Mapping[str, float], other: Mapping[str, float]) -> dict[str, float]:
    more = {key: own.get(key, 0) - other.get(key, 0) for key in {**own, **other}}
    ranked = sorted(more.items(), key=lambda item: -abs(item[1]))
    least = _LEAST * sum(other.values())
    return {key: value for key, value in ranked if abs(value) > least}


def _too_small(planned: Planned) -> str:
    for account in planned.fit.accounts:
        if account.exceeds:
            over = (account.size - account.available) / 1e9
            where = {"device": "on a device", "host": "in a node's memory"}
            place = where.get(account.name, f"on a node ({account.name})")
            return f"{over:.1f} GB more than there are {place}"
    return ""
