"""Long rows of figures as few points, in which every extreme stays visible (pure)."""

from dataclasses import dataclass

import numpy as np

from hpczero.runs.columns import Numbers

_LARGEST = 1e300  # of an x; beyond, differences may be too large


@dataclass(frozen=True)
class Curve:
    """Points from left to right: the mean of what each stands for, and its extremes.

    Where nothing was left out `low`, `mean` and `high` are the same.
    """

    x: Numbers
    low: Numbers
    mean: Numbers
    high: Numbers

    def __len__(self) -> int:
        return len(self.x)

    @property
    def is_reduced(self) -> bool:
        return bool(np.any(self.low != self.high))


def curve(x: Numbers, y: Numbers, points: int) -> Curve:
    """Return the known values of `y` over `x`, which grows, as at most `points` points.

    A point stands for what lies in one of as many equal parts of the x axis.
    """
    known = (np.abs(x) < _LARGEST) & np.isfinite(y)
    x, y = x[known], y[known]
    if len(x) <= points:
        return Curve(x, y, y, y)
    part = _parts(x, points)
    begins = np.flatnonzero(np.diff(part, prepend=part[0] - 1))
    counts = np.diff(np.append(begins, len(x)))
    shares = np.repeat(1.0 / counts, counts)  # a sum of large values might be too large
    low, high = np.minimum.reduceat(y, begins), np.maximum.reduceat(y, begins)
    mean = np.clip(np.add.reduceat(y * shares, begins), low, high)
    return Curve(np.add.reduceat(x * shares, begins), low, mean, high)


def means(x: Numbers, ys: Numbers, points: int) -> tuple[Numbers, Numbers, Numbers]:
    """Return (x, means, largest) of rows `ys` [len(x), columns], as at most `points` rows.

    Unknown values are left out of a mean; NaN where all are unknown.
    """
    if len(x) <= points:
        return x, ys, ys
    part = _parts(x, points)
    begins = np.flatnonzero(np.diff(part, prepend=part[0] - 1))
    known = np.isfinite(ys)
    counts = np.add.reduceat(known.astype(np.float64), begins)
    sums = np.add.reduceat(np.where(known, ys, 0.0), begins)
    most = np.maximum.reduceat(np.where(known, ys, -np.inf), begins)
    sizes = np.diff(np.append(begins, len(x)))
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = sums / counts
    return np.add.reduceat(x, begins) / sizes, mean, np.where(counts > 0, most, np.nan)


def _parts(x: Numbers, points: int) -> Numbers:
    """Return the number of the part, of `points` equal ones, in which each x lies.

    An x that is less than one before it lies in the part of that one.
    """
    x = np.maximum.accumulate(x)
    width = (x[-1] - x[0]) / points or 1.0
    return np.minimum((x - x[0]) // width, points - 1)
