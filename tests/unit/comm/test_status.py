"""The slot of a rank, read while the rank writes it."""

from typing import Any

from hpczero.comm.status import Status, WaitPoint, read


class Written:
    """A slot that is written while it is read: each look finds the next of these contents."""

    def __init__(self, *contents: bytes) -> None:
        self._contents = list(contents)

    def __getitem__(self, part: slice) -> bytes:
        content = self._contents[0]
        del self._contents[: len(self._contents) > 1]
        return content[part]


def test_a_look_amid_a_writing_is_taken_again() -> None:
    status = Status()
    entry = status.enter("tensor", (0, 1))
    works = bytes(status.slot)
    status.begin_wait(WaitPoint(b"all_reduce", entry, 7))
    waits = bytes(status.slot)
    differing = [at for at in range(len(works)) if works[at] != waits[at]]
    first, last = differing[0], differing[-1]
    for at in range(first + 1, last + 1):  # so far has it been written
        mixture = waits[:at] + works[at:]
        slot: Any = Written(works, mixture, waits)
        state = read(slot, 0.0, whole=False)
        assert (state.axis, state.number) == ("tensor", 7)
        assert state.waits_in == "all_reduce (number 7 along tensor)"


def test_a_slot_that_is_always_written_is_read_all_the_same() -> None:
    status = Status()
    contents = []
    for step in range(1000):
        status.at_step(step)
        contents.append(bytes(status.slot[:8192]))
    slot: Any = Written(*contents)
    assert 0 < read(slot, 0.0, whole=False).step < 999
