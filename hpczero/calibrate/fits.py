"""Numbers of a cluster fitted to measured seconds, by least squares of their logarithms (pure).

All three laws are a scale times a shape. The scale of the best fit is the mean of what the shape
leaves over, so only the shape's parameters, one or two sizes, are searched for: on a grid first,
then around the best point with ever smaller steps. They are not negative, and at most `LARGEST`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import exp, fsum, inf, log, sqrt
from statistics import harmonic_mean, median
from typing import NamedTuple

LARGEST = 8192.0  # size with which half of a rate is reached
_BEYOND = 1.5  # rates of products that are larger than any measured, by the best of these
_LONGEST = 1 << 34  # bytes that take as long as the start of their message
_LEAST_SHARE = 0.001
_USUAL = 1.5  # times the median error
_ROUNDS = 5
_MANY = 6  # points, of which one that lies far off can be told
_COARSE = 12  # points of the first grid along each parameter
_FINEST = 1e-4  # the last step, of the logarithm


@dataclass(frozen=True)
class TimedProduct:
    """A product of m x k and k x n matrices, in `seconds`."""

    m: int
    n: int
    k: int
    seconds: float

    @property
    def rate(self) -> float:
        return 2 * self.m * self.n * self.k / self.seconds


@dataclass(frozen=True)
class ProductFit:
    """rate r(m) r(n) r(k), r(x) = x / (x + half), in operations a second.

    `error`: the root mean square of the logarithms of measured by fitted rates.
    """

    rate: float
    half_outer: float
    half_inner: float
    error: float


@dataclass(frozen=True)
class LineFit:
    """seconds + bytes / rate."""

    seconds: float
    rate: float
    error: float


@dataclass(frozen=True)
class CurveFit:
    """rates[group] x / (x + half)."""

    rates: dict[str, float]
    half: float
    error: float


def reached(size: float, half: float) -> float:
    """Return the share of a rate that a product or attention of this size reaches."""
    return size / (size + half)


def share(value: float) -> float:
    """Return the value within the range of a share."""
    return min(1.0, max(_LEAST_SHARE, value))


def mean_rate(fits: Mapping[str, LineFit]) -> float:
    """Return the bytes a second of operations that take turns."""
    return harmonic_mean([fit.rate for fit in fits.values()])


def latency(fits: Mapping[str, LineFit]) -> float:
    """Return the median of the operations' latencies; an all_reduce has two parts."""
    return median(fit.seconds / (2 if name == "all_reduce" else 1) for name, fit in fits.items())


Shape = Callable[[Sequence[float]], list[float]]  # parameters -> logarithms, one for each point


def fit_products(timed: Sequence[TimedProduct]) -> ProductFit:
    """Fit products, larger ones with more weight: that of the side of a cube.

    The law may not promise those that are larger yet much more than the best one had.
    """

    def shape(halves: Sequence[float]) -> list[float]:
        outer, inner = halves
        return [
            log(reached(one.m, outer) * reached(one.n, outer) * reached(one.k, inner))
            for one in timed
        ]

    values = [log(one.rate) for one in timed]
    weights = [(one.m * one.n * one.k) ** (1 / 3) for one in timed]
    points = _Points(values, weights, [0] * len(timed), max(values) + log(_BEYOND))
    (scale,), (outer, inner), error = _best(points, shape, 2, LARGEST)
    return ProductFit(exp(scale), outer, inner, error)


def fit_line(points: Sequence[tuple[float, float]]) -> LineFit:
    """Fit (bytes, seconds), longer messages with more weight: the cube root of their bytes."""

    def shape(equal: Sequence[float]) -> list[float]:
        return [log(size + equal[0]) for size, _ in points]

    values = [log(seconds) for _, seconds in points]
    given = _Points(values, [size ** (1 / 3) for size, _ in points], [0] * len(points))
    (scale,), (equal,), error = _best(given, shape, 1, _LONGEST)
    rate = exp(-scale)
    return LineFit(equal / rate, rate, error)


def fit_curve(points: Sequence[tuple[str, float, float]]) -> CurveFit:
    """Fit (group, size, rate): the groups have one half and rates of their own."""

    def shape(halves: Sequence[float]) -> list[float]:
        return [log(reached(size, halves[0])) for _, size, _ in points]

    groups = list(dict.fromkeys(group for group, _, _ in points))
    of = [groups.index(group) for group, _, _ in points]
    values = [log(rate) for _, _, rate in points]
    given = _Points(values, [1.0] * len(points), of)
    scales, (half,), error = _best(given, shape, 1, LARGEST)
    return CurveFit(dict(zip(groups, map(exp, scales), strict=True)), half, error)


class Judged(NamedTuple):
    """The mean square that is left over, with which scales, and each point's error."""

    square: float
    scales: list[float]
    errors: list[float]


@dataclass(frozen=True)
class _Points:
    """Logarithms of measured values, their weights, the groups that they belong to."""

    values: Sequence[float]
    weights: Sequence[float]
    groups: Sequence[int]
    most: float = inf  # that a group's scale may be

    def judge(self, shapes: Sequence[float]) -> Judged:
        """Return what shapes leave over with the best scales."""
        left = [value - shape for value, shape in zip(self.values, shapes, strict=True)]
        scales = []
        for group in range(max(self.groups) + 1):
            mine = [index for index, of in enumerate(self.groups) if of == group]
            weight = fsum(self.weights[index] for index in mine)
            mean = fsum(self.weights[index] * left[index] for index in mine) / weight
            scales.append(min(self.most, mean))
        errors = [one - scales[group] for one, group in zip(left, self.groups, strict=True)]
        squares = (w * error * error for w, error in zip(self.weights, errors, strict=True))
        return Judged(fsum(squares) / fsum(self.weights), scales, errors)

    def with_less_of_outliers(self, errors: Sequence[float]) -> "_Points":
        """Return the points with weights by which a large error counts no more than a usual one."""
        usual = _USUAL * median(map(abs, errors)) + _FINEST
        weights = [
            weight * min(1.0, usual / max(abs(error), _FINEST))
            for weight, error in zip(self.weights, errors, strict=True)
        ]
        return replace(self, weights=weights)


def _best(
    points: _Points, shape: Shape, parameters: int, largest: float
) -> tuple[list[float], tuple[float, ...], float]:
    """Return the groups' scales, the parameters and the error of the best fit.

    Many points are fitted again and again: outliers of a fit weigh less in the next one.
    """
    assert points.values, "nothing was measured"
    fitted = points
    for _ in range(_ROUNDS):
        halves = _search(fitted, shape, parameters, largest)
        judged = fitted.judge(shape(halves))
        if len(points.values) < _MANY:
            break
        fitted = points.with_less_of_outliers(judged.errors)
    return judged.scales, halves, sqrt(judged.square)


def _search(points: _Points, shape: Shape, parameters: int, largest: float) -> tuple[float, ...]:
    """Return the parameters that leave the least over."""

    def square(place: tuple[float, ...]) -> float:
        return points.judge(shape([exp(each) - 1 for each in place])).square

    top = log(largest + 1)
    steps = [top * index / (_COARSE - 1) for index in range(_COARSE)]
    place = min(product(steps, repeat=parameters), key=square)
    step = steps[1]
    while step > _FINEST:
        moves = product((-step, 0.0, step), repeat=parameters)
        near = [
            tuple(min(top, max(0.0, at + by)) for at, by in zip(place, move, strict=True))
            for move in moves
        ]
        best = min(near, key=square)
        if square(best) >= square(place):
            step /= 2
        else:
            place = best
    return tuple(exp(each) - 1 for each in place)
