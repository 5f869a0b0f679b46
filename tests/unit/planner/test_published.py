"""Steps that were published with their time are predicted, within stated bounds.

`python scripts/fit_cluster.py` makes the numbers of the clusters; docs/foresight.md has the tables.
"""

from math import expm1

import pytest

from tests.support.fitting import Fit, a100, fit
from tests.support.published_steps import Measured, korthikanti, mosaic, zero


def sizes(errors: list[float]) -> list[float]:
    return sorted(abs(expm1(error)) for error in errors)


def deviations(rows: list[Measured]) -> list[float]:
    return sorted(abs(row.predicted().seconds / row.seconds - 1) for row in rows)


def mean(numbers: list[float]) -> float:
    return sum(numbers) / len(numbers)


def test_korthikanti() -> None:
    rows = list(korthikanti())
    assert len(rows) == 8
    assert mean(deviations(rows)) <= 0.04


def test_zero_on_v100() -> None:
    rows = list(zero())
    assert len(rows) == 13
    assert mean(deviations(rows)) <= 0.12


def test_mosaic_with_each_model_left_out() -> None:
    """Numbers fitted without a model's rows predict them."""
    of = a100()
    assert len(of.rows) == 139
    found: list[float] = []
    for left_out in sorted({row.group for row, _ in of.rows}):
        kept = tuple(each for each in of.rows if each[0].group != left_out)
        numbers = fit(Fit(kept, of.clusters, of.numbers).errors, of.numbers, rounds=6)
        others = tuple(each for each in of.rows if each[0].group == left_out)
        found += Fit(others, of.clusters, of.numbers).errors(numbers)
    errors = sizes(found)
    assert len(errors) == 139
    assert errors[len(errors) // 2] <= 0.06
    assert errors[int(0.9 * len(errors))] <= 0.15


@pytest.mark.parametrize("rows", [korthikanti, mosaic, zero])
def test_causes_add_up(rows: object) -> None:
    for row in list(rows())[::9]:
        step = row.predicted()
        assert all(seconds >= 0 for seconds in step.causes.values())
        assert sum(step.causes.values()) == pytest.approx(step.seconds, rel=1e-12)
