"""A tracker that fails, hangs or is slow: the run hears of it once, and never waits."""

import threading
import time
from collections.abc import Sequence

import pytest

from hpczero.errors import InputError
from hpczero.track.item import Item
from hpczero.track.lane import Lane
from tests.support.tracked import line


class Recorder:
    def __init__(self) -> None:
        self.steps: list[int] = []
        self.is_closed = False
        self.is_given_up = False

    def write(self, items: Sequence[Item]) -> None:
        self.steps += [item.step for item in items]

    def close(self) -> None:
        self.is_closed = True

    def give_up(self) -> None:
        self.is_given_up = True


def end_of(lane: Lane, seconds: float = 60.0) -> list[str]:
    lane.end()
    return lane.wait(time.monotonic() + seconds)


def test_all_items_arrive_in_order() -> None:
    recorder = Recorder()
    lane = Lane("it", lambda: recorder)
    for step in range(1, 1500):
        lane.put(line(step, 1.0))
    assert end_of(lane) == []
    assert recorder.steps == list(range(1, 1500))
    assert recorder.is_closed


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError(28, "No space left on device"), "OSError: [Errno 28] No space left on device"),
        (InputError("no such function"), "no such function"),
        (SystemExit(3), "SystemExit: 3"),
        (ValueError("two\nlines \x1b[31m"), r"ValueError: two\nlines \x1b[31m"),
    ],
)
@pytest.mark.parametrize("call", ["make", "write", "close"])
def test_a_failure_is_said_once(call: str, error: BaseException, said: str) -> None:
    class Failing(Recorder):
        def write(self, items: Sequence[Item]) -> None:
            if call == "write":
                raise error

        def close(self) -> None:
            if call == "close":
                raise error

    def make() -> Recorder:
        if call == "make":
            raise error
        return Failing()

    lane = Lane("it", make)
    lane.put(line(1, 1.0))
    assert end_of(lane) == [f"it gets no more of this run: {said}"]
    lane.put(line(2, 1.0))
    assert lane.problems() == []


def test_a_tracker_that_hangs_costs_lines_and_no_time() -> None:
    goes_on, has_begun = threading.Event(), threading.Event()

    class Hanging(Recorder):
        def write(self, items: Sequence[Item]) -> None:
            has_begun.set()
            goes_on.wait()
            super().write(items)

    hanging = Hanging()
    lane = Lane("it", lambda: hanging, most=10)
    lane.put(line(1, 1.0))
    assert has_begun.wait(60)
    for step in range(2, 100):
        lane.put(line(step, 1.0))
    assert lane.problems() == ["it is slow: 10 lines wait for it, further ones are dropped"]
    lane.put(line(100, 1.0))
    assert lane.problems() == []
    assert end_of(lane, 0.0) == [
        "it was not done in time at the end of this run: given up",
        "it was slow: 89 lines for it were dropped",
    ]
    assert hanging.is_given_up
    goes_on.set()
    assert lane.wait(time.monotonic() + 60) == ["it was slow: 89 lines for it were dropped"]
    assert hanging.steps == list(range(1, 12))
