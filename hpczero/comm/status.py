"""The status of each rank, in a slot of memory that the other ranks of its node can read.

A rank writes its own slot and never waits for a reader: `started` with every operation,
`begin_wait` and `end_wait` around every wait. A reader takes the head of a slot when two looks at
it were alike, or after many the last. Of the operations it may see a mixture, where they are being
written: ranks are judged only when nothing has happened in their slots for long.

A slot has a head, one entry per group, and for each group the operations that it started last,
numbered in the order in which the group starts them. Behind every operation stands a hash of all
that the group has started up to it. So ranks whose operations differ can be told apart long after
the first operation that differed has been overwritten.
"""

import os
import struct
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Any, NamedTuple

_PROCESS = struct.Struct("<QQQ")  # process id, its namespace, the file for its stacks
_STEP = struct.Struct("<q")
# When an operation was last started or a wait ended; the node's monotonic clock.
_CHANGED = struct.Struct("<d")
# Since when (0: it does not wait), entry of the group (-1: none), number, label.
_WAIT = struct.Struct("<dqQ64s")
_ENTRY = struct.Struct("<Q40s")  # identity of the group (0: free), axis
_RECORD = struct.Struct("<QQQd64s")  # number (0: none), code, history, when, label
_DOING = struct.Struct("<16s")
# When the rank last looked for somebody who wants to see its node, and saw one; monotonic, 0: never
_LOOKED = struct.Struct("<dd")
_STEP_AT, _CHANGED_AT, _WAIT_AT, _DOING_AT, _LOOKED_AT, _ENTRIES_AT = 24, 32, 40, 128, 144, 192
_RECORDS = 64  # operations of a group: more than are mostly started in one go
_NUMBERS = struct.Struct("<" + _RECORDS * f"Q{_RECORD.size - 8}x")  # those of a group's records
_ENTRY_SIZE = 64
_HISTORY_SIZE = _RECORDS * _RECORD.size
_ENTRIES = 48
CLEARED = _ENTRIES_AT + _ENTRIES * _ENTRY_SIZE  # bytes that must be 0 where a slot begins
SLOT = CLEARED + _ENTRIES * _HISTORY_SIZE
_MASK = (1 << 64) - 1

_LOOKS = 100  # at a head that is being written
_LARGEST = 1e12  # seconds: more are nonsense
NOWHERE = -1  # the entry of a wait that belongs to no group


class Signature(NamedTuple):
    """A code that is equal on all ranks of a collective, and a label that says it to people."""

    code: int
    label: bytes

    @classmethod
    def of(cls, *parts: object) -> "Signature":
        label = " ".join(str(part) for part in parts if part != "").encode()
        return cls(int.from_bytes(blake2b(label, digest_size=8).digest(), "little"), label[:64])


class WaitPoint(NamedTuple):
    """A place where a rank waits: operation `number` of a group, or what `label` says.

    `ranks`: those that it then waits with.
    """

    label: bytes
    entry: int = NOWHERE
    number: int = 0
    ranks: tuple[int, ...] = ()


class Wait(NamedTuple):
    point: WaitPoint
    since: float
    missing: Callable[[], Sequence[int]] | None  # those that have not come, where that can be asked


