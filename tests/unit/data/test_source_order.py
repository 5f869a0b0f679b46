"""The order of a mixture is that of its rule, found for any sample, and near its shares."""

from collections.abc import Sequence
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpczero.data.source_order import SourceOrder, shares_of


def by_the_rule(
    shares: Sequence[int], limits: Sequence[float], samples: int
) -> list[tuple[int, int]]:
    """Walk through the samples: the source furthest behind its share of those so far is next."""
    counts, begun, since = [0] * len(shares), [0] * len(shares), 0
    there: list[int] = []
    found = []
    for _ in range(samples):
        now = [number for number, limit in enumerate(limits) if counts[number] < limit]
        if now != there:
            there, begun, since = now, list(counts), 0
        if not there:
            break
        since += 1
        total = sum(shares[number] for number in there)
        behind = [
            shares[number] * since - total * (counts[number] - begun[number]) for number in there
        ]
        chosen = there[behind.index(max(behind))]
        found.append((chosen, counts[chosen]))
        counts[chosen] += 1
    return found


@settings(deadline=None, max_examples=200)
@given(
    st.lists(st.tuples(st.integers(1, 30), st.sampled_from([inf, 1, 5, 40, 41])), min_size=1,
             max_size=5),
    st.integers(0, 300),
    st.integers(0, 60),
)  # fmt: skip
def test_any_sample_is_that_of_the_rule(
    sources: list[tuple[int, float]], first: int, count: int
) -> None:
    shares, limits = zip(*sources, strict=True)
    order = SourceOrder(shares, limits)
    whole = by_the_rule(shares, limits, first + count)
    assert order.end == (sum(limits) if max(limits) < inf else inf)
    first, count = min(first, len(whole)), max(0, min(count, len(whole) - first))
    assert order.of_samples(first, count) == whole[first : first + count]
    assert order.counts_at(first) == [
        sum(source == number for source, _ in whole[:first]) for number in range(len(shares))
    ]


@pytest.mark.parametrize(
    "weights", [(0.7, 0.2, 0.1), (1, 1), (3, 2), (0.5, 0.3, 0.15, 0.05), (1,), (1e-9, 1)]
)
def test_counts_stay_within_one_of_their_shares(weights: tuple[float, ...]) -> None:
    order = SourceOrder(shares_of(weights), [inf] * len(weights))
    for samples in range(3000):
        for count, weight in zip(order.counts_at(samples), weights, strict=True):
            assert abs(count - samples * weight / sum(weights)) < 1


def test_shares_are_whole_numbers() -> None:
    assert shares_of((0.7, 0.2, 0.1)) == [7, 2, 1]
    assert shares_of((14, 4, 2)) == [7, 2, 1]
    assert shares_of((1e-9, 1)) == [1, 100_000]
    assert sum(shares_of((1 / 3, 1 / 3, 1 / 3))) == 3


def test_an_order_goes_on_from_other_counts() -> None:
    order = SourceOrder((2, 1), (inf, inf), first=10, counts=(7, 3))
    assert order.of_samples(10, 3) == [(0, 7), (1, 3), (0, 8)]
    assert order.counts_at(13) == [9, 4]
