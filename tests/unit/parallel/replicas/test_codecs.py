"""Messages of every form: what is not finite is never read as a number; nothing else changes."""

import pytest
import torch
from torch import Tensor

from hpczero.parallel.replicas.codecs import codec_of
from hpczero.parallel.replicas.sizes import FORMS

COUNT = 5024  # rows of messages begin at multiples of 4 bytes
BAD = pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
PLACES = pytest.mark.parametrize("place", [0, 255, 2048, COUNT - 1])
WITH_BLOCKS = [name for name, form in FORMS.items() if form.block]


def drawn(seed: int) -> Tensor:
    return torch.randn(COUNT, generator=torch.Generator().manual_seed(seed))


def encoded(name: str, values: Tensor, error: Tensor | None) -> Tensor:
    form = FORMS[name]
    message = torch.empty(form.message(COUNT), dtype=torch.uint8)
    codec_of(form).encode(values, error, None, message)
    return message


def decoded(name: str, message: Tensor) -> Tensor:
    values = torch.zeros(COUNT)
    codec_of(FORMS[name]).decode(message, None, values)
    return values


def errors_of(name: str) -> Tensor | None:
    return torch.zeros(COUNT) if FORMS[name].block else None


def in_block_of(name: str, place: int) -> Tensor:
    """Return which elements share a scale with this one."""
    block = FORMS[name].block or 1
    return torch.arange(COUNT) // block == place // block


@BAD
@PLACES
@pytest.mark.parametrize("name", FORMS)
def test_a_value_that_is_not_finite_shows_in_its_block_alone(
    name: str, place: int, bad: float
) -> None:
    values = drawn(1)
    expected = decoded(name, encoded(name, values.clone(), errors_of(name)))
    values[place] = bad
    found = decoded(name, encoded(name, values, errors_of(name)))
    spoiled = in_block_of(name, place)
    assert torch.equal(found.isfinite(), ~spoiled)
    assert torch.equal(found[~spoiled], expected[~spoiled])


@BAD
@PLACES
@pytest.mark.parametrize("name", WITH_BLOCKS)
def test_an_error_that_is_not_finite_shows_too(name: str, place: int, bad: float) -> None:
    error = drawn(2)
    error[place] = bad
    found = decoded(name, encoded(name, drawn(1), error))
    assert torch.equal(found.isfinite(), ~in_block_of(name, place))


@BAD
@PLACES
@pytest.mark.parametrize("name", FORMS)
def test_in_the_average_it_still_shows(name: str, place: int, bad: float) -> None:
    """Whichever of three workers it is from, and when the average is sent on."""
    for number in range(3):
        given = [drawn(seed) for seed in range(3)]
        given[number][place] = bad
        messages = torch.stack([encoded(name, values, errors_of(name)) for values in given])
        average = torch.zeros(COUNT)
        codec_of(FORMS[name]).average(messages, average)
        spoiled = in_block_of(name, place)
        assert torch.equal(average.isfinite(), ~spoiled)
        again = decoded(name, encoded(name, average, errors_of(name)))
        assert torch.equal(again.isfinite(), ~spoiled)


@pytest.mark.parametrize("name", WITH_BLOCKS)
def test_zeros_are_zeros_and_leave_nothing(name: str) -> None:
    error = torch.zeros(COUNT)
    found = decoded(name, encoded(name, torch.zeros(COUNT), error))
    assert not found.any()
    assert not error.any()


@pytest.mark.parametrize("name", WITH_BLOCKS)
def test_what_is_said_and_what_is_left_are_the_whole(name: str) -> None:
    values, error = drawn(1), drawn(2) / 10
    total = values + error
    found = decoded(name, encoded(name, values, error))
    torch.testing.assert_close(found + error, total, rtol=0, atol=1e-6)
    assert error.any()
