"""Turns of fragments: each once in a round, evenly spread."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpczero.parallel.replicas.turns import fragment_of_update, fragments_of

sizes = st.lists(st.integers(1, 10_000), min_size=1, max_size=40)
rounds = st.integers(1, 60).flatmap(lambda every: st.tuples(st.just(every), st.integers(1, every)))


@given(sizes, st.integers(1, 50))
def test_every_unit_is_in_one_fragment_and_in_order(lengths: list[int], count: int) -> None:
    fragments = fragments_of(lengths, count)
    assert len(fragments) == count
    assert [unit for fragment in fragments for unit in fragment] == list(range(len(lengths)))


@given(sizes, st.integers(1, 50))
def test_fragments_are_of_about_equal_size(lengths: list[int], count: int) -> None:
    """None has more than its part and half a unit at either end."""
    for fragment in fragments_of(lengths, count):
        held = sum(lengths[unit] for unit in fragment)
        assert held <= sum(lengths) / count + max(lengths)


@given(st.integers(1, 30), st.integers(1, 30))
def test_equal_units_are_dealt_out_evenly(units: int, count: int) -> None:
    numbers = [len(fragment) for fragment in fragments_of([7] * units, count)]
    assert max(numbers) - min(numbers) <= 1


@given(rounds, st.integers(0, 100))
def test_every_fragment_has_one_turn_in_a_round_wherever_it_begins(
    round_: tuple[int, int], begins: int
) -> None:
    every, count = round_
    turns = [fragment_of_update(begins + step, every, count) for step in range(1, every + 1)]
    assert sorted(turn for turn in turns if turn is not None) == list(range(count))


@given(rounds)
def test_turns_are_evenly_spread_in_order_and_the_last_ends_the_round(
    round_: tuple[int, int],
) -> None:
    every, count = round_
    turns = {step: fragment_of_update(step, every, count) for step in range(1, 3 * every + 1)}
    at = [step for step, turn in turns.items() if turn is not None]
    assert [turns[step] for step in at] == list(range(count)) * 3
    assert at[count - 1 :: count] == [every, 2 * every, 3 * every]
    gaps = [after - before for before, after in zip([0, *at[:-1]], at, strict=True)]
    assert max(gaps) - min(gaps) <= 1


@pytest.mark.parametrize("number", [0, -1])
def test_there_is_no_turn_before_the_first_update(number: int) -> None:
    assert fragment_of_update(number, 1, 1) is None
