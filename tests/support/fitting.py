"""Fit numbers of clusters to published steps: Levenberg and Marquardt's way, in plain Python.

What is fitted is what data sheets do not say. What the rows do not settle is not: shares of memory
and links that are measured everywhere stand in the files as they are.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import expm1, log
from typing import Any

from hpczero.planner.cluster import Cluster, find
from tests.support.published_steps import Measured, korthikanti, mosaic, zero

_STEP = 0.02  # of a number, for its derivative
_WEIGH = 0.05  # errors beyond this count by their size, not its square


@dataclass(frozen=True)
class Number:
    """A number of a cluster ("device.launch_us") or "software.<field>", and its range.

    `start` is where the search begins: what one would guess without a measurement.
    """

    path: str
    least: float
    most: float
    start: float


def changed(cluster: Cluster, numbers: Mapping[str, float]) -> Cluster:
    """Return a cluster with other numbers, checked as those of a file are."""
    tree: dict[str, Any] = cluster.model_dump(exclude_none=True)
    for path, value in numbers.items():
        *tables, key = path.split(".")
        table = tree
        for name in tables:
            table = table[name]
        table[key] = value
    return Cluster.model_validate(tree)


def errors(
    rows: Sequence[Measured], clusters: Mapping[str, Cluster], numbers: Mapping[str, float]
) -> list[float]:
    """Return log(predicted / measured) of each row."""
    software = {
        path.partition(".")[2]: value
        for path, value in numbers.items()
        if path.startswith("software.")
    }
    of_clusters = {key: value for key, value in numbers.items() if not key.startswith("software.")}
    as_changed = {name: changed(cluster, of_clusters) for name, cluster in clusters.items()}
    return [
        log(row.predicted(as_changed[row.cluster], **software).seconds / row.seconds)
        for row in rows
    ]


@dataclass(frozen=True)
class Fit:
    """Rows with their weights, the clusters they ran on, and the numbers to find for these.

    Numbers of the software are those of the records that the rows have.
    """

    rows: tuple[tuple[Measured, float], ...]
    clusters: tuple[str, ...]
    numbers: tuple[Number, ...]
    others: tuple[tuple[Measured, float], ...] = ()  # of other software, with its own numbers

    def errors(self, numbers: Mapping[str, float]) -> list[float]:
        """Return the weighted errors of all rows."""
        clusters = {name: find(name).cluster for name in self.clusters}
        of_hardware = {key: value for key, value in numbers.items() if key not in _SOFTWARE}
        rows = errors([row for row, _ in self.rows], clusters, numbers)
        rows += errors([row for row, _ in self.others], clusters, of_hardware)
        weights = [weight for _, weight in (*self.rows, *self.others)]
        return [error * weight for error, weight in zip(rows, weights, strict=True)]


_SOFTWARE = ("software.core_forward", "software.core_backward", "software.step_ms")


def products(precision: str) -> tuple[Number, ...]:
    """Return what large products reach, and half sizes of m and n: rows tell k's not apart."""
    path = f"device.products.{precision}"
    return (
        Number(f"{path}.reached", 0.4, 1.0, 0.7),
        Number(f"{path}.half_outer", 0.0, 512.0, 100.0),
    )


def a100() -> Fit:
    """MosaicML's rows, and Korthikanti's with the weight of three each, as they are few."""
    return Fit(
        tuple((row, 1.0) for row in mosaic()),
        ("dgx-a100-80", "dgx-a100-40"),
        (
            *products("bf16"),
            Number("device.products.bf16.attention_half", 0.0, 4000.0, 500.0),
            Number("software.core_forward", 0.2, 1.5, 0.8),
            Number("software.core_backward", 0.2, 1.5, 0.8),
            Number("software.step_ms", 0.0, 100.0, 5.0),
        ),
        tuple((row, 3.0) for row in korthikanti()),
    )


def v100() -> Fit:
    """ZeRO's rows: they alone say how far DGX-2's network was used."""
    rows = tuple((row, 1.0) for row in zero())
    return Fit(rows, ("dgx2-v100",), (*products("fp16"), Number("network.reached", 0.1, 0.95, 0.5)))


def left_out(of: Fit) -> list[float]:
    """Return the error of each row with numbers that were fitted without the rows of its group."""
    found: list[float] = []
    for group in sorted({row.group for row, _ in of.rows}):
        kept = tuple(each for each in of.rows if each[0].group != group)
        numbers = fit(Fit(kept, of.clusters, of.numbers).errors, of.numbers, rounds=6)
        others = tuple(each for each in of.rows if each[0].group == group)
        found += Fit(others, of.clusters, of.numbers).errors(numbers)
    return found


