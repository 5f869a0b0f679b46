"""The cases that the grids' tests try: every pair, what is asked for together, and not many."""

from itertools import combinations, product
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tests.support.covering import covering

sizes = st.lists(st.integers(1, 4), min_size=1, max_size=5)
factors_of_any_size = sizes.map(
    lambda sizes: {f"factor{number}": list(range(size)) for number, size in enumerate(sizes)}
)


def pairs(case: dict[str, Any]) -> set[Any]:
    return set(combinations(case.items(), 2))


def all_cases(factors: dict[str, list[int]]) -> list[dict[str, int]]:
    return [dict(zip(factors, values, strict=True)) for values in product(*factors.values())]


@given(factors_of_any_size)
def test_every_two_values_come_together(factors: dict[str, list[int]]) -> None:
    found = covering(factors)
    assert set().union(*map(pairs, found)) == set().union(*map(pairs, all_cases(factors)))
    assert {(name, case[name]) for case in found for name in factors} == {
        (name, value) for name, values in factors.items() for value in values
    }


@given(factors_of_any_size, st.integers(2, 9))
def test_impossible_cases_are_left_out_and_nothing_possible(
    factors: dict[str, list[int]], modulus: int
) -> None:
    def possible(case: dict[str, int]) -> bool:
        return len(case) < len(factors) or sum(case.values()) % modulus != 1

    found = covering(factors, possible=possible)
    assert all(map(possible, found))
    assert set().union(*map(pairs, found)) == set().union(
        *map(pairs, filter(possible, all_cases(factors)))
    )


@given(factors_of_any_size)
def test_every_combination_of_what_is_asked_for_together(factors: dict[str, list[int]]) -> None:
    together = list(factors)[1:4]
    found = {tuple(case[name] for name in together) for case in covering(factors, together)}
    assert found == set(product(*(factors[name] for name in together)))


def test_few_cases_and_the_same_every_time() -> None:
    factors = {
        name: list(range(size)) for name, size in zip("abcdef", (4, 4, 3, 3, 2, 2), strict=True)
    }
    found = covering(factors)
    assert 16 <= len(found) <= 24  # of 576; two of four values make 16
    assert found == covering(factors)
