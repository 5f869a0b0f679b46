"""The slot of a rank, read while the rank writes it."""

from typing import Any

import pytest

from hpczero.comm.status import CLEARED, Status, WaitPoint, read


class Written:
    """A slot that is written while it is read: each look finds the next of these contents."""

    def __init__(self, *contents: bytes) -> None:
        self._contents = list(contents)

    def __getitem__(self, part: slice) -> bytes:
        content = self._contents[0]
        if len(self._contents) > 1:
            del self._contents[0]
        return content[part]


def test_a_look_amid_a_writing_is_taken_again() -> None:
    status = Status()
    entry = status.enter("tensor", (0, 1))
    status.end_wait()
    works = bytes(status.slot)
    status.begin_wait(WaitPoint(b"all_reduce", entry, 7))
    waits = bytes(status.slot)
    differing = [at for at in range(len(works)) if works[at] != waits[at]]
    mixtures = [waits[:at] + works[at:] for at in differing[1:]]  # so far has it been written
    slot: Any = Written(works, *mixtures, waits, waits, works)
    state = read(slot, 0.0, whole=False)
    assert (state.axis, state.number) == ("tensor", 7)
    assert state.waits_in == "all_reduce (number 7 along tensor)"
    assert state.waited is not None


def test_a_slot_that_is_always_written_is_read_all_the_same() -> None:
    status = Status()
    contents = []
    for step in range(1000):
        status.at_step(step)
        contents.append(bytes(status.slot[:CLEARED]))
    slot: Any = Written(*contents)
    assert 0 < read(slot, 0.0, whole=False).step < 999


def test_a_wait_is_over_only_once_it_is_written_when(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the rank would seem to have done nothing since before it waited."""
    status = Status()
    status.begin_wait(WaitPoint(b"all_reduce"))
    looks = []

    def monotonic() -> float:
        looks.append(read(status.slot, 1e6, whole=False).waited)
        return 1e6

    monkeypatch.setattr("time.monotonic", monotonic)
    status.end_wait()
    [waited] = looks
    assert waited is not None
    state = read(status.slot, 1e6, whole=False)
    assert (state.waited, state.idle) == (None, 0.0)
