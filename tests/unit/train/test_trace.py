"""The recorder of `train.trace`, its file, and what can be read off it."""

import gzip
import json
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

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
from hpczero.train import trace_file, tracing


def kept(recording: Recording) -> list[Event]:
    return [event for step in recording.steps for event in events(step.rows, recording.whats)]


def span(name: str, begin: int, end: int, number: int = -1) -> Event:
    return Event(EventKind(SPAN, name), begin, end, 0, number)


def wait(axis: str, begin: int, end: int) -> Event:
    return Event(EventKind(WAIT, "all_reduce", axis), begin, end)


def operation(
    axis: str, begin: int, end: int, name: str = "all_reduce", peer: int = -1, number: int = 1
) -> Event:
    return Event(EventKind(OPERATION, name, axis, peer), begin, end, 8, number)


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


# -- the file
# ------------------------------------------------------------------------------

EVENTS = [
    span("step", 1_000, 9_001, 7),
    span("forward", 1_000, 3_000, 0),
    wait("data", 4_000, 6_000),
    Event(EventKind(ADVANCE, "all_reduce", "data"), 5_000, 5_999),
    operation("data", 2_000, 6_000),
    operation("data", 2_500, 4_000, "reduce_scatter", number=2),
    operation("data", 4_000, 4_100, "reduce_scatter", number=3),
    operation("pipeline", 2_500, 4_000, "send", peer=1, number=5),
    Event(EventKind(WAIT, 'odd "name" \\ é', "data", unfinished=True), 7_000, 8_000),
]
OTHERS = [
    span("step", 1_500, 9_500, 7),
    operation("pipeline", 2_600, 5_000, "receive", peer=0, number=5),
]


@pytest.fixture
def written(tmp_path: Path) -> Path:
    ranks = [
        trace_file.Rank(0, "rank 0 on a (data 0)", EVENTS),
        trace_file.Rank(1, "rank 1 on b (data 1)", OTHERS),
    ]
    trace_file.write(tmp_path / "trace.json.gz", ranks, {"run": "x"}, 1_000)
    return tmp_path / "trace.json.gz"


def test_the_file_holds_what_was_recorded(written: Path) -> None:
    def shifted(events: list[Event]) -> list[Event]:
        moved = [
            event._replace(begin=event.begin - 1_000, end=event.end - 1_000) for event in events
        ]
        return sorted(moved, key=lambda event: (event.begin, -event.end))

    assert trace_file.read(written) == {0: shifted(EVENTS), 1: shifted(OTHERS)}
    assert [path.name for path in written.parent.iterdir()] == ["trace.json.gz"]


def test_the_file_follows_the_trace_event_format(written: Path) -> None:
    content = json.loads(gzip.decompress(written.read_bytes()))
    assert set(content) == {"displayTimeUnit", "otherData", "traceEvents"}
    lines = content["traceEvents"]
    assert {line["ph"] for line in lines} == {"M", "X", "s", "f"}
    assert all({"pid", "tid", "name"} <= set(line) for line in lines)
    spans = [line for line in lines if line["ph"] == "X"]
    assert len(spans) == len(EVENTS) + len(OTHERS)
    assert all(
        line["ts"] >= 0 and line["dur"] >= 0 and isinstance(line["args"], dict) for line in spans
    )
    names = {
        (line["pid"], line["tid"]): line["args"]["name"]
        for line in lines
        if line["name"] == "thread_name"
    }
    assert sorted(name for (pid, _), name in names.items() if pid == 0) == [
        "data",
        "data 2",
        "main",
        "pipeline",
    ]
    assert {(line["pid"], line["tid"]) for line in spans} == set(names)
    assert [line["args"]["name"] for line in lines if line["name"] == "process_name"] == [
        "rank 0 on a (data 0)",
        "rank 1 on b (data 1)",
    ]
    assert [line["name"] for line in spans if line["pid"] == 0 and names[0, line["tid"]] == "main"][
        :2
    ] == ["step 7", "forward"]


def test_events_of_a_thread_lie_in_each_other_or_apart(written: Path) -> None:
    lines = [
        line
        for line in json.loads(gzip.decompress(written.read_bytes()))["traceEvents"]
        if line["ph"] == "X"
    ]
    for thread in {(line["pid"], line["tid"]) for line in lines}:
        times = [
            (line["ts"], line["ts"] + line["dur"])
            for line in lines
            if (line["pid"], line["tid"]) == thread
        ]
        for one in times:
            for other in times:
                assert not one[0] < other[0] < one[1] < other[1], (thread, one, other)


def test_an_arrow_leads_from_sender_to_receiver(written: Path) -> None:
    lines = json.loads(gzip.decompress(written.read_bytes()))["traceEvents"]
    (start,), (end,) = ([line for line in lines if line["ph"] == kind] for kind in "sf")
    assert (start["pid"], start["ts"], end["pid"]) == (0, 1.5, 1)
    assert start["id"] == end["id"]
    (received,) = [line for line in lines if line["name"] == "receive from 0"]
    assert end["tid"] == received["tid"]
    assert received["ts"] < end["ts"] < received["ts"] + received["dur"]


