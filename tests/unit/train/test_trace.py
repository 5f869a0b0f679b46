"""The recorder of `train.trace`: what it keeps of which steps."""

import time
from collections.abc import Callable

import pytest

from hpczero.comm import trace
from hpczero.comm.trace import (
    ADVANCE,
    OPERATION,
    SPAN,
    WAIT,
    Event,
    EventKind,
    Recording,
    Trace,
    events,
)
from tests.support.trace_events import span


def kept(recording: Recording) -> list[Event]:
    return [event for step in recording.steps for event in events(step.rows, recording.whats)]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Sets the time."""
    now = [0]
    monkeypatch.setattr(time, "perf_counter_ns", lambda: now[0])
    return lambda at: now.__setitem__(0, at)


def test_what_is_recorded(clock: Callable[[int], None]) -> None:
    recording = Recording()
    with recording.step(3):
        clock(10)
        ticket = recording.started(("data", "reduce_scatter", -1), 4096, 7)
        with recording.span("backward", 2):
            clock(20)
            recording.wait("data", "reduce_scatter", 7)
            clock(100_000)
            recording.advanced("data", "reduce_scatter", 20)
            recording.advanced(
                "data", "reduce_scatter", 100_001 - trace.SHORTEST
            )  # too short to be shown
            recording.finished(ticket)
            recording.end()
            recording.begin("AdamW")
            clock(100_500)
            recording.end()
        clock(100_600)
    recording.finished(0)  # of before the recording
    assert kept(recording) == [
        Event(EventKind(ADVANCE, "reduce_scatter", "data"), 20, 100_000),
        Event(EventKind(OPERATION, "reduce_scatter", "data"), 10, 100_000, 4096, 7),
        Event(EventKind(WAIT, "reduce_scatter", "data"), 20, 100_000, 0, 7),
        span("AdamW", 100_000, 100_500),
        span("backward", 10, 100_500, 2),
        span("step", 0, 100_600, 3),
    ]


def test_a_span_ends_when_something_is_raised() -> None:
    recording = Recording()

    with (
        pytest.raises(ValueError, match="broken"),
        recording.step(1),
        recording.span("forward"),
        recording.span("attention"),
    ):
        raise ValueError("broken")
    assert [event.what.name for event in kept(recording)] == ["attention", "forward", "step"]


def test_what_has_not_ended_is_kept_as_unfinished(clock: Callable[[int], None]) -> None:
    recording = Recording()
    recording.step(1)
    clock(5)
    recording.started(("data", "all_reduce", -1), 16, 9)
    recording.wait("data", "all_reduce", 9)
    clock(50)
    recording.keep_unfinished()
    assert kept(recording) == [
        Event(EventKind(WAIT, "all_reduce", "data", unfinished=True), 5, 50, 0, 9),
        Event(EventKind(SPAN, "step", unfinished=True), 0, 50, 0, 1),
        Event(EventKind(OPERATION, "all_reduce", "data", unfinished=True), 5, 50, 16, 9),
    ]


def record(recording: Recording, steps: range, spans: int = 0) -> None:
    """`spans` and one event in each step."""
    for number in steps:
        with recording.step(number):
            for _ in range(spans):
                recording.begin("forward")
                recording.end()


def test_the_last_steps_are_kept() -> None:
    recording = Recording(steps=3)
    recording.begin("set-up")
    recording.end()
    record(recording, range(5, 12))
    assert ([step.number for step in recording.steps], recording.first, recording.lost) == (
        [9, 10, 11],
        5,
        0,
    )
    assert [(event.what.name, event.number) for event in kept(recording)] == [
        ("step", 9),
        ("step", 10),
        ("step", 11),
    ]


def test_large_steps_leave_room_for_fewer() -> None:
    recording = Recording(steps=10, events=100)
    record(recording, range(1, 8), spans=29)
    assert [(step.number, step.size) for step in recording.steps] == [(5, 30), (6, 30), (7, 30)]
    assert recording.lost == 0
    record(recording, range(8, 9), spans=150)
    assert [(step.number, step.size) for step in recording.steps] == [(8, 100)]
    assert recording.lost == 51
    record(recording, range(9, 10), spans=4)
    assert [(step.number, step.size) for step in recording.steps] == [(9, 5)]


def test_off_nothing_is_kept_and_all_calls_are_there() -> None:
    silent = Trace()
    with silent.step(1), silent.span("forward", 3):
        silent.begin("x")
        silent.wait("data", "all_reduce", 1)
        silent.finished(silent.started(("data", "all_reduce", -1), 1, 1))
        silent.advanced("data", "all_reduce", silent.now())
        silent.end()
    assert vars(silent) == {}
    assert {name for name in vars(Recording) if not name.startswith("_")} - set(dir(Trace)) == {
        "whats",
        "keep_unfinished",
    }