class Status:
    """The writer of this rank's slot; it also keeps what only this process needs."""

    def __init__(self) -> None:
        # Says what the other ranks do while this one waits; the watchdog sets it.
        self.explain: Callable[[], str] = str
        # Called before an error ends the process; raises nothing.
        self.last_words: Callable[[], object] = str
        self.is_to_end = False  # the run was asked to stop, and may soon be killed
        self.slot = memoryview(bytearray(SLOT))
        self.ranks_of: dict[int, tuple[int, ...]] = {}  # entry -> ranks of the group
        # How many groups there have been with this axis and these ranks.
        self._made: dict[tuple[str, tuple[int, ...]], int] = {}
        self._history: dict[int, int] = {}  # entry -> hash of what its group has started
        self.wait: Wait | None = None
        _STEP.pack_into(self.slot, _STEP_AT, -1)
        _CHANGED.pack_into(self.slot, _CHANGED_AT, time.monotonic())

    def move_to(self, slot: memoryview) -> None:
        """Write to this slot from now on; its first CLEARED bytes must be 0."""
        slot[:CLEARED] = self.slot[:CLEARED]
        for entry in self.ranks_of:  # entries that are not used take up no memory
            history = _history_of(entry)
            slot[history] = self.slot[history]
        self.slot = slot

    def identify(self, stacks: int) -> None:
        _PROCESS.pack_into(self.slot, 0, os.getpid(), process_namespace(), stacks)

    def at_step(self, step: int) -> None:
        _STEP.pack_into(self.slot, _STEP_AT, step)

    @contextmanager
    def doing(self, what: str) -> Iterator[None]:
        """Enclose a part of the run that is told apart from its steps: "save", "data", ..."""
        _DOING.pack_into(self.slot, _DOING_AT, what.encode())
        try:
            yield
        finally:
            _DOING.pack_into(self.slot, _DOING_AT, b"")

    def looked(self, now: float, asked: float) -> None:
        """Note that this rank has looked now, and last saw a question at the time `asked`."""
        _LOOKED.pack_into(self.slot, _LOOKED_AT, now, asked)

    def enter(self, axis: str, ranks: Sequence[int]) -> int:
        """Return an entry for a new group; its operations are recorded there."""
        entry = next((entry for entry in range(_ENTRIES) if entry not in self.ranks_of), NOWHERE)
        assert entry != NOWHERE, f"a rank takes part in at most {_ENTRIES} groups at a time"
        key = axis, tuple(ranks)
        self.ranks_of[entry] = key[1]
        occurrence = self._made[key] = self._made.get(key, 0) + 1
        self._history[entry] = 0
        self.slot[_history_of(entry)] = bytes(_HISTORY_SIZE)
        name = identity(axis, ranks, occurrence)
        _ENTRY.pack_into(self.slot, _entry_at(entry), name, axis.encode()[:40])
        return entry

    def group_at(self, entry: int) -> tuple[str, str]:
        """Return axis and identity of the group."""
        name, axis = _ENTRY.unpack_from(self.slot, _entry_at(entry))
        return _text(axis), str(name)

    def in_words(self, point: WaitPoint) -> str:
        axis = self.group_at(point.entry)[0] if point.entry >= 0 else ""
        return in_words(_text(point.label), axis, point.number)

    def leave(self, entry: int) -> None:
        _ENTRY.pack_into(self.slot, _entry_at(entry), 0, b"")
        del self.ranks_of[entry]

    def started(self, entry: int, number: int, signature: Signature) -> None:
        code, label = signature
        history = self._history[entry] = hash((self._history[entry], code)) & _MASK
        at = _history_at(entry) + number % _RECORDS * _RECORD.size
        now = time.monotonic()
        _RECORD.pack_into(self.slot, at, number, code, history, now, label)
        _CHANGED.pack_into(self.slot, _CHANGED_AT, now)

    def begin_wait(
        self, point: WaitPoint, missing: Callable[[], Sequence[int]] | None = None
    ) -> None:
        now = time.monotonic()
        self.wait = Wait(point, now, missing)
        _WAIT.pack_into(self.slot, _WAIT_AT, now, point.entry, point.number, point.label)

    def end_wait(self) -> None:
        self.wait = None
        _CHANGED.pack_into(self.slot, _CHANGED_AT, time.monotonic())  # counts once no wait does
        _WAIT.pack_into(self.slot, _WAIT_AT, 0.0, NOWHERE, 0, b"")

    @contextmanager
    def waiting(self, label: str, ranks: Sequence[int]) -> Iterator[None]:
        """Enclose a call that returns only once all these ranks have called it."""
        self.begin_wait(WaitPoint(label.encode()[:64], ranks=tuple(ranks)))
        try:
            yield
        finally:
            self.end_wait()


@dataclass(frozen=True)
class Operation:
    number: int
    code: int
    label: str
    history: int = 0  # a hash of what the group has started up to this one
    ago: float = 0.0  # seconds since this rank has started it

    @classmethod
    def of(cls, facts: Mapping[str, Any]) -> "Operation":
        numbers = int(facts["number"]), int(facts["code"])
        return cls(*numbers, str(facts["label"]), int(facts["history"]), seconds(facts["ago"]))


