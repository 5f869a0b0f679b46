"""Few cases that try every combination that matters of many factors (pure, deterministic)."""

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations, islice, product
from typing import Any

Case = dict[str, Any]  # factor -> value
Numbers = dict[str, int]  # factor -> the number of its value
Part = tuple[tuple[str, int], ...]  # the same of some factors, in the order of the factors
SEEDS = 16  # parts from which a case is begun, to keep the best of so many cases


def covering(
    factors: Mapping[str, Sequence[Any]],
    together: Sequence[str] = (),
    possible: Callable[[Case], bool] = lambda case: True,
) -> list[Case]:
    """Cases in which every two values of two factors come together, and every combination of the
    values of the factors `together`; greedy. A case has to be `possible`, which is also asked of
    cases that lack factors; what is in no such case is not asked for.
    """
    wanted = dict.fromkeys([*_all_parts(factors, together), *_all_pairs(factors)])
    found = []
    while wanted:
        best: list[Part] = []
        for seed in list(islice(wanted, SEEDS)):
            numbers = _filled(dict(seed), factors, wanted, possible)
            if numbers is None:
                del wanted[seed]
                continue
            gained = [part for part in _parts(factors, numbers, together) if part in wanted]
            if len(gained) > len(best):
                best, case = gained, numbers
        for part in best:
            del wanted[part]
        if best:
            found.append({name: factors[name][case[name]] for name in factors})
    return found


def _filled(
    chosen: Numbers,
    factors: Mapping[str, Sequence[Any]],
    wanted: Mapping[Part, None],
    possible: Callable[[Case], bool],
) -> Numbers | None:
    """The case with what is chosen, each other factor at the value that makes the most pairs that
    are wanted with those before it; None if there is none that is possible.
    """
    if not possible({name: factors[name][number] for name, number in chosen.items()}):
        return None
    name = next((name for name in factors if name not in chosen), None)
    if name is None:
        return chosen
    ways = [chosen | {name: number} for number in range(len(factors[name]))]
    gains = [sum(pair in wanted for pair in _pairs_with(factors, name, way)) for way in ways]
    for _, way in sorted(zip(gains, ways, strict=True), key=lambda entry: -entry[0]):
        found = _filled(way, factors, wanted, possible)
        if found is not None:
            return found
    return None


def _pairs_with(factors: Mapping[str, Sequence[Any]], name: str, numbers: Numbers) -> list[Part]:
    own, pairs, is_behind = (name, numbers[name]), [], False
    for other in factors:
        if other == name:
            is_behind = True
        elif other in numbers:
            theirs = (other, numbers[other])
            pairs.append((own, theirs) if is_behind else (theirs, own))
    return pairs


def _part(factors: Mapping[str, Sequence[Any]], names: Sequence[str], numbers: Numbers) -> Part:
    return tuple((name, numbers[name]) for name in factors if name in names)


def _parts(
    factors: Mapping[str, Sequence[Any]], numbers: Numbers, together: Sequence[str]
) -> list[Part]:
    pairs = list(combinations(((name, numbers[name]) for name in factors), min(2, len(factors))))
    return list(dict.fromkeys([*pairs, _part(factors, together, numbers)]))


def _all_pairs(factors: Mapping[str, Sequence[Any]]) -> list[Part]:
    pairs = combinations(factors, min(2, len(factors)))
    return [part for names in pairs for part in _all_parts(factors, names)]


def _all_parts(factors: Mapping[str, Sequence[Any]], names: Sequence[str]) -> list[Part]:
    """Every combination of the values of the factors named, if there are any."""
    numbers = product(*(range(len(factors[name])) for name in names)) if names else ()
    return [_part(factors, names, dict(zip(names, values, strict=True))) for values in numbers]
