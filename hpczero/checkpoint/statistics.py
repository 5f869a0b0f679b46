"""What the numbers of a tensor are like, in one pass over it: bounded memory, and the same digits whatever grid wrote it."""

from dataclasses import dataclass
from math import inf, sqrt
from typing import Any

import numpy as np

from hpczero.checkpoint.shard_file import Array


@dataclass
class Statistics:
    """Of the finite elements that were added; NaN and infinite ones are counted."""

    count: int = 0
    nan: int = 0
    infinite: int = 0
    minimum: float = inf
    maximum: float = -inf
    mean: float = 0.0
    deviations: float = 0.0  # sum of squares of the distances from the mean
    squares: float = 0.0

    def add(self, values: Array) -> None:
        """Sums in double precision; those of parts are put together as Chan, Golub and LeVeque (1979) do."""
        finite = np.isfinite(values)
        if not finite.all():
            self.nan += int(np.isnan(values).sum())
            self.infinite += int(np.isinf(values).sum())
            values = values[finite]
        if not len(values):
            return
        exact = values.astype(np.float64)
        mean, count = float(exact.mean()), self.count + len(exact)
        self.squares += float(np.dot(exact, exact))
        exact -= mean
        distance = mean - self.mean
        self.deviations += float(np.dot(exact, exact)) + distance**2 * self.count * len(exact) / count
        self.mean += distance * len(exact) / count
        self.count = count
        self.minimum, self.maximum = min(self.minimum, float(values.min())), max(self.maximum, float(values.max()))

    @property
    def norm(self) -> float:
        return sqrt(self.squares)

    @property
    def std(self) -> float:
        return sqrt(self.deviations / self.count) if self.count else 0.0

    def as_data(self) -> dict[str, Any]:
        """None: of nothing finite there is no mean."""
        named = {"norm": self.norm, "mean": self.mean, "std": self.std, "min": self.minimum, "max": self.maximum}
        return {name: value if self.count else None for name, value in named.items()} | {"nan": self.nan, "inf": self.infinite}


@dataclass
class Difference:
    """Of two tensors. What is NaN, or the same infinity, in both is no difference; where only one is finite, it is infinite."""

    largest: float = 0.0
    squares: float = 0.0
    reference: float = 0.0  # sum of squares of the second one
    differing: int = 0

    def add(self, values: Array, reference: Array) -> None:
        same = (values == reference) | (np.isnan(values) & np.isnan(reference))
        self.reference += float(np.dot(clean := np.where(np.isfinite(reference), reference, 0).astype(np.float64), clean))
        if same.all():
            return
        with np.errstate(invalid="ignore"):
            apart = np.abs(values[~same].astype(np.float64) - reference[~same])
        apart[np.isnan(apart)] = inf
        self.differing += len(apart)
        self.largest = max(self.largest, float(apart.max()))
        self.squares += float(np.dot(apart, apart))

    @property
    def relative(self) -> float:
        """Norm of the difference, over that of the second tensor."""
        if not self.squares:
            return 0.0
        return sqrt(self.squares) / sqrt(self.reference) if self.reference else inf
