"""What each rank is doing, in a slot of memory that the other ranks of its node can read.

A rank writes its own slot and never waits for a reader: `started` with every operation, `waits` and `goes_on` around every wait. Whoever
reads a slot that is being written may see a mixture; slots are judged only when nothing has happened in them for long.

A slot: a head, then one entry per group with the operations started last in it, numbered in the order in which the group starts them.
"""

import os
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import NamedTuple

_PROCESS = struct.Struct("<QQQ")  # process id, its namespace, the file that its stacks are written to
_STEP = struct.Struct("<q")
_CHANGED = struct.Struct("<d")  # when an operation was last started or a wait ended; the node's monotonic clock
_WAIT = struct.Struct("<dqQ64s")  # since when (0: it does not wait), entry of the group (-1: none), number, label
_ENTRY = struct.Struct("<Q40s")  # identity of the group (0: free), axis
_RECORD = struct.Struct("<QQ64s")  # number (0: none), code, label
_STEP_AT, _CHANGED_AT, _WAIT_AT, _ENTRIES_AT = 24, 32, 40, 128
_RECORDS = 4
_ENTRY_SIZE = 64 + _RECORDS * _RECORD.size
_ENTRIES = 48
SLOT = _ENTRIES_AT + _ENTRIES * _ENTRY_SIZE

NOWHERE = -1  # the entry of a wait that belongs to no group


class Signature(NamedTuple):
    """What must be equal on all ranks of a collective: the label says it to people."""

    code: int
    label: bytes

    @classmethod
    def of(cls, *parts: object) -> "Signature":
        label = " ".join(str(part) for part in parts if part != "").encode()
        return cls(int.from_bytes(blake2b(label, digest_size=8).digest(), "little"), label[:64])


class Place(NamedTuple):
    """Where a rank waits: operation `number` of a group, or something else that the label says, with `ranks`."""

    label: bytes
    entry: int = NOWHERE
    number: int = 0
    ranks: tuple[int, ...] = ()


class Wait(NamedTuple):
    place: Place
    since: float
    missing: Callable[[], Sequence[int]] | None  # those that have not come, where that can be asked


class Status:
    """The writer of this rank's slot; also keeps what only this process needs."""

    def __init__(self) -> None:
        self.explain: Callable[[], str] = str  # who does not fit what this rank waits for: the watchdog knows
        self.last_words: Callable[[], object] = str  # called before an error ends the process; raises nothing
        self.slot = memoryview(bytearray(SLOT))
        self.ranks_of: dict[int, tuple[int, ...]] = {}  # entry -> ranks of the group
        self._made: dict[tuple[str, tuple[int, ...]], int] = {}  # how often there has been such a group
        self.wait: Wait | None = None
        _STEP.pack_into(self.slot, _STEP_AT, -1)

    def move_to(self, slot: memoryview) -> None:
        """From now on write there."""
        slot[:] = self.slot
        self.slot = slot

    def identify(self, stacks: int) -> None:
        _PROCESS.pack_into(self.slot, 0, os.getpid(), process_namespace(), stacks)

    def at_step(self, step: int) -> None:
        _STEP.pack_into(self.slot, _STEP_AT, step)

    def enter(self, axis: str, ranks: Sequence[int]) -> int:
        """An entry for a new group; its operations are recorded there."""
        entry = next((entry for entry in range(_ENTRIES) if entry not in self.ranks_of), NOWHERE)
        assert entry != NOWHERE, f"a rank takes part in at most {_ENTRIES} groups at a time"
        self.ranks_of[entry] = tuple(ranks)
        occurrence = self._made[axis, tuple(ranks)] = self._made.get((axis, tuple(ranks)), 0) + 1
        begin = _entry_at(entry)
        self.slot[begin : begin + _ENTRY_SIZE] = bytes(_ENTRY_SIZE)
        _ENTRY.pack_into(self.slot, begin, identity(axis, ranks, occurrence), axis.encode()[:40])
        return entry

    def group_at(self, entry: int) -> tuple[str, str]:
        """Axis and identity."""
        name, axis = _ENTRY.unpack_from(self.slot, _entry_at(entry))
        return _text(axis), str(name)

    def in_words(self, place: Place) -> str:
        axis = self.group_at(place.entry)[0] if place.entry >= 0 else ""
        return in_words(_text(place.label), axis, place.number)

    def leave(self, entry: int) -> None:
        _ENTRY.pack_into(self.slot, _entry_at(entry), 0, b"")
        del self.ranks_of[entry]

    def started(self, entry: int, number: int, signature: Signature) -> None:
        at = _ENTRIES_AT + entry * _ENTRY_SIZE + 64 + number % _RECORDS * _RECORD.size
        _RECORD.pack_into(self.slot, at, number, signature.code, signature.label)
        _CHANGED.pack_into(self.slot, _CHANGED_AT, time.monotonic())

    def waits(self, place: Place, missing: Callable[[], Sequence[int]] | None = None) -> None:
        now = time.monotonic()
        self.wait = Wait(place, now, missing)
        _WAIT.pack_into(self.slot, _WAIT_AT, now, place.entry, place.number, place.label)

    def goes_on(self) -> None:
        self.wait = None
        _WAIT.pack_into(self.slot, _WAIT_AT, 0.0, NOWHERE, 0, b"")
        _CHANGED.pack_into(self.slot, _CHANGED_AT, time.monotonic())

    @contextmanager
    def waiting(self, label: str, ranks: Sequence[int]) -> Iterator[None]:
        """Around a call that returns only once all these ranks have called it."""
        self.waits(Place(label.encode()[:64], ranks=tuple(ranks)))
        try:
            yield
        finally:
            self.goes_on()


