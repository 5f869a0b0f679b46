"""A trace as a file, and figures from its events: where a step's time went, and what was hidden.

The file is JSON in the Trace Event Format, compressed, for https://ui.perfetto.dev and
chrome://tracing. A process is a rank. Its first thread is the main track. An axis has as many more
as operations of it were in flight at the same time, because events of one thread may only nest.
Arrows lead from where a message was sent to where it was received.

The figures are pure: events of one rank in, figures out.
"""

import gzip
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from hpczero.comm.trace import ADVANCE, OPERATION, SPAN, WAIT, Event, EventKind
from hpczero.safe_files import written_whole

_MAIN = 1
_OF_AN_AXIS = 1000  # numbers of threads

Interval = tuple[int, int]


@dataclass(frozen=True)
class Rank:
    """The events to write of one rank; its times are by rank 0's clock."""

    number: int
    name: str
    events: Sequence[Event]


def write(path: Path, ranks: Iterable[Rank], facts: Mapping[str, Any], begin: int) -> None:
    """Write the whole file or none. `begin` is time 0 of the file."""
    with (
        written_whole(path) as packed,
        gzip.open(packed, "wt", compresslevel=5, encoding="utf-8") as file,
    ):
        file.write('{"displayTimeUnit": "ms",\n')
        file.write(f'"otherData": {json.dumps(dict(facts))},\n"traceEvents": [\n')
        comma = ""
        for rank in ranks:
            for line in _lines(rank, begin):
                file.write(comma + line)
                comma = ",\n"
        file.write("\n]}\n")


