"""Fits find the numbers that measurements were made of, noise or not, and stay in range."""

import random
from math import exp, log

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpczero.calibrate.fits import LARGEST, TimedProduct, fit_curve, fit_line, fit_products

SIZES = (32, 64, 128, 256, 512, 1024, 2048)
SHAPES = [
    *((size, size, size) for size in SIZES),
    *((64, 1024, 1024), (1024, 64, 1024), (1024, 1024, 64), (32, 2048, 512), (512, 2048, 32)),
]
BYTES = [4096 * 4**power for power in range(8)]

rates = st.floats(1e9, 1e15)
halves = st.floats(0, 200)


def reached(size: float, half: float) -> float:
    return size / (size + half)


def products(rate: float, outer: float, inner: float, noise: float = 0) -> list[TimedProduct]:
    chance = random.Random(1)
    timed = []
    for m, n, k in SHAPES:
        true = rate * reached(m, outer) * reached(n, outer) * reached(k, inner)
        seconds = 2 * m * n * k / true * exp(chance.gauss(0, noise))
        timed.append(TimedProduct(m, n, k, seconds))
    return timed


@settings(max_examples=15, deadline=None)
@given(rates, halves, halves)
def test_products_without_noise_are_found_again(rate: float, outer: float, inner: float) -> None:
    fit = fit_products(products(rate, outer, inner))
    assert fit.error < 0.01
    for m, n, k in SHAPES:
        true = rate * reached(m, outer) * reached(n, outer) * reached(k, inner)
        found = fit.rate * reached(m, fit.half_outer) * reached(n, fit.half_outer)
        assert found * reached(k, fit.half_inner) == pytest.approx(true, rel=0.03)


@settings(max_examples=15, deadline=None)
@given(rates, st.floats(0, 300), st.floats(0, 300))
def test_noise_of_a_twentieth_moves_a_rate_by_less_than_a_sixth(
    rate: float, outer: float, inner: float
) -> None:
    fit = fit_products(products(rate, outer, inner, 0.05))
    assert abs(log(fit.rate / rate)) < 0.15
    assert fit.error < 0.15


@settings(max_examples=15, deadline=None)
@given(st.lists(st.floats(1e-7, 10), min_size=len(SHAPES), max_size=len(SHAPES)))
def test_whatever_was_measured_the_numbers_are_in_range(seconds: list[float]) -> None:
    timed = [TimedProduct(*shape, each) for shape, each in zip(SHAPES, seconds, strict=True)]
    fit = fit_products(timed)
    assert fit.rate > 0
    assert 0 <= fit.half_outer <= LARGEST + 1
    assert 0 <= fit.half_inner <= LARGEST + 1
    line = fit_line(list(zip(BYTES, seconds, strict=False)))
    assert line.rate > 0
    assert line.seconds >= 0


@settings(max_examples=15, deadline=None)
@given(st.floats(1e-7, 1e-3), st.floats(1e7, 1e12))
def test_a_line_is_found_again(latency: float, rate: float) -> None:
    fit = fit_line([(size, latency + size / rate) for size in BYTES])
    for size in BYTES:
        true = latency + size / rate
        assert fit.seconds + size / fit.rate == pytest.approx(true, rel=0.02)


@settings(max_examples=15, deadline=None)
@given(rates, rates, halves)
def test_groups_share_a_half(one: float, other: float, half: float) -> None:
    sizes = (128, 256, 512, 1024, 2048)
    points = [
        (name, float(size), rate * reached(size, half))
        for name, rate in (("one", one), ("other", other))
        for size in sizes
    ]
    fit = fit_curve(points)
    assert fit.error < 0.01
    for name, size, rate in points:
        assert fit.rates[name] * reached(size, fit.half) == pytest.approx(rate, rel=0.03)


def test_one_wild_measurement_of_eight_moves_a_line_little() -> None:
    points = [(float(size), 1e-5 + size / 5e9) for size in BYTES]
    wild = [
        (size, seconds * (50 if index == 2 else 1)) for index, (size, seconds) in enumerate(points)
    ]
    fit = fit_line(wild)
    assert fit.rate == pytest.approx(5e9, rel=0.1)
    assert fit.seconds == pytest.approx(1e-5, rel=0.2)


def test_a_single_measurement_is_its_own_rate() -> None:
    fit = fit_products([TimedProduct(64, 64, 64, 1e-3)])
    assert fit.rate * reached(64, fit.half_outer) ** 2 * reached(64, fit.half_inner) == (
        pytest.approx(2 * 64**3 / 1e-3)
    )
