"""What happened when on this rank (`train.trace`).

The main track holds what the training thread does, one thing inside the other: spans (forward, backward, ...), waits for an operation, and the
rank's own part in operations (sums, copies; what is below `SHORTEST` belongs to what it happens in). Beside it are the operations of each
axis, from start to end, which may overlap. Times are nanoseconds of the host's monotonic clock.

Kept are the last `STEPS` steps, fewer where they would be more than `EVENTS` events; a step of more events than that loses its last ones.
What comes before the first step is not kept.
"""

import time
from array import array
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from functools import cache
from typing import NamedTuple


# What was sent, along which axis, by which operation, and how long it was waited for (design §7).
#
# Bytes follow one convention per rank, whatever algorithm carried them: with N ranks and a tensor of B bytes, all_reduce counts
# 2(N-1)/N·B, reduce_scatter, all_gather and broadcast (N-1)/N·B, all_to_all what goes to others, send B. A receive counts no bytes
# (its sender did) but its waiting. `inside` and `between` split the bytes by the share of the peers on the same and on other nodes.
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


STEPS = 20
EVENTS = 200_000  # of 40 bytes each
SHORTEST = 20_000  # ns

SPAN, WAIT, ADVANCE, OPERATION = "span", "wait", "advance", "operation"


class What(NamedTuple):
    """`peer`: the other rank of a message; -1: none."""

    kind: str
    name: str
    axis: str = ""
    peer: int = -1
    unfinished: bool = False


class Event(NamedTuple):
    """`bytes` as in the ledger; `number` of the operation, equal on all its ranks, or what a span was given; -1: none."""

    what: What
    begin: int
    end: int
    bytes: int = 0
    number: int = -1


ROW = 5  # numbers in a row: as an event, with the place in the list of whats


@dataclass
class Step:
    number: int
    rows: "array[int]" = field(default_factory=lambda: array("q"))

    @property
    def size(self) -> int:
        return len(self.rows) // ROW


class Trace:
    """Keeps nothing; `Recording` does."""

    def step(self, number: int) -> AbstractContextManager[object]:
        """Around a step; what follows it until the next one belongs to it, too."""
        return _NOTHING

    def span(self, name: str, number: int = -1) -> AbstractContextManager[object]:
        return _NOTHING

    def begin(self, name: str, number: int = -1) -> None:
        """As `span`, for where nothing is raised before the `end`."""

    def end(self) -> None:
        """Of the span or wait that has begun last."""

    def now(self) -> int:
        return 0

    def wait(self, axis: str, operation: str, number: int) -> None:
        """Begins; `end` ends it."""

    def advanced(self, axis: str, operation: str, begun: int) -> None:
        """Since `begun` (of `now`) this rank has done its part in an operation."""

    def started(self, what: tuple[str, str, int], size: int, number: int) -> int:
        """An operation (axis, name, peer); what is returned names it in `finished`."""
        return 0

    def finished(self, ticket: int) -> None:
        """It is done."""


class Recording(Trace):
    """Keeps the last steps in rows of numbers. Whoever reads it from another thread may miss what happens meanwhile."""

    def __init__(self, steps: int = STEPS, events: int = EVENTS) -> None:
        self.steps: deque[Step] = deque()
        self.first = 0  # the first step that there was
        self.lost = 0  # events of steps that were too large
        self._most_steps = steps
        self._room = events
        self._whats: dict[tuple[str, str, str, int, bool], int] = {}
        self._open: list[tuple[int, int, int]] = []  # begun and not ended: what, begin, number
        self._under_way: dict[
            int, tuple[int, int, int, int]
        ] = {}  # ticket -> what, begin, bytes, number
        self._tickets = 0
        self._ends = _Ends(self)

    def step(self, number: int) -> AbstractContextManager[object]:
        if len(self.steps) == self._most_steps:
            self._drop_oldest()
        self.steps.append(Step(number))
        self.first = self.first or number
        return self.span("step", number)

    def span(self, name: str, number: int = -1) -> AbstractContextManager[object]:
        self.begin(name, number)
        return self._ends

    def begin(self, name: str, number: int = -1) -> None:
        self._open.append((self._place(SPAN, name), time.perf_counter_ns(), number))

    def end(self) -> None:
        what, begin, number = self._open.pop()
        self._keep(what, begin, time.perf_counter_ns(), 0, number)

    def now(self) -> int:
        return time.perf_counter_ns()

    def wait(self, axis: str, operation: str, number: int) -> None:
        self._open.append((self._place(WAIT, operation, axis), time.perf_counter_ns(), number))

    def advanced(self, axis: str, operation: str, begun: int) -> None:
        now = time.perf_counter_ns()
        if now - begun >= SHORTEST:
            self._keep(self._place(ADVANCE, operation, axis), begun, now, 0, -1)

    def started(self, what: tuple[str, str, int], size: int, number: int) -> int:
        axis, name, peer = what
        self._tickets += 1
        self._under_way[self._tickets] = (
            self._place(OPERATION, name, axis, peer),
            time.perf_counter_ns(),
            size,
            number,
        )
        return self._tickets

    def finished(self, ticket: int) -> None:
        what, begin, size, number = self._under_way.pop(ticket, (-1, 0, 0, 0))
        if what >= 0:  # else it was started before the recording
            self._keep(what, begin, time.perf_counter_ns(), size, number)

    @property
    def whats(self) -> list[What]:
        """What the first number of a row stands for."""
        return [What(*what) for what in self._whats]

    def keep_unfinished(self) -> None:
        """At the end: what has begun and not ended is kept, and said to be unfinished."""
        now, whats = time.perf_counter_ns(), self.whats
        begun = [(what, begin, 0, number) for what, begin, number in reversed(self._open)]
        for what, begin, size, number in begun + list(self._under_way.values()):
            self._keep(
                self._place(*whats[what]._replace(unfinished=True)), begin, now, size, number
            )

    def _place(
        self, kind: str, name: str, axis: str = "", peer: int = -1, unfinished: bool = False
    ) -> int:
        return self._whats.setdefault((kind, name, axis, peer, unfinished), len(self._whats))

    def _keep(self, *row: int) -> None:
        while self._room == 0 and len(self.steps) > 1:
            self._drop_oldest()
        if self._room and self.steps:
            self._room -= 1
            self.steps[-1].rows.extend(row)
        elif self.steps:
            self.lost += 1

    def _drop_oldest(self) -> None:
        self._room += self.steps.popleft().size


class _Ends:
    """A span, as a context: one for all, as spans end in the reverse order of their begins."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        self._recording.end()


_NOTHING = nullcontext()


def events(rows: "array[int]", whats: list[What]) -> Iterator[Event]:
    for at in range(0, len(rows), ROW):
        what, *rest = rows[at : at + ROW]
        yield Event(whats[what], *rest)
