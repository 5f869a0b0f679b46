"""The trace as a file: JSON in the Trace Event Format, compressed, for https://ui.perfetto.dev and chrome://tracing.

A process is a rank. Its first thread is the main track; an axis has as many more as operations of it were under way at the same time, as events of
one thread may only lie in each other. Arrows lead from where a message was sent to where it was received.
"""

import gzip
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from hpczero.comm.trace import ADVANCE, OPERATION, SPAN, WAIT, Event, What
from hpczero.safe_files import written_whole

_MAIN = 1
_OF_AN_AXIS = 1000  # numbers of threads


@dataclass(frozen=True)
class Rank:
    """What is to be written of a rank; its times are rank 0's."""

    number: int
    name: str
    events: Sequence[Event]


def write(path: Path, ranks: Iterable[Rank], facts: Mapping[str, Any], begin: int) -> None:
    """`begin` is time 0 of the file. The file is there as a whole or not at all."""
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
    """Of every rank, in the order of their begins; the facts are in the file's `otherData`."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        found = json.load(file)["traceEvents"]
    ranks: dict[int, list[Event]] = {event["pid"]: [] for event in found if event["ph"] == "M"}
    for event in found:
        if event["ph"] == "X":
            ranks[event["pid"]].append(_event(event))
    return {
        rank: sorted(events, key=lambda event: (event.begin, -event.end))
        for rank, events in ranks.items()
    }


def _lines(rank: Rank, begin: int) -> Iterator[str]:
    yield _said("process_name", rank.number, 0, {"name": rank.name})
    yield _said("process_sort_index", rank.number, 0, {"sort_index": rank.number})
    yield from _thread(rank.number, _MAIN, "main")
    for event in sorted(main_track(rank.events), key=lambda event: (event.begin, -event.end)):
        yield _line(rank.number, _MAIN, event, begin)
    for place, axis in enumerate(
        sorted({event.what.axis for event in rank.events if event.what.kind == OPERATION}), 1
    ):
        operations = [
            event
            for event in rank.events
            if event.what.kind == OPERATION and event.what.axis == axis
        ]
        chosen = lanes([(event.begin, event.end) for event in operations])
        for lane in range(max(chosen) + 1):
            yield from _thread(
                rank.number, place * _OF_AN_AXIS + lane, f"{axis} {lane + 1}" if lane else axis
            )
        for event, lane in zip(operations, chosen, strict=True):
            yield _line(rank.number, place * _OF_AN_AXIS + lane, event, begin)
            if event.what.peer >= 0:
                yield _arrow(rank.number, place * _OF_AN_AXIS + lane, event, begin)


def _thread(pid: int, tid: int, name: str) -> Iterator[str]:
    yield _said("thread_name", pid, tid, {"name": name})
    yield _said("thread_sort_index", pid, tid, {"sort_index": tid})


def _said(what: str, pid: int, tid: int, args: dict[str, Any]) -> str:
    return json.dumps({"ph": "M", "pid": pid, "tid": tid, "name": what, "args": args})


def _line(pid: int, tid: int, event: Event, begin: int) -> str:
    what = event.what
    args: dict[str, Any] = {"axis": what.axis} if what.axis else {}
    args |= {"bytes": event.bytes} if event.bytes else {}
    args |= {"number": event.number} if event.number >= 0 else {}
    args |= {"peer": what.peer} if what.peer >= 0 else {}
    args |= {"unfinished": True} if what.unfinished else {}
    label = json.dumps(_label(event))
    times = f'"ts": {_microseconds(event.begin - begin)}, "dur": {_microseconds(event.end - event.begin)}'
    return f'{{"ph": "X", "pid": {pid}, "tid": {tid}, "cat": "{what.kind}", "name": {label}, {times}, "args": {json.dumps(args)}}}'


def _label(event: Event) -> str:
    """As people see it: "step 7", "wait all_reduce", "send to 3"."""
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
    what = What(
        kind, name, args.get("axis", ""), args.get("peer", -1), args.get("unfinished", False)
    )
    begin = round(line["ts"] * 1000)
    return Event(
        what, begin, begin + round(line["dur"] * 1000), args.get("bytes", 0), args.get("number", -1)
    )


def _arrow(pid: int, tid: int, event: Event, begin: int) -> str:
    """Both ends of a message make up the same name for it."""
    leaves = event.what.name == "send"
    pair = (pid, event.what.peer) if leaves else (event.what.peer, pid)
    text = f"{event.what.axis} {pair[0]} {pair[1]} {event.number}"
    identity = int.from_bytes(blake2b(text.encode(), digest_size=6).digest(), "little")
    at = event.begin if leaves else max(event.begin, event.end - 1)
    arrow = {"ph": "s"} if leaves else {"ph": "f", "bp": "e"}
    rest = f'"cat": "message", "name": "message", "id": {identity}, "pid": {pid}, "tid": {tid}, "ts": {_microseconds(at - begin)}'
    return f"{json.dumps(arrow)[:-1]}, {rest}}}"


def _microseconds(nanoseconds: int) -> str:
    """Exact: a float would put the ends of neighbours into each other."""
    return f"{nanoseconds // 1000}.{nanoseconds % 1000:03}"


# What a trace says: where a step's time went, and what of the communication ran behind it. Pure: events of one rank in, figures out.
#
# `own_seconds`: every moment of the main track belongs to the innermost thing that goes on; so the parts add up to the whole.
Interval = tuple[int, int]


def of_step(events: Iterable[Event], number: int) -> list[Event]:
    """What happened within a step (an evaluation comes after it); what reaches over its ends is cut off there. Nothing of a step that did not
    come to its end, or of which not all could be kept.
    """
    events = list(events)
    ended = (
        (event.begin, event.end)
        for event in events
        if event.what == What(SPAN, "step") and event.number == number
    )
    begin, end = next(ended, (0, 0))
    inside = (
        event._replace(begin=max(begin, event.begin), end=min(end, event.end)) for event in events
    )
    return [event for event in inside if event.begin < event.end]


def own_seconds(events: Iterable[Event]) -> dict[str, float]:
    """By name of the span, "wait <axis>" and "advance <axis>" (this rank's part in operations, where it takes long)."""
    seconds: dict[str, float] = {}
    around: list[Event] = []
    for event in sorted(main_track(events), key=lambda event: (event.begin, -event.end)):
        while around and around[-1].end <= event.begin:
            around.pop()
        _add(seconds, event, event.end - event.begin)
        if around:
            _add(seconds, around[-1], event.begin - event.end)
        around.append(event)
    return seconds


def hidden(events: Sequence[Event], axis: str) -> float:
    """Of the time in which operations of an axis were under way, the share in which this rank neither waited nor worked for any; 1 if none were."""
    under_way = union(
        (event.begin, event.end)
        for event in events
        if event.what.kind == OPERATION and event.what.axis == axis
    )
    busy = union((event.begin, event.end) for event in events if event.what.kind in (WAIT, ADVANCE))
    whole = length(under_way)
    return 1 - length(overlap(under_way, busy)) / whole if whole else 1.0


def started_during(events: Sequence[Event], operation: str, span: str) -> tuple[int, int]:
    """How many of these operations started while such a span went on, and how many there are."""
    spans = [(event.begin, event.end) for event in events if event.what[:2] == (SPAN, span)]
    starts = [event.begin for event in events if event.what[:2] == (OPERATION, operation)]
    return sum(any(begin <= start < end for begin, end in spans) for start in starts), len(starts)


def main_track(events: Iterable[Event]) -> list[Event]:
    return [event for event in events if event.what.kind != OPERATION]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    joined: list[Interval] = []
    for begin, end in sorted(intervals):
        if joined and begin <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        else:
            joined.append((begin, end))
    return joined


def overlap(one: Sequence[Interval], other: Sequence[Interval]) -> list[Interval]:
    """Of two unions."""
    found, i, j = [], 0, 0
    while i < len(one) and j < len(other):
        begin, end = max(one[i][0], other[j][0]), min(one[i][1], other[j][1])
        if begin < end:
            found.append((begin, end))
        if one[i][1] < other[j][1]:
            i += 1
        else:
            j += 1
    return found


def length(intervals: Iterable[Interval]) -> int:
    return sum(end - begin for begin, end in intervals)


def lanes(intervals: Sequence[Interval]) -> list[int]:
    """A lane for each, in which it overlaps no other: the first that is free when it begins."""
    free_from: list[int] = []
    chosen = [0] * len(intervals)
    for place in sorted(range(len(intervals)), key=lambda place: intervals[place]):
        begin, end = intervals[place]
        lane = next((lane for lane, free in enumerate(free_from) if free <= begin), len(free_from))
        free_from[lane : lane + 1] = [end]
        chosen[place] = lane
    return chosen


def _add(seconds: dict[str, float], event: Event, nanoseconds: int) -> None:
    what = event.what
    name = what.name if what.kind == SPAN else f"{what.kind} {what.axis}"
    seconds[name] = seconds.get(name, 0.0) + nanoseconds / 1e9
