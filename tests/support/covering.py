"""Few cases that try every combination that matters of many factors (pure, deterministic)."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations, product
from typing import Any

Case = dict[str, Any]  # factor -> value
Choice = tuple[
    tuple[str, int], ...
]  # of some factors the number of the value, in the order of the factors


def covering(
    factors: Mapping[str, Sequence[Any]],
    together: Sequence[str] = (),
    possible: Callable[[Case], bool] = lambda case: True,
) -> list[Case]:
    """Cases in which every two values of two factors come together, and every combination of the
    values of the factors `together`; greedy. A case has to be `possible`; what is in no such case
    is not asked for.
    """
    names = list(factors)
    cases = [choice for choice in _choices(factors, names) if possible(_case(factors, choice))]
    wanted: set[Choice] = {part for choice in cases for part in _parts(choice, together)}
    gain_at_most = {number: len(_parts(choice, together)) for number, choice in enumerate(cases)}
    found = []
    while wanted:
        best = _best(cases, gain_at_most, wanted, together)
        wanted -= set(_parts(cases[best], together))
        found.append(_case(factors, cases[best]))
    return found


def _best(
    cases: Sequence[Choice],
    gain_at_most: dict[int, int],
    wanted: set[Choice],
    together: Sequence[str],
) -> int:
    """The first case with the most of what is wanted. What a case brings only ever gets less, so
    most cases need no second look.
    """
    best, most = -1, 0
    for number in sorted(gain_at_most, key=lambda number: (-gain_at_most[number], number)):
        if gain_at_most[number] <= most:
            break
        gain = sum(part in wanted for part in _parts(cases[number], together))
        gain_at_most[number] = gain
        if gain > most:
            best, most = number, gain
    return best


def _parts(choice: Choice, together: Sequence[str]) -> list[Choice]:
    parts: list[Choice] = list(combinations(choice, 2)) if len(choice) > 1 else [choice]
    whole = tuple(entry for entry in choice if entry[0] in together)
    return [*parts, whole] if len(whole) > 2 else parts


def _choices(factors: Mapping[str, Sequence[Any]], names: Sequence[str]) -> Iterator[Choice]:
    for numbers in product(*(range(len(factors[name])) for name in names)):
        yield tuple(zip(names, numbers, strict=True))


def _case(factors: Mapping[str, Sequence[Any]], choice: Choice) -> Case:
    return {name: factors[name][number] for name, number in choice}
