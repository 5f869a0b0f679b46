"""Records of a rank's communication: a ledger of bytes and waits, a trace of what happened when.

The ledger counts bytes per rank by one convention, whatever algorithm carried them. With N ranks
and a tensor of B bytes, all_reduce counts 2(N-1)/N·B; reduce_scatter, all_gather and broadcast
(N-1)/N·B; all_to_all what goes to others; send B. A receive counts no bytes (its sender did) but
its waiting. `inside` and `between` split the bytes by the share of the peers on the same node and
on other nodes.

The trace (`train.trace`) has a main track with what the training thread does, one thing inside the
other: spans (forward, backward, ...), waits for an operation, and the rank's own part in operations
(sums, copies; what is shorter than `SHORTEST` belongs to what it happens in). Beside it are the
operations of each axis, from start to end, which may overlap. Times are nanoseconds of the host's
monotonic clock. The last `STEPS` steps are kept, fewer where they would be more than `EVENTS`
events. A step of more events than that loses its last ones. What comes before the first step is not
kept.
"""

import time
from array import array
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from functools import cache
from typing import NamedTuple

STEPS = 20
EVENTS = 200_000  # of 40 bytes each
SHORTEST = 20_000  # ns
ROW = 5  # numbers in a row: as an event, with the number of an `EventKind` in the list of them
SPAN, WAIT, ADVANCE, OPERATION = "span", "wait", "advance", "operation"


@dataclass
class Entry:
    """Totals of one operation along one axis."""

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
        self.count = self.bytes = self.inside = self.between = self.shared = 0
        self.seconds = 0.0


@cache
def evenly(size: int, ranks: int, elsewhere: int) -> tuple[int, int]:
    """Return the bytes (inside, between) that a rank sends if each other rank gets size / ranks.

    `elsewhere`: how many of the others are on other nodes.
    """
    sent = size * (ranks - 1) // ranks
    between = round(sent * (elsewhere / max(1, ranks - 1)))
    return sent - between, between


class Ledger:
    def __init__(self) -> None:
        self._entries: dict[tuple[str, str], Entry] = {}

    def entry(self, axis: str, operation: str) -> Entry:
        """Return the running totals of one operation along one axis."""
        entry = self._entries.get((axis, operation))
        if entry is None:
            entry = self._entries[axis, operation] = Entry()
        return entry

    @property
    def seconds(self) -> float:
        """Seconds waited in all operations together."""
        return sum(entry.seconds for entry in self._entries.values())

    def reset(self) -> None:
        """Count anew; entries are emptied, not replaced, as operations in flight hold theirs."""
        for entry in self._entries.values():
            entry.clear()

    def as_dict(self) -> dict[str, dict[str, dict[str, float]]]:
        """Return axis -> operation -> totals, for summary.json, without what never happened."""
        totals: dict[str, dict[str, dict[str, float]]] = {}
        for (axis, operation), entry in sorted(self._entries.items()):
            if entry.count:
                totals.setdefault(axis, {})[operation] = asdict(entry)
        return totals


class EventKind(NamedTuple):
    """`peer`: the other rank of a message; -1: none."""

    kind: str
    name: str
    axis: str = ""
    peer: int = -1
    unfinished: bool = False


class Event(NamedTuple):
    """`bytes` as in the ledger.

    `number`: of the operation, equal on all its ranks, or what a span was given; -1: none.
    """

    what: EventKind
    begin: int
    end: int
    bytes: int = 0
    number: int = -1


@dataclass
class TracedStep:
    number: int
    rows: "array[int]" = field(default_factory=lambda: array("q"))

    @property
    def size(self) -> int:
        return len(self.rows) // ROW


_NOTHING = nullcontext()