@dataclass(frozen=True)
class RankState:
    """The contents of a slot; ages in seconds."""

    pid: int
    namespace: int
    stacks: int
    step: int
    idle: float  # since an operation was last started or a wait ended
    waited: float | None
    waits_in: str  # in words; "" if it does not wait
    # Identity of the group -> its last operations, oldest first.
    started: dict[str, list[Operation]] = field(default_factory=dict)
    group: str = ""  # in whose operation it waits, which has the `number`; "": in no operation
    number: int = 0
    axis: str = ""
    doing: str = ""  # "save", ...; "": the start, if no step has begun, else a step

    @classmethod
    def of(cls, facts: Mapping[str, Any]) -> "RankState":
        """Return a state that was written as `asdict` gives it; an error for anything else."""
        started = {
            str(group): [Operation.of(operation) for operation in operations]
            for group, operations in facts["started"].items()
        }
        return cls(
            int(facts["pid"]),
            int(facts["namespace"]),
            int(facts["stacks"]),
            int(facts["step"]),
            seconds(facts["idle"]),
            None if facts["waited"] is None else seconds(facts["waited"]),
            str(facts["waits_in"]),
            started,
            str(facts["group"]),
            int(facts["number"]),
            str(facts["axis"]),
            str(facts.get("doing", "")),
        )

    def older(self, ago: float) -> "RankState":
        """Return the state `ago` seconds later, if nothing has happened since."""
        waited = None if self.waited is None else self.waited + ago
        return replace(self, idle=self.idle + ago, waited=waited)

    @property
    def resting(self) -> float:
        """Seconds for which nothing has happened on this rank."""
        return self.idle if self.waited is None else self.waited


def seconds(value: Any) -> float:
    """Return a number of seconds that another process has written; ValueError if it is none."""
    number = float(value)
    if not abs(number) < _LARGEST:
        raise ValueError(f"{number} s")
    return number


def read(slot: memoryview, now: float, whole: bool = True, operations: int = _RECORDS) -> RankState:
    """Read a slot. `whole`: with the last so many `operations` of every group."""
    head = _head(slot)
    pid, namespace, stacks = _PROCESS.unpack_from(head, 0)
    (step,) = _STEP.unpack_from(head, _STEP_AT)
    (changed,) = _CHANGED.unpack_from(head, _CHANGED_AT)
    since, entry, number, label = _WAIT.unpack_from(head, _WAIT_AT)
    started: dict[str, list[Operation]] = {}
    for position in range(_ENTRIES) if whole else ():
        name, _ = _ENTRY.unpack_from(head, _entry_at(position))
        if name:
            started[str(name)] = _operations(slot, position, now, operations)
    group, axis = "", ""
    if 0 <= entry < _ENTRIES:
        name, word = _ENTRY.unpack_from(head, _entry_at(entry))
        group, axis = str(name), _text(word)
    place = in_words(_text(label), axis, number)
    waited = now - since if since else None
    done = pid, namespace, stacks, step, now - changed
    doing = _text(_DOING.unpack_from(head, _DOING_AT)[0])
    return RankState(*done, waited, place, started, group, number, axis, doing)


def _head(slot: memoryview) -> bytes:
    """Return a slot's head as two looks found it, if its rank leaves it alone for so long."""
    head = bytes(slot[:CLEARED])
    for _ in range(_LOOKS):
        before, head = head, bytes(slot[:CLEARED])
        if head == before:
            break
    return head


def last_look(slot: memoryview) -> tuple[float, float]:
    """Return when the rank last looked, and when it saw a question (`Status.looked`)."""
    looked, asked = _LOOKED.unpack_from(slot, _LOOKED_AT)
    return looked, asked


def _operations(slot: memoryview, entry: int, now: float, most: int) -> list[Operation]:
    """Return the last operations recorded for a group, oldest first."""
    at = _history_at(entry)
    numbers = sorted(filter(None, _NUMBERS.unpack_from(slot, at)))[-most:]
    records = [
        _RECORD.unpack_from(slot, at + number % _RECORDS * _RECORD.size) for number in numbers
    ]
    kept = [
        Operation(number, code, _text(label), history, now - when)
        for number, code, history, when, label in records
        if number
    ]
    return sorted(kept, key=lambda operation: operation.number)


def in_words(label: str, axis: str, number: int) -> str:
    """Name an operation: "all_reduce of 4096 bytes of float32 (number 7 along data)"."""
    return f"{label} (number {number} along {axis})" if axis else label


def identity(axis: str, ranks: Sequence[int], occurrence: int) -> int:
    """Name a group by a number, never 0.

    It is equal on all ranks of the group, as they make their groups together.
    """
    text = f"{axis} {' '.join(map(str, ranks))} {occurrence}".encode()
    return int.from_bytes(blake2b(text, digest_size=8).digest(), "little") | 1


def process_namespace() -> int:
    """Return the namespace in which this process's id means something."""
    return os.stat("/proc/self/ns/pid").st_ino


def _entry_at(entry: int) -> int:
    return _ENTRIES_AT + entry * _ENTRY_SIZE


def _history_at(entry: int) -> int:
    return CLEARED + entry * _HISTORY_SIZE


def _history_of(entry: int) -> slice:
    return slice(_history_at(entry), _history_at(entry) + _HISTORY_SIZE)


def _text(field: bytes) -> str:
    return field.rstrip(b"\0").decode(errors="replace")