def read(path: Path) -> dict[int, list[Event]]:
    """Return every rank's events, ordered by their begins; the facts are in `otherData`."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        lines = json.load(file)["traceEvents"]
    ranks: dict[int, list[Event]] = {line["pid"]: [] for line in lines if line["ph"] == "M"}
    for line in lines:
        if line["ph"] == "X":
            ranks[line["pid"]].append(_event(line))
    return {rank: _outer_first(events) for rank, events in ranks.items()}


def _lines(rank: Rank, begin: int) -> Iterator[str]:
    yield _metadata("process_name", rank.number, 0, {"name": rank.name})
    yield _metadata("process_sort_index", rank.number, 0, {"sort_index": rank.number})
    yield from _thread(rank.number, _MAIN, "main")
    for event in _outer_first(main_track(rank.events)):
        yield _line(rank.number, _MAIN, event, begin)
    axes = {event.what.axis for event in rank.events if event.what.kind == OPERATION}
    for number, axis in enumerate(sorted(axes), 1):
        operations = _operations(rank.events, axis)
        lane_of = lanes(list(map(_interval, operations)))
        first = number * _OF_AN_AXIS
        for lane in range(max(lane_of) + 1):
            yield from _thread(rank.number, first + lane, f"{axis} {lane + 1}" if lane else axis)
        for event, lane in zip(operations, lane_of, strict=True):
            yield _line(rank.number, first + lane, event, begin)
            if event.what.peer >= 0:
                yield _arrow(rank.number, first + lane, event, begin)


def _thread(pid: int, tid: int, name: str) -> Iterator[str]:
    yield _metadata("thread_name", pid, tid, {"name": name})
    yield _metadata("thread_sort_index", pid, tid, {"sort_index": tid})


def _metadata(what: str, pid: int, tid: int, args: dict[str, Any]) -> str:
    return json.dumps({"ph": "M", "pid": pid, "tid": tid, "name": what, "args": args})


def _line(pid: int, tid: int, event: Event, begin: int) -> str:
    what = event.what
    args: dict[str, Any] = {"axis": what.axis} if what.axis else {}
    args |= {"bytes": event.bytes} if event.bytes else {}
    args |= {"number": event.number} if event.number >= 0 else {}
    args |= {"peer": what.peer} if what.peer >= 0 else {}
    args |= {"unfinished": True} if what.unfinished else {}
    label = json.dumps(_label(event))
    start = _microseconds(event.begin - begin)
    duration = _microseconds(event.end - event.begin)
    return (
        f'{{"ph": "X", "pid": {pid}, "tid": {tid}, "cat": "{what.kind}", "name": {label}, '
        f'"ts": {start}, "dur": {duration}, "args": {json.dumps(args)}}}'
    )


def _label(event: Event) -> str:
    """Return the name that people see: "step 7", "wait all_reduce", "send to 3"."""
    what = event.what
    if what.kind in (WAIT, ADVANCE):
        return f"{what.kind} {what.name}"
    if what.name == "step":
        return f"step {event.number}"
    if what.peer >= 0:
        return f"{what.name} {'to' if what.name == 'send' else 'from'} {what.peer}"
    return what.name


def _event(line: dict[str, Any]) -> Event:
    args = line["args"]
    kind, name = line["cat"], line["name"]
    name = name.removeprefix(f"{kind} ") if kind in (WAIT, ADVANCE) else name
    if "peer" in args or name == f"step {args.get('number')}":
        name = name.partition(" ")[0]
    peer = args.get("peer", -1)
    unfinished = args.get("unfinished", False)
    what = EventKind(kind, name, args.get("axis", ""), peer, unfinished)
    begin = round(line["ts"] * 1000)
    end = begin + round(line["dur"] * 1000)
    return Event(what, begin, end, args.get("bytes", 0), args.get("number", -1))


def _arrow(pid: int, tid: int, event: Event, begin: int) -> str:
    """Return one end of an arrow; both ends of a message derive the same identity for it."""
    leaves = event.what.name == "send"
    pair = (pid, event.what.peer) if leaves else (event.what.peer, pid)
    text = f"{event.what.axis} {pair[0]} {pair[1]} {event.number}"
    identity = int.from_bytes(blake2b(text.encode(), digest_size=6).digest(), "little")
    at = event.begin if leaves else max(event.begin, event.end - 1)
    end = '"ph": "s"' if leaves else '"ph": "f", "bp": "e"'
    return (
        f'{{{end}, "cat": "message", "name": "message", "id": {identity}, '
        f'"pid": {pid}, "tid": {tid}, "ts": {_microseconds(at - begin)}}}'
    )


def _microseconds(nanoseconds: int) -> str:
    """Return the exact decimal; rounded floats would make neighbours overlap."""
    return f"{nanoseconds // 1000}.{nanoseconds % 1000:03}"


# -- figures ---------------------------------------------------------------------------------------


def of_step(events: Iterable[Event], number: int) -> list[Event]:
    """Return the events within a step, cut off at its ends; an evaluation comes after it.

    Nothing is left of a step that did not end, or of which some events were lost.
    """
    events = list(events)
    step = EventKind(SPAN, "step")
    ended = (event for event in events if event.what == step and event.number == number)
    begin, end = next(map(_interval, ended), (0, 0))
    inside = (
        event._replace(begin=max(begin, event.begin), end=min(end, event.end)) for event in events
    )
    return [event for event in inside if event.begin < event.end]


def exclusive_seconds(events: Iterable[Event]) -> dict[str, float]:
    """Return the seconds of each span's name, "wait <axis>" and "advance <axis>".

    Every moment of the main track belongs to the innermost event, so the seconds add up to the
    whole. "advance" is this rank's work on operations, where it takes long.
    """
    seconds: dict[str, float] = {}
    outer: list[Event] = []
    for event in _outer_first(main_track(events)):
        while outer and outer[-1].end <= event.begin:
            outer.pop()
        _add(seconds, event, event.end - event.begin)
        if outer:
            _add(seconds, outer[-1], event.begin - event.end)
        outer.append(event)
    return seconds


def hidden(events: Sequence[Event], axis: str) -> float:
    """Return the hidden share of the time in which operations of an axis were in flight.

    That is the share in which this rank neither waited nor worked for any; 1 if there were none.
    """
    in_flight = union(map(_interval, _operations(events, axis)))
    busy = union(_interval(event) for event in events if event.what.kind in (WAIT, ADVANCE))
    total = length(in_flight)
    return 1 - length(overlap(in_flight, busy)) / total if total else 1.0


def started_during(events: Sequence[Event], operation: str, span: str) -> tuple[int, int]:
    """Return how many of these operations started during such a span, and how many there are."""
    spans = [_interval(event) for event in events if event.what[:2] == (SPAN, span)]
    starts = [event.begin for event in events if event.what[:2] == (OPERATION, operation)]
    return sum(any(begin <= start < end for begin, end in spans) for start in starts), len(starts)


def main_track(events: Iterable[Event]) -> list[Event]:
    return [event for event in events if event.what.kind != OPERATION]


def _interval(event: Event) -> Interval:
    return event.begin, event.end


def _operations(events: Iterable[Event], axis: str) -> list[Event]:
    return [event for event in events if event.what.kind == OPERATION and event.what.axis == axis]


def _outer_first(events: Iterable[Event]) -> list[Event]:
    """Return the events ordered by their begins; of two that begin together, the longer first."""
    return sorted(events, key=lambda event: (event.begin, -event.end))


def union(intervals: Iterable[Interval]) -> list[Interval]:
    joined: list[Interval] = []
    for begin, end in sorted(intervals):
        if joined and begin <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        else:
            joined.append((begin, end))
    return joined


def overlap(one: Sequence[Interval], other: Sequence[Interval]) -> list[Interval]:
    """Return the intervals that two unions have in common."""
    common = []
    i = 0
    j = 0
    while i < len(one) and j < len(other):
        begin, end = max(one[i][0], other[j][0]), min(one[i][1], other[j][1])
        if begin < end:
            common.append((begin, end))
        if one[i][1] < other[j][1]:
            i += 1
        else:
            j += 1
    return common


def length(intervals: Iterable[Interval]) -> int:
    return sum(end - begin for begin, end in intervals)


def lanes(intervals: Sequence[Interval]) -> list[int]:
    """Return a lane for each interval, without overlaps: the first that is free when it begins."""
    free_from: list[int] = []
    chosen = [0] * len(intervals)
    for index in sorted(range(len(intervals)), key=intervals.__getitem__):
        begin, end = intervals[index]
        lane = next((lane for lane, free in enumerate(free_from) if free <= begin), len(free_from))
        free_from[lane : lane + 1] = [end]
        chosen[index] = lane
    return chosen


def _add(seconds: dict[str, float], event: Event, nanoseconds: int) -> None:
    what = event.what
    name = what.name if what.kind == SPAN else f"{what.kind} {what.axis}"
    seconds[name] = seconds.get(name, 0.0) + nanoseconds / 1e9
