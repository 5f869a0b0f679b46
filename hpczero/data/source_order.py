"""The order in which the sources of a mixture are read (pure).

The source that is furthest behind its share of the samples is next. Shares are whole numbers, so
that the order repeats itself, and any sample of it is found without those before.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import gcd, inf

import numpy as np

_FINEST = 10**5  # shares that all weights together are cut into


def shares_of(weights: Sequence[float]) -> list[int]:
    """Return the weights as the smallest whole numbers of (nearly) the same ratios."""
    total = sum(weights)
    cut = [max(1, round(weight / total * _FINEST)) for weight in weights]
    common = gcd(*cut)
    return [share // common for share in cut]


@dataclass(frozen=True)
class _Leg:
    """A part of the order in which the same sources take part."""

    first: int  # sample
    counts: list[int]  # samples of each source before it
    shares: list[int]  # 0: takes no part

    @cached_property
    def order(self) -> np.ndarray:
        """The sources of the samples until all have had their shares."""
        behind = [0] * len(self.shares)  # in parts of a sample
        period = sum(self.shares)
        order = np.empty(period, np.int64)
        taking_part = [number for number, share in enumerate(self.shares) if share]
        for sample in range(period):
            for number in taking_part:
                behind[number] += self.shares[number]
            chosen = max(taking_part, key=behind.__getitem__)
            behind[chosen] -= period
            order[sample] = chosen
        return order

    def counts_at(self, sample: int) -> list[int]:
        """Return the samples of each source before a sample."""
        periods, rest = divmod(sample - self.first, sum(self.shares))
        inside = np.bincount(self.order[:rest], minlength=len(self.shares)).tolist()
        return [
            count + periods * share + more
            for count, share, more in zip(self.counts, self.shares, inside, strict=True)
        ]

    def end(self, limits: Sequence[float]) -> float:
        """Return the sample before which the first of the sources has reached its limit."""
        left = [limit - count for limit, count in zip(limits, self.counts, strict=True)]
        limited = [
            number for number, share in enumerate(self.shares) if share and left[number] < inf
        ]
        if not limited:
            return inf
        periods = min(int(left[number] - 1) // self.shares[number] for number in limited)
        begun = [rest - periods * share for rest, share in zip(left, self.shares, strict=True)]
        for number, source in enumerate(self.order.tolist()):
            begun[source] -= 1
            if begun[source] <= 0:
                return self.first + periods * sum(self.shares) + number + 1
        raise AssertionError((self, limits))


@dataclass(frozen=True)
class SourceOrder:
    """The sources of all samples from `first` on, before which there were `counts` of each.

    `limits`: most samples of each source; one that has reached it takes no part any more.
    """

    shares: Sequence[int]
    limits: Sequence[float]  # inf: none
    first: int = 0
    counts: Sequence[int] = ()
    _legs: list[_Leg] = field(init=False, default_factory=list, repr=False)

    @cached_property
    def end(self) -> float:
        """The number of samples after which all sources have reached their limits."""
        counts = self.counts or [0] * len(self.shares)
        left = [
            max(0.0, limit - count) if share else 0.0
            for share, limit, count in zip(self.shares, self.limits, counts, strict=True)
        ]
        return self.first + sum(left)

    def counts_at(self, sample: int) -> list[int]:
        """Return the samples of each source before a sample."""
        return self._leg_of(sample).counts_at(sample)

    def of_samples(self, first: int, count: int) -> list[tuple[int, int]]:
        """Return for each sample its source, and which of that source's samples it is."""
        found: list[tuple[int, int]] = []
        while len(found) < count:
            sample = first + len(found)
            leg = self._leg_of(sample)
            end = min(first + count, leg.end(self.limits))
            counts = leg.counts_at(sample)
            period = len(leg.order)
            for place in range(sample - leg.first, int(end) - leg.first):
                source = int(leg.order[place % period])
                found.append((source, counts[source]))
                counts[source] += 1
        return found

    def _leg_of(self, sample: int) -> _Leg:
        """Return the leg that a sample is in; legs are made as far as one asks."""
        assert self.first <= sample <= self.end, (self.first, sample, self.end)
        if not self._legs:
            self._legs.append(self._leg(self.first, list(self.counts) or [0] * len(self.shares)))
        while (end := self._legs[-1].end(self.limits)) <= sample and end < self.end:
            self._legs.append(self._leg(int(end), self._legs[-1].counts_at(int(end))))
        return self._legs[bisect_right([leg.first for leg in self._legs], sample) - 1]

    def _leg(self, first: int, counts: list[int]) -> _Leg:
        left = [
            share if count < limit else 0
            for share, count, limit in zip(self.shares, counts, self.limits, strict=True)
        ]
        common = gcd(*left) or 1
        return _Leg(first, counts, [share // common for share in left])
