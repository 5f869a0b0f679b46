"""The file of `train.trace`: its format, what is read off it, and which steps fit into it."""

import gzip
import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpczero.comm.trace import (
    ADVANCE,
    WAIT,
    Event,
    EventKind,
)
from hpczero.train import trace_file, tracing
from tests.support.trace_events import operation, span, wait

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
    """In flight 30-75 and 76-80, together 49; of that 60-75 was waited for, 40-44 worked on."""
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
