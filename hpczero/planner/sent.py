"""Bytes that ranks send, by operation, and their totals (pure)."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property


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