def test_a_file_that_cannot_be_written_leaves_the_old_one(written: Path) -> None:
    before = written.read_bytes()

    def ranks() -> Iterator[trace_file.Rank]:
        yield trace_file.Rank(0, "rank 0", EVENTS)
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        trace_file.write(written, ranks(), {}, 0)
    assert written.read_bytes() == before
    assert [path.name for path in written.parent.iterdir()] == ["trace.json.gz"]


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 20)), max_size=30))
def test_lanes_hold_no_two_at_a_time_and_are_no_more_than_needed(
    begins: list[tuple[int, int]],
) -> None:
    intervals = [(begin, begin + length) for begin, length in begins]
    chosen = trace_file.lanes(intervals)
    for lane in set(chosen):
        inside = sorted(
            interval for interval, at in zip(intervals, chosen, strict=True) if at == lane
        )
        assert all(one[1] <= other[0] for one, other in pairwise(inside))
    most = max(
        (sum(begin <= at < end for begin, end in intervals if begin < end) for at in range(81)),
        default=0,
    )
    whole = trace_file.lanes([interval for interval in intervals if interval[0] < interval[1]])
    assert len(set(whole)) == most


# -- what is read off it
# ------------------------------------------------------------------------------

STEP = [
    span("data", 0, 5),
    span("forward", 5, 20),
    wait("tensor", 10, 12),
    span("backward", 20, 60),
    operation("data", 30, 70, "reduce_scatter"),
    operation("data", 58, 75, "reduce_scatter"),
    Event(EventKind(ADVANCE, "reduce_scatter", "data"), 40, 44),
    span("optimizer step", 60, 90),
    wait("data", 60, 75),
    Event(EventKind(ADVANCE, "reduce_scatter", "data"), 70, 74),
    operation("data", 76, 80, "all_gather"),
    span("step", 0, 100, 4),
    span("evaluation", 110, 200),
]


def test_every_moment_belongs_to_the_innermost() -> None:
    seconds = trace_file.exclusive_seconds(trace_file.of_step(STEP, 4))
    expected = {
        "data": 5,
        "forward": 13,
        "wait tensor": 2,
        "backward": 36,
        "advance data": 8,
        "optimizer step": 15,
        "wait data": 11,
        "step": 10,
    }
    assert seconds == pytest.approx({name: time / 1e9 for name, time in expected.items()})
    assert sum(seconds.values()) == pytest.approx(100 / 1e9)


def test_a_step_ends_where_it_ends() -> None:
    inside = trace_file.of_step([*STEP, operation("data", 90, 150)], 4)
    assert "evaluation" not in [event.what.name for event in inside]
    assert (inside[-1].begin, inside[-1].end) == (90, 100)
    assert trace_file.of_step(STEP, 5) == []


def test_how_much_communication_is_hidden() -> None:
    """Under way 30-75 and 76-80: 49; of that waited 60-75 and worked 40-44."""
    assert trace_file.hidden(STEP, "data") == pytest.approx(1 - 19 / 49)
    assert trace_file.hidden(STEP, "tensor") == 1


def test_what_started_while_something_went_on() -> None:
    assert trace_file.started_during(STEP, "reduce_scatter", "backward") == (2, 2)
    assert trace_file.started_during(STEP, "all_gather", "backward") == (0, 1)
    assert trace_file.started_during(
        [*STEP, operation("data", 60, 61, "reduce_scatter")], "reduce_scatter", "backward"
    ) == (2, 3)


@given(*[st.lists(st.tuples(st.integers(0, 40), st.integers(0, 10)), max_size=12)] * 2)
def test_unions_and_overlaps(one: list[tuple[int, int]], other: list[tuple[int, int]]) -> None:
    def moments(pairs: list[tuple[int, int]]) -> set[int]:
        return {moment for begin, length in pairs for moment in range(begin, begin + length)}

    unions = [
        trace_file.union((begin, begin + length) for begin, length in pairs)
        for pairs in (one, other)
    ]
    assert trace_file.length(unions[0]) == len(moments(one))
    assert trace_file.length(trace_file.overlap(*unions)) == len(moments(one) & moments(other))


# -- what is written of a run
# ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "most", "steps", "ranks"),
    [
        ([{8: 10, 9: 10}, {8: 10, 9: 10}], 40, [8, 9], 2),
        ([{8: 10, 9: 10}, {8: 10, 9: 10}], 39, [9], 2),
        ([{7: 1, 8: 10, 9: 10}, {8: 10, 9: 10}], 1000, [8, 9], 2),
        ([{9: 10}, {9: 10}, {9: 10}], 29, [9], 2),
        ([{9: 10}, {9: 10}], 5, [9], 1),
        ([{9: 10}, {8: 10}], 1000, [], 2),
        ([{}, {}], 1000, [], 2),
    ],
)
def test_what_fits_into_the_file(
    sizes: list[dict[int, int]], most: int, steps: list[int], ranks: int
) -> None:
    assert tracing.select(sizes, most) == tracing.Selection(steps, ranks)


def test_the_mean_over_ranks_and_steps() -> None:
    of_steps = [
        {"seconds": {"forward": 2.0}, "hidden": {"data": 1.0}},
        {"seconds": {"forward": 4.0, "wait data": 1.0}, "hidden": {}},
    ]
    assert tracing.mean(of_steps) == {
        "seconds": {"forward": 3.0, "wait data": 0.5},
        "hidden": {"data": 1.0},
    }
    assert tracing.mean([]) == {"seconds": {}, "hidden": {}}
