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

from hpczero.comm.trace import ADVANCE, OPERATION, WAIT, Event, What
from hpczero.safe_files import written_whole
from hpczero.train.timeline import lanes, main_track

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
    return {rank: sorted(events, key=lambda event: (event.begin, -event.end)) for rank, events in ranks.items()}


def _lines(rank: Rank, begin: int) -> Iterator[str]:
    yield _said("process_name", rank.number, 0, {"name": rank.name})
    yield _said("process_sort_index", rank.number, 0, {"sort_index": rank.number})
    yield from _thread(rank.number, _MAIN, "main")
    for event in sorted(main_track(rank.events), key=lambda event: (event.begin, -event.end)):
        yield _line(rank.number, _MAIN, event, begin)
    for place, axis in enumerate(sorted({event.what.axis for event in rank.events if event.what.kind == OPERATION}), 1):
        operations = [event for event in rank.events if event.what.kind == OPERATION and event.what.axis == axis]
        chosen = lanes([(event.begin, event.end) for event in operations])
        for lane in range(max(chosen) + 1):
            yield from _thread(rank.number, place * _OF_AN_AXIS + lane, f"{axis} {lane + 1}" if lane else axis)
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
    what = What(kind, name, args.get("axis", ""), args.get("peer", -1), args.get("unfinished", False))
    begin = round(line["ts"] * 1000)
    return Event(what, begin, begin + round(line["dur"] * 1000), args.get("bytes", 0), args.get("number", -1))


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