@dataclass(frozen=True)
class Operation:
    number: int
    code: int
    label: str


@dataclass(frozen=True)
class State:
    """A slot as read; ages in seconds."""

    pid: int
    namespace: int
    stacks: int
    step: int
    idle: float  # since an operation was last started or a wait ended
    waited: float | None
    place: str  # where it waits, in words
    started: dict[str, list[Operation]] = field(default_factory=dict)  # identity of the group -> its last operations, oldest first

    @property
    def resting(self) -> float:
        """For how long nothing has happened on this rank."""
        return self.idle if self.waited is None else self.waited


def read(slot: memoryview, now: float) -> State:
    pid, namespace, stacks = _PROCESS.unpack_from(slot, 0)
    (step,), (changed,) = _STEP.unpack_from(slot, _STEP_AT), _CHANGED.unpack_from(slot, _CHANGED_AT)
    since, entry, number, label = _WAIT.unpack_from(slot, _WAIT_AT)
    started: dict[str, list[Operation]] = {}
    axes = {}
    for position in range(_ENTRIES):
        begin = _entry_at(position)
        name, axis = _ENTRY.unpack_from(slot, begin)
        if name:
            axes[position] = _text(axis)
            records = (_RECORD.unpack_from(slot, begin + 64 + index * _RECORD.size) for index in range(_RECORDS))
            started[str(name)] = sorted((Operation(n, code, _text(text)) for n, code, text in records if n), key=lambda done: done.number)
    place = in_words(_text(label), axes.get(entry, ""), number)
    return State(pid, namespace, stacks, step, now - changed, now - since if since else None, place, started)


def in_words(label: str, axis: str, number: int) -> str:
    """ "all_reduce of 4096 bytes of float32 (number 7 along data)" """
    return f"{label} (number {number} along {axis})" if axis else label


def identity(axis: str, ranks: Sequence[int], occurrence: int) -> int:
    """Names a group, equal on all its ranks, as they make their groups together; never 0."""
    text = f"{axis} {' '.join(map(str, ranks))} {occurrence}".encode()
    return int.from_bytes(blake2b(text, digest_size=8).digest(), "little") | 1


def process_namespace() -> int:
    """Process ids mean something only to processes of the same namespace."""
    return os.stat("/proc/self/ns/pid").st_ino


def _entry_at(entry: int) -> int:
    return _ENTRIES_AT + entry * _ENTRY_SIZE


def _text(field: bytes) -> str:
    return field.rstrip(b"\0").decode(errors="replace")
