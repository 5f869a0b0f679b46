"""Parts of regions are lent in the program's order; what is still seen costs memory alone."""

import pytest
import torch

from hpczero.parallel.layout import ALIGNMENT
from hpczero.parallel.zero.buffers import Loan, Loans

STEP = ALIGNMENT  # elements, in which sizes and places are told here


@pytest.fixture
def loans() -> Loans:
    return Loans(torch.zeros(12 * STEP))


def taken(loans: Loans, elements: int) -> Loan:
    loan = loans.take(elements * STEP)
    assert loan is not None
    return loan


def place(loans: Loans, loan: Loan) -> int | None:
    """Return where in the region its memory begins; None if it is elsewhere."""
    offset = loans.regions[0].offset_of(loan.memory)
    return None if offset is None else offset // STEP


def test_what_is_given_back_is_lent_again(loans: Loans) -> None:
    first, second = taken(loans, 8), taken(loans, 4)
    assert [place(loans, loan) for loan in (first, second)] == [0, 8]
    assert loans.take(1) is None
    loans.give_back(first)
    assert place(loans, taken(loans, 5)) == 0
    assert not loans.instead


def test_whoever_gets_a_part_that_is_seen_has_other_memory(loans: Loans) -> None:
    first = taken(loans, 8)
    view = first.tensor.fill_(7.0)[3 * STEP :: STEP]
    loans.give_back(first)
    assert loans.sees(first)
    over_it = taken(loans, 5)
    behind_it = taken(loans, 7)
    over_it.tensor.fill_(1.0)
    behind_it.tensor.fill_(2.0)
    assert view.tolist() == [7.0] * 5
    assert [place(loans, loan) for loan in (over_it, behind_it)] == [None, None], "both overlap it"
    assert loans.take(1) is None, "the region is lent, as without the view"
    for loan in (over_it, behind_it):
        loans.give_back(loan)
    assert place(loans, taken(loans, 8)) is None
    assert [region.memory.numel() // STEP for region in loans.instead] == [5, 7, 8]


def test_other_memory_is_kept_for_the_next_time(loans: Loans) -> None:
    for _ in range(3):
        first = taken(loans, 8)
        view = first.tensor[:1]
        loans.give_back(first)
        second = taken(loans, 8)
        assert place(loans, second) is None
        loans.give_back(second)
        assert len(loans.instead) == 1
        del view
    assert place(loans, taken(loans, 12)) == 0
    assert not loans.still_seen


def test_what_fills_the_memory_is_not_counted(loans: Loans) -> None:
    """It may hold it a moment longer than it needs it."""
    first = taken(loans, 12)
    held = first.memory.view(torch.uint8)
    loans.give_back(first)
    assert not loans.still_seen
    assert place(loans, taken(loans, 12)) == 0
    assert held.numel() == 48 * STEP


def test_memory_of_the_callers_is_lent_by_the_same_rule(loans: Loans) -> None:
    own, ends = torch.zeros(4), list[str]()
    loan = loans.lend_part(own, lambda: ends.append("first"))
    view = loan.tensor
    loans.give_back(loan)
    assert ends == ["first"], "at once, though it is seen"
    other = loans.lend_part(own, lambda: ends.append("second"))
    assert other.memory.data_ptr() != own.data_ptr()
    loans.give_back(other)
    del view
    assert loans.lend_part(own, lambda: None).memory.data_ptr() == own.data_ptr()
    assert ends == ["first", "second"]
