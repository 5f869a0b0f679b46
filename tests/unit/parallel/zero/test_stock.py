"""A stock's pieces: lent again and again, no more of them than were lent at the same time."""

import pytest
import torch

from hpczero.parallel.zero.buffers import Loan, Stock


@pytest.fixture
def stock() -> Stock:
    return Stock(lambda size: torch.zeros(size, dtype=torch.uint8))


def step(stock: Stock, length: int) -> None:
    """Take pieces of several sizes, and give them back in reverse."""
    loans = [stock.take(length * part) for part in (3, 1, 4, 1, 5)]
    for number, loan in enumerate(loans):
        loan.tensor.fill_(number)
    for number, loan in reversed(list(enumerate(loans))):
        assert bool((loan.tensor == number).all())
        stock.give_back(loan)


def test_it_is_as_large_as_the_largest_step_needs(stock: Stock) -> None:
    for length in (5, 2, 64, 8):
        step(stock, length)
    largest = stock.size
    assert largest == 64 * 14
    for length in (64, 1, 7, 64, 33, 2):
        step(stock, length)
        assert stock.size == largest


def test_the_smallest_that_is_large_enough_is_lent(stock: Stock) -> None:
    loans = [stock.take(size) for size in (10, 30, 20)]
    for loan in loans:
        stock.give_back(loan)
    assert [stock.take(size).tensor.numel() for size in (11, 11, 0)] == [20, 30, 10]
    assert stock.size == 60


def test_a_larger_one_takes_the_place_of_the_largest(stock: Stock) -> None:
    for loan in [stock.take(size) for size in (10, 30)]:
        stock.give_back(loan)
    assert stock.take(31).tensor.numel() == 31
    assert stock.size == 41


def test_a_piece_that_is_still_seen_is_not_lent(stock: Stock) -> None:
    loan = stock.take(8)
    seen = loan.tensor[2:4]
    stock.give_back(loan)
    seen.fill_(7)
    other: Loan = stock.take(8)
    other.tensor.fill_(1)
    assert seen.tolist() == [7, 7]
    assert stock.size == 16
    del seen
    stock.take(8)
    assert stock.size == 16
