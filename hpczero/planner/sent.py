"""Bytes that ranks send, by operation, and their totals (pure)."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby


@dataclass(frozen=True, slots=True)
class Sent:
    """Bytes sent to ranks of the same node (`inside`) and of others (`between`)."""

    inside: int = 0
    between: int = 0

    def __add__(self, other: "Sent") -> "Sent":
        return Sent(self.inside + other.inside, self.between + other.between)

    def __mul__(self, times: int) -> "Sent":
        return Sent(self.inside * times, self.between * times)

    def __floordiv__(self, steps: int) -> "Sent":
        return Sent(self.inside // steps, self.between // steps)

    def most(self, other: "Sent") -> "Sent":
        return Sent(max(self.inside, other.inside), max(self.between, other.between))


Operations = Mapping[str, Sent]


@dataclass(frozen=True)
class Total:
    """Bytes of one operation along one axis."""

    rank: Sent  # the most that a rank sends inside its node, and the most that one sends to others
    all: Sent  # the sum over all ranks


# Bytes of consecutive ranks by operation, and how often this sequence of ranks repeats.
RepeatedRanks = tuple[Sequence[Operations], int]


class GroupVolumes:
    """Bytes that each rank of a group sends along its axis."""

    def __init__(self, alike: Iterable[RepeatedRanks]) -> None:
        self._alike = list(alike)

    def of(self, index: int) -> Operations:
        for operations, times in self._alike:
            if index < len(operations) * times:
                return operations[index % len(operations)]
            index -= len(operations) * times
        raise IndexError(index)

    @cached_property
    def totals(self) -> dict[str, Total]:
        return merged(
            (name, Total(sent, sent * times))
            for ranks, times in self._alike
            for operations in ranks
            for name, sent in operations.items()
        )


def merged(totals: Iterable[tuple[str, Total]]) -> dict[str, Total]:
    """Combine the totals of each operation."""
    combined: dict[str, Total] = {}
    for name, total in totals:
        before = combined.get(name, Total(Sent(), Sent()))
        combined[name] = Total(before.rank.most(total.rank), before.all + total.all)
    return combined


def both(one: Operations, other: Operations) -> Operations:
    return {name: one.get(name, Sent()) + other.get(name, Sent()) for name in {**one, **other}}


def runs(on_nodes: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield (ranks on a node, number of consecutive nodes with as many)."""
    for count, nodes in groupby(on_nodes):
        yield count, len(list(nodes))


def together(
    some: Iterable[RepeatedRanks], more: Iterable[RepeatedRanks]
) -> Iterator[RepeatedRanks]:
    """Yield the sums of two accounts of the same ranks.

    Where `more` has the same operations for all ranks of each run of `some`, runs stay; else ranks
    come one by one.
    """
    one, other = list(some), list(more)
    if len(one) == len(other) and all(
        len(ranks) * times == len(few) * repeated and len(few) == 1
        for (ranks, times), (few, repeated) in zip(one, other, strict=True)
    ):
        for (ranks, times), ([operations], _) in zip(one, other, strict=True):
            yield [both(each, operations) for each in ranks], times
        return
    pairs = zip(_each(one), _each(other), strict=True)
    yield [both(first, second) for first, second in pairs], 1


def _each(alike: Iterable[RepeatedRanks]) -> Iterator[Operations]:
    """Yield the operations of each rank."""
    for ranks, times in alike:
        for _ in range(times):
            yield from ranks
