"""What was sent, along which axis, by which operation, and how long it was waited for (design §7).

Bytes follow one convention per rank, whatever algorithm carried them: with N ranks and a tensor of B bytes, all_reduce counts
2(N-1)/N·B, reduce_scatter, all_gather and broadcast (N-1)/N·B, all_to_all what goes to others, send B. A receive counts no bytes
(its sender did) but its waiting. `inside` and `between` split the bytes by the share of the peers on the same and on other nodes.
"""

from dataclasses import asdict, dataclass
from functools import cache


@dataclass
class Entry:
    count: int = 0
    bytes: int = 0
    inside: int = 0  # bytes to ranks of the same node
    between: int = 0  # bytes to ranks of other nodes
    shared: int = 0  # bytes read in the memory of ranks of the same node: not sent
    seconds: float = 0.0  # waited by the host

    def sent(self, inside: int, between: int) -> None:
        self.count += 1
        self.bytes += inside + between
        self.inside += inside
        self.between += between

    def clear(self) -> None:
        self.count = self.bytes = self.inside = self.between = 0
        self.seconds = 0.0


@cache
def evenly(size: int, ranks: int, elsewhere: int) -> tuple[int, int]:
    """(inside, between): what a rank sends that gives each of the others size / ranks bytes, of whom so many are on other nodes."""
    sent = size * (ranks - 1) // ranks
    between = round(sent * (elsewhere / max(1, ranks - 1)))
    return sent - between, between


class Ledger:
    def __init__(self) -> None:
        self._entries: dict[tuple[str, str], Entry] = {}

    def entry(self, axis: str, operation: str) -> Entry:
        """The running totals of one operation along one axis."""
        found = self._entries.get((axis, operation))
        if found is None:
            found = self._entries[axis, operation] = Entry()
        return found

    @property
    def seconds(self) -> float:
        """Waited in all operations together."""
        return sum(entry.seconds for entry in self._entries.values())

    def reset(self) -> None:
        """Count anew; operations under way hold their entry, so entries are emptied, not replaced."""
        for entry in self._entries.values():
            entry.clear()

    def as_dict(self) -> dict[str, dict[str, dict[str, float]]]:
        """axis -> operation -> totals, for summary.json; what never happened is left out."""
        totals: dict[str, dict[str, dict[str, float]]] = {}
        for (axis, operation), entry in sorted(self._entries.items()):
            if entry.count:
                totals.setdefault(axis, {})[operation] = asdict(entry)
        return totals
