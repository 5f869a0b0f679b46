"""The trade between numbers of nodes."""

from dataclasses import replace

import pytest

from hpczero.errors import InputError
from hpczero.planner.allocation import Allocation
from hpczero.planner.bill import Bill
from hpczero.planner.search import Found, Planned
from hpczero.planner.trade import node_counts, pareto, why
from tests.support.plans import search, space


@pytest.fixture(scope="module")
def found() -> Found:
    of, machine = space(Allocation.of_nodes(1, 4), parallel__tensor=1)
    return search(of, machine).run()


@pytest.mark.parametrize(
    ("text", "counts"),
    [("8", [8]), ("1-4", [1, 2, 3, 4]), ("5-5", [5]), ("5-20", [6, 8, 12, 16, 20])],
)
def test_numbers_of_nodes(text: str, counts: list[int]) -> None:
    assert node_counts(text, 0) == node_counts(text, counts[-1]) == counts


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("0", "from 1 to 1,000,000"),
        ("8-4", "the smaller number first"),
        ("2000000", "from 1 to 1,000,000"),
        ("-3", "as in 8, or 1-64"),
        ("1-2-3", "as in 8, or 1-64"),
        ("many", "as in 8, or 1-64"),
        ("1.5", "as in 8, or 1-64"),
        ("²", "as in 8, or 1-64"),
        ("9" * 5000, "as in 8, or 1-64"),
        ("65", "the cluster has 64 nodes"),
    ],
)
def test_absurd_numbers_of_nodes(text: str, said: str) -> None:
    with pytest.raises(InputError, match=said) as error:
        node_counts(text, 64)
    assert len(str(error.value)) < 200


def test_the_front_has_what_nothing_beats_in_both(found: Found) -> None:
    def at(seconds: float, nodes: int) -> tuple[Planned, Bill]:
        return found.planned[0], Bill(seconds, nodes, 1)

    cheap, fast, middle = at(100, 1), at(10, 20), at(40, 3)
    slow, dear = at(101, 2), at(40, 4)
    assert pareto([cheap, slow, dear, fast, middle]) == [fast, middle, cheap]
    assert pareto([]) == []


def test_why_adds_up(found: Found) -> None:
    of, machine = space(Allocation.of_nodes(1, 4), parallel__tensor=1)
    room = search(of, machine).room
    best = found.best
    assert best
    for one in found.planned[:: len(found.planned) // 7]:
        lost = why(one, found, room)
        assert sum(lost.seconds.values()) == pytest.approx(one.time.seconds - best.time.seconds)
        assert sum(lost.memory.values()) == one.fit.first.size - best.fit.first.size
        assert lost.exceeds == ""
    nothing = why(best, found, room)
    assert not nothing.seconds
    assert not nothing.memory
    account = replace(best.fit.first, available=1)
    too_large = replace(best, fit=replace(best.fit, accounts=(account, *best.fit.accounts[1:])))
    assert why(too_large, found, room).exceeds.endswith("GB more than there are on a device")
