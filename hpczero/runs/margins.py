"""The margin between two groups of runs, and whether it is more than the noise (pure).

A run's loss has two kinds of noise: an evaluation reads a part of the text only (its standard
error), and another seed draws other weights and another order of the text (the spread of seeds,
which has the first kind in it). The interval of a margin is taken from the best that there is:

1. both groups have the same seeds: the differences seed by seed (Student's t of n - 1). With one
   seed, runs begin alike, read the text in the same order, and are evaluated on the same windows;
2. both have several seeds, but not the same: Welch's t, whose degrees of freedom are rounded down;
3. one of them has several seeds: Student's t, as if the other one's seeds were spread as much;
4. neither has: the standard errors of the two evaluations, as if they read different windows. That
   says nothing of what other seeds would have changed.

The best group is held against the next one, both of which were found by looking. No correction for
this is needed: of groups that are all alike the two best are closer to each other than two that are
drawn (Gutmann and Maymin 1987, Is the selected population the best?).
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import isfinite, nan, sqrt
from statistics import fmean, stdev, variance

LEVEL = 0.95  # of the intervals
_MOST_DEGREES = 1000  # of freedom: the quantile of more is the same to three digits
_NORMAL = 1.959964  # the quantile of 0.975


@dataclass(frozen=True)
class Sample:
    """The losses of a group, by seed, and the standard errors of their evaluations."""

    loss_of_seed: Mapping[int, float]
    errors: tuple[float, ...]  # NaN: not known

    @property
    def losses(self) -> list[float]:
        return list(self.loss_of_seed.values())

    @property
    def mean(self) -> float:
        return fmean(self.losses) if self.losses else nan


@dataclass(frozen=True)
class Margin:
    """How much the next one's loss is higher. `half`: of the interval's width; NaN: not known."""

    margin: float
    half: float
    source: str  # "paired seeds", "seeds", "seeds of one", "evaluations"

    @property
    def is_more_than_noise(self) -> bool | None:
        """Return None if it cannot be told."""
        return self.margin > self.half if isfinite(self.half) else None


def margin(best: Sample, other: Sample) -> Margin:
    """Return the margin by which the mean loss of `best` is lower."""
    difference = other.mean - best.mean
    one, two = len(best.losses), len(other.losses)
    if min(one, two) > 1 and best.loss_of_seed.keys() == other.loss_of_seed.keys():
        each = [loss - best.loss_of_seed[seed] for seed, loss in other.loss_of_seed.items()]
        return Margin(difference, quantile(one - 1) * stdev(each) / sqrt(one), "paired seeds")
    if min(one, two) > 1:
        return Margin(difference, _welch(best.losses, other.losses), "seeds")
    if max(one, two) > 1:
        repeated = best.losses if one > two else other.losses
        error = stdev(repeated) * sqrt(1 / one + 1 / two)
        return Margin(difference, quantile(len(repeated) - 1) * error, "seeds of one")
    error = math.hypot(*best.errors, *other.errors)
    return Margin(difference, _NORMAL * error, "evaluations")


def _welch(one: list[float], two: list[float]) -> float:
    squares = [variance(losses) / len(losses) for losses in (one, two)]
    total = sum(squares)
    if not total:
        return 0.0
    shares = [square / total for square in squares]
    inverse = sum(share**2 / (len(of) - 1) for share, of in zip(shares, (one, two), strict=True))
    return quantile(math.floor((1 + 1e-12) / inverse)) * sqrt(total)


def quantile(degrees: int) -> float:
    """Return the t that Student's variable stays within, on both sides, with `LEVEL`."""
    return _bisect(lambda t: within(t, min(degrees, _MOST_DEGREES)), LEVEL)


def within(t: float, degrees: int) -> float:
    """Return the probability that Student's variable lies between -t and t.

    Abramowitz and Stegun, Handbook of Mathematical Functions, 26.7.3 and 26.7.4.
    """
    angle = math.atan(t / sqrt(degrees))
    square = math.cos(angle) ** 2
    odd = degrees % 2
    term = math.cos(angle) if odd else 1.0
    total = 0.0
    for number in range(1 + odd, degrees, 2):
        total += term
        term *= square * number / (number + 1)
    if odd:
        return 2 / math.pi * (angle + math.sin(angle) * total)
    return math.sin(angle) * total


def _bisect(of: Callable[[float], float], wanted: float) -> float:
    low, high = 0.0, 1.0
    while of(high) < wanted:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if of(middle) < wanted else (low, middle)
    return high
