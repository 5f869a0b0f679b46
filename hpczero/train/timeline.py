"""What a trace says: where a step's time went, and what of the communication ran behind it. Pure: events of one rank in, figures out.

`own_seconds`: every moment of the main track belongs to the innermost thing that goes on; so the parts add up to the whole.
"""

from collections.abc import Iterable, Sequence

from hpczero.comm.trace import ADVANCE, OPERATION, SPAN, WAIT, Event, What

Interval = tuple[int, int]


def of_step(events: Iterable[Event], number: int) -> list[Event]:
    """What happened within a step (an evaluation comes after it); what reaches over its ends is cut off there. Nothing of a step that did not
    come to its end, or of which not all could be kept.
    """
    events = list(events)
    ended = ((event.begin, event.end) for event in events if event.what == What(SPAN, "step") and event.number == number)
    begin, end = next(ended, (0, 0))
    inside = (event._replace(begin=max(begin, event.begin), end=min(end, event.end)) for event in events)
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
    under_way = union((event.begin, event.end) for event in events if event.what.kind == OPERATION and event.what.axis == axis)
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
