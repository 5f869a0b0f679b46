"""Few points for many figures: the extremes stay, as a plain loop finds them."""

from math import isfinite, nan

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpczero.runs.curves import curve, means

VALUES = st.floats(-1e6, 1e6) | st.sampled_from([nan, float("inf"), -float("inf")])


def in_parts(x: list[float], points: int) -> list[list[int]]:
    """Return the numbers of the values in each of the equal parts of the axis that has any."""
    width = (x[-1] - x[0]) / points or 1.0
    parts: dict[int, list[int]] = {}
    for at, one in enumerate(x):
        parts.setdefault(min(int((one - x[0]) // width), points - 1), []).append(at)
    return list(parts.values())


@given(st.lists(st.tuples(st.integers(1, 9), VALUES), max_size=60), st.integers(1, 20))
def test_every_extreme_is_kept(steps: list[tuple[int, float]], points: int) -> None:
    x = np.cumsum([step for step, _ in steps], dtype=np.float64)
    y = np.array([value for _, value in steps], dtype=np.float64)
    found = curve(x, y, points)
    known = [(float(a), float(b)) for a, b in zip(x, y, strict=True) if isfinite(b)]
    assert len(found) <= points
    if len(known) <= points:
        assert list(zip(found.x, found.mean, strict=True)) == known
        assert not found.is_reduced
        return
    parts = in_parts([a for a, _ in known], points)
    assert len(found) == len(parts)
    for at, part in enumerate(parts):
        xs, ys = [known[one][0] for one in part], [known[one][1] for one in part]
        assert (found.low[at], found.high[at]) == (min(ys), max(ys))
        assert found.mean[at] == pytest.approx(sum(ys) / len(ys), abs=1e-6)
        assert found.x[at] == pytest.approx(sum(xs) / len(xs))
    assert (found.low <= found.mean).all()
    assert (found.mean <= found.high).all()


@given(
    st.lists(st.tuples(st.integers(1, 9), VALUES, VALUES), min_size=1, max_size=60),
    st.integers(1, 20),
)
def test_means_of_rows(rows: list[tuple[int, float, float]], points: int) -> None:
    x = np.cumsum([row[0] for row in rows], dtype=np.float64)
    ys = np.array([row[1:] for row in rows], dtype=np.float64)
    found_x, mean, most = means(x, ys, points)
    if len(rows) <= points:
        assert found_x is x
        return
    parts = in_parts(x.tolist(), points)
    assert len(found_x) == len(parts)
    for at, part in enumerate(parts):
        for column in (0, 1):
            known = [value for value in ys[part, column] if isfinite(value)]
            assert mean[at, column] == pytest.approx(
                sum(known) / len(known) if known else nan, abs=1e-6, nan_ok=True
            )
            assert most[at, column] == pytest.approx(max(known, default=nan), nan_ok=True)


def test_one_spike_in_a_million_steps_is_seen() -> None:
    x = np.arange(1.0, 1_000_001)
    y = np.sin(x)
    y[654_321] = 100.0
    found = curve(x, y, 800)
    assert found.high.max() == 100.0
    assert (found.high > 2).sum() == 1
    assert len(found) == 800


def test_values_whose_sum_is_too_large() -> None:
    x = np.arange(100.0)
    found = curve(x, np.full(100, 1.7e308), 10)
    assert np.isfinite(found.mean).all()
    x[50:] = 1.7e308
    assert np.isfinite(curve(x - 8e307, np.ones(100), 10).x).all()


def test_an_axis_that_goes_back_has_no_more_points() -> None:
    """Clocks of nodes differ, and a file may hold anything."""
    random = np.random.default_rng(3)
    x, y = random.normal(size=5000), random.normal(size=5000)
    for axis in (x, -np.abs(x), np.zeros(5000)):
        found = curve(axis, y, 50)
        assert len(found) <= 50
        assert (found.low.min(), found.high.max()) == (y.min(), y.max())
