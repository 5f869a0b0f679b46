"""Margins and their intervals, against tables, formulas written out, and drawn groups."""

import math
import random
from statistics import fmean, variance

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpczero.runs.margins import Margin, Sample, margin, quantile, within

# Fisher and Yates, Statistical Tables, table III
TABLE = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 7: 2.365, 10: 2.228, 30: 2.042, 120: 1.980}
UNKNOWN = (math.nan,)


@pytest.mark.parametrize("degrees", TABLE)
def test_quantiles_of_the_table(degrees: int) -> None:
    assert quantile(degrees) == pytest.approx(TABLE[degrees], abs=6e-4)


@pytest.mark.parametrize("degrees", [1, 2, 3, 4, 9, 40])
@pytest.mark.parametrize("t", [0.1, 1.0, 2.5, 20.0])
def test_the_probability_is_the_integral_of_the_density(t: float, degrees: int) -> None:
    log = math.lgamma((degrees + 1) / 2) - math.lgamma(degrees / 2)
    scale = math.exp(log) / math.sqrt(degrees * math.pi)
    width = t / 20_000
    middles = ((number + 0.5) * width for number in range(20_000))
    density = (scale * (1 + x * x / degrees) ** (-(degrees + 1) / 2) for x in middles)
    assert within(t, degrees) == pytest.approx(2 * width * sum(density), abs=1e-6)


def sample(*losses: float, first: int = 1, errors: tuple[float, ...] = UNKNOWN) -> Sample:
    return Sample(dict(enumerate(losses, first)), errors)


def test_groups_with_the_same_seeds_are_held_against_each_other_seed_by_seed() -> None:
    found = margin(sample(1.0, 2.0, 3.0), sample(1.1, 2.3, 3.2))
    assert found.source == "paired seeds"
    assert found.margin == pytest.approx(0.2)
    assert found.half == pytest.approx(4.3027 * 0.1 / math.sqrt(3), rel=1e-4)
    assert found.is_more_than_noise is False
    again = margin(Sample({3: 3.0, 1: 1.0, 2: 2.0}, UNKNOWN), sample(1.1, 2.3, 3.2))
    assert again.half == pytest.approx(found.half), "whatever their order"


def test_groups_with_other_seeds_by_welch() -> None:
    """The degrees of freedom, 2.71, are rounded down to 2."""
    one, two = [1.0, 1.1, 1.2], [2.0, 2.3, 2.9]
    found = margin(sample(*one), sample(*two, first=7))
    parts = [variance(losses) / 3 for losses in (one, two)]
    degrees = sum(parts) ** 2 / sum(part**2 / 2 for part in parts)
    assert 2 < degrees < 3
    assert found.source == "seeds"
    assert found.half == pytest.approx(4.3027 * math.sqrt(sum(parts)), rel=1e-4)
    assert found.is_more_than_noise is True


@pytest.mark.parametrize("turned", [False, True])
def test_a_single_run_is_taken_to_spread_as_the_others(turned: bool) -> None:
    several, single = sample(2.0, 2.1, 2.3), sample(5.0)
    found = margin(single, several) if turned else margin(several, single)
    spread = math.sqrt(variance([2.0, 2.1, 2.3]))
    assert found.source == "seeds of one"
    assert found.half == pytest.approx(4.3027 * spread * math.sqrt(4 / 3), rel=1e-4)


def test_two_single_runs_by_their_evaluations_alone() -> None:
    found = margin(sample(1.0, errors=(0.03,)), sample(1.1, errors=(0.04,)))
    assert found == Margin(pytest.approx(0.1), pytest.approx(0.098, rel=1e-4), "evaluations")
    assert found.is_more_than_noise is True
    unknown = margin(sample(1.0, errors=(0.03,)), sample(1.1, errors=UNKNOWN))
    assert unknown.is_more_than_noise is None
    whole = margin(sample(1.0, errors=(0.0,)), sample(1.0, errors=(0.0,)))
    assert whole.is_more_than_noise is False, "equal losses over the whole split"


losses = st.lists(st.floats(-1e15, 1e15), min_size=1, max_size=5)


@given(losses, losses, st.booleans())
def test_any_losses_have_a_margin(one: list[float], two: list[float], same: bool) -> None:
    found = margin(sample(*one), sample(*two, first=1 if same else 100))
    assert found.margin == pytest.approx(fmean(two) - fmean(one))
    assert not found.half < 0


# of 2,000 cases; its standard deviation is 0.5 %
CASES = 2000


@pytest.mark.parametrize("other", ["paired", "other seeds", "single"])
def test_the_true_margin_lies_in_nineteen_intervals_of_twenty(other: str) -> None:
    """Rounded degrees of freedom make Welch's intervals wider."""
    draw = random.Random(28)
    hits = 0
    for _ in range(CASES):
        seeds = [draw.gauss(0, 1) for _ in range(3)]
        one = [2.0 + seed + draw.gauss(0, 0.3) for seed in seeds]
        two = [2.5 + seed + draw.gauss(0, 0.3) for seed in seeds]
        if other != "paired":
            two = [2.5 + draw.gauss(0, 1.044) for _ in range(1 if other == "single" else 4)]
        found = margin(sample(*one), sample(*two, first=1 if other == "paired" else 9))
        hits += abs(found.margin - 0.5) <= found.half
    assert 0.935 < hits / CASES < (0.99 if other == "other seeds" else 0.965)


@pytest.mark.parametrize("groups", [2, 8, 24])
@pytest.mark.parametrize("same_seeds", [True, False])
def test_of_groups_that_are_alike_the_best_is_seldom_taken_for_better(
    groups: int, same_seeds: bool
) -> None:
    """Also where it was chosen among many: the two best are then closer to each other."""
    draw = random.Random(28)
    wrong = 0
    for _ in range(CASES):
        drawn = [
            sample(*(draw.gauss(2, 0.1) for _ in range(3)), first=1 if same_seeds else 10 * at)
            for at in range(groups)
        ]
        best, second = sorted(drawn, key=lambda one: one.mean)[:2]
        wrong += bool(margin(best, second).is_more_than_noise)
    assert wrong / CASES < 0.062