class Trace:
    """A trace that keeps nothing; `Recording` keeps it."""

    def step(self, number: int) -> AbstractContextManager[object]:
        """Enclose a step; what follows it until the next one belongs to it, too."""
        return _NOTHING

    def span(self, name: str, number: int = -1) -> AbstractContextManager[object]:
        return _NOTHING

    def begin(self, name: str, number: int = -1) -> None:
        """Begin a span, where nothing is raised before its `end`."""

    def end(self) -> None:
        """End the span or wait that has begun last."""

    def now(self) -> int:
        return 0

    def wait(self, axis: str, operation: str, number: int) -> None:
        """Begin a wait; `end` ends it."""

    def advanced(self, axis: str, operation: str, begun: int) -> None:
        """Record that this rank has done its part in an operation since `begun` (of `now`)."""

    def started(self, what: tuple[str, str, int], size: int, number: int) -> int:
        """Record an operation (axis, name, peer); return its ticket for `finished`."""
        return 0

    def finished(self, ticket: int) -> None:
        """Record that an operation is done."""


class Recording(Trace):
    """A trace that keeps the last steps in rows of numbers.

    Another thread that reads it may miss what happens meanwhile.
    """

    def __init__(self, steps: int = STEPS, events: int = EVENTS) -> None:
        self.steps: deque[TracedStep] = deque()
        self.first = 0  # the first step that there was
        self.lost = 0  # events of steps that were too large
        self._most_steps = steps
        self._room = events
        self._whats: dict[tuple[str, str, str, int, bool], int] = {}
        self._open: list[tuple[int, int, int]] = []  # begun and not ended: what, begin, number
        # ticket -> what, begin, bytes, number
        self._in_flight: dict[int, tuple[int, int, int, int]] = {}
        self._tickets = 0
        self._ends = _Ends(self)

    def step(self, number: int) -> AbstractContextManager[object]:
        if len(self.steps) == self._most_steps:
            self._drop_oldest()
        self.steps.append(TracedStep(number))
        self.first = self.first or number
        return self.span("step", number)

    def span(self, name: str, number: int = -1) -> AbstractContextManager[object]:
        self.begin(name, number)
        return self._ends

    def begin(self, name: str, number: int = -1) -> None:
        self._open.append((self._index(SPAN, name), time.perf_counter_ns(), number))

    def end(self) -> None:
        what, begin, number = self._open.pop()
        self._keep(what, begin, time.perf_counter_ns(), 0, number)

    def now(self) -> int:
        return time.perf_counter_ns()

    def wait(self, axis: str, operation: str, number: int) -> None:
        self._open.append((self._index(WAIT, operation, axis), time.perf_counter_ns(), number))

    def advanced(self, axis: str, operation: str, begun: int) -> None:
        now = time.perf_counter_ns()
        if now - begun >= SHORTEST:
            self._keep(self._index(ADVANCE, operation, axis), begun, now, 0, -1)

    def started(self, what: tuple[str, str, int], size: int, number: int) -> int:
        axis, name, peer = what
        self._tickets += 1
        index = self._index(OPERATION, name, axis, peer)
        self._in_flight[self._tickets] = index, time.perf_counter_ns(), size, number
        return self._tickets

    def finished(self, ticket: int) -> None:
        what, begin, size, number = self._in_flight.pop(ticket, (-1, 0, 0, 0))
        if what >= 0:  # else it was started before the recording
            self._keep(what, begin, time.perf_counter_ns(), size, number)

    @property
    def whats(self) -> list[EventKind]:
        """The list in which the first number of a row is an index."""
        return [EventKind(*what) for what in self._whats]

    def keep_unfinished(self) -> None:
        """Keep what has begun and not ended, as unfinished; to be called at the end."""
        now = time.perf_counter_ns()
        whats = self.whats
        begun = [(what, begin, 0, number) for what, begin, number in reversed(self._open)]
        for what, begin, size, number in [*begun, *self._in_flight.values()]:
            unfinished = self._index(*whats[what]._replace(unfinished=True))
            self._keep(unfinished, begin, now, size, number)

    def _index(
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
    """A span as a context; one serves all, as spans end in reverse order."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        self._recording.end()


def events(rows: "array[int]", whats: list[EventKind]) -> Iterator[Event]:
    for at in range(0, len(rows), ROW):
        what, *numbers = rows[at : at + ROW]
        yield Event(whats[what], *numbers)