def sizes(errors: Sequence[float]) -> list[float]:
    """Return by what share each prediction is off, the smallest first."""
    return sorted(abs(expm1(error)) for error in errors)


def summary(errors: Sequence[float]) -> str:
    off = sizes(errors)
    median, late = off[len(off) // 2], off[int(0.9 * len(off))]
    mean = sum(off) / len(off)
    return f"mean {mean:.1%}, median {median:.1%}, p90 {late:.1%}, worst {off[-1]:.1%}"


def fit(
    evaluate: Callable[[Mapping[str, float]], list[float]],
    numbers: Sequence[Number],
    rounds: int = 8,
) -> dict[str, float]:
    """Return the numbers in their ranges with the smallest errors, as the search finds them."""
    point = {each.path: each.start for each in numbers}
    found = evaluate(point)
    damping = 1e-3
    for _ in range(rounds):
        slopes = [_slope(evaluate, each, point, found) for each in numbers]
        improved = False
        for _ in range(6):
            tried = _moved(numbers, point, slopes, found, damping)
            at = evaluate(tried)
            if _cost(at) < _cost(found):
                gain = 1 - _cost(at) / _cost(found)
                point, found, improved = tried, at, gain > 1e-4
                damping = max(1e-6, damping / 5)
                break
            damping *= 5
        if not improved:
            break
    return point


def _cost(residuals: Sequence[float]) -> float:
    return sum(_weight(each) * each * each for each in residuals)


def _weight(residual: float) -> float:
    return min(1.0, _WEIGH / abs(residual)) if residual else 1.0


def _slope(
    evaluate: Callable[[Mapping[str, float]], list[float]],
    number: Number,
    point: Mapping[str, float],
    found: Sequence[float],
) -> list[float]:
    step = _STEP * max(abs(point[number.path]), 0.05 * (number.most - number.least))
    if point[number.path] + step > number.most:
        step = -step
    at = evaluate({**point, number.path: point[number.path] + step})
    return [(there - here) / step for there, here in zip(at, found, strict=True)]


def _moved(
    numbers: Sequence[Number],
    point: Mapping[str, float],
    slopes: Sequence[Sequence[float]],
    found: Sequence[float],
    damping: float,
) -> dict[str, float]:
    """Solve the damped normal equations; a number that would leave its range stays at its end."""
    weights = [_weight(each) for each in found]
    free = list(range(len(numbers)))
    moved = dict(point)
    while free:
        matrix = [[_dot(slopes[row], slopes[column], weights) for column in free] for row in free]
        right = [-_dot(slopes[row], found, weights) for row in free]
        for at in range(len(free)):
            matrix[at][at] = matrix[at][at] * (1 + damping) + 1e-12
        change = solve(matrix, right)
        out = [
            row
            for row, delta in zip(free, change, strict=True)
            if not numbers[row].least <= point[numbers[row].path] + delta <= numbers[row].most
            and point[numbers[row].path] in (numbers[row].least, numbers[row].most)
        ]
        if not out:
            for row, delta in zip(free, change, strict=True):
                number = numbers[row]
                wanted = point[number.path] + delta
                moved[number.path] = min(number.most, max(number.least, wanted))
            break
        free = [row for row in free if row not in out]
    return moved


def _dot(one: Sequence[float], other: Sequence[float], weights: Sequence[float]) -> float:
    return sum(a * b * w for a, b, w in zip(one, other, weights, strict=True))


def solve(matrix: list[list[float]], right: list[float]) -> list[float]:
    """Return x of matrix x = right, by elimination with pivots; the arguments are overwritten."""
    size = len(right)
    for column in range(size):
        pivot = max(range(column, size), key=lambda row: abs(matrix[row][column]))
        matrix[column], matrix[pivot] = matrix[pivot], matrix[column]
        right[column], right[pivot] = right[pivot], right[column]
        for row in range(column + 1, size):
            factor = matrix[row][column] / matrix[column][column]
            for at in range(column, size):
                matrix[row][at] -= factor * matrix[column][at]
            right[row] -= factor * right[column]
    for row in reversed(range(size)):
        known = sum(matrix[row][at] * right[at] for at in range(row + 1, size))
        right[row] = (right[row] - known) / matrix[row][row]
    return right
