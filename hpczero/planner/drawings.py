"""Drawings of a plan: a step as a pipeline diagram, and time against node-hours (pure)."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from hpczero import svg
from hpczero.svg import Span
from hpczero.text import format_count, format_number

COLOURS = {
    "forward": svg.BLUE,
    "backward": svg.GREEN,
    "communication": svg.ORANGE,
    "optimizer": svg.PINK,
    "other": svg.SKY,
}
_WIDTH, _LEFT, _RIGHT, _TOP, _BELOW = 1200, 90, 20, 60, 60
_TALLEST, _MOST_HEIGHT = 28, 900  # pixels of a stage, and of all of them
_GAP = 0.96  # of an action's width and height is drawn: what is left tells it from the next
_NARROWEST = 0.5  # pixels: what is narrower is drawn together with its neighbours


def step(stages: Sequence[Sequence[Span]], title: str) -> str:
    """Return the drawing of a step: a row of spans for each stage, in order of time."""
    row = min(_TALLEST, _MOST_HEIGHT / len(stages))
    below = _TOP + row * len(stages)
    page = svg.Page(_WIDTH, int(below + _BELOW), title)
    page.words(_LEFT, 24, title, size=16)
    _legend(page)
    ends = [span.end for spans in stages for span in spans]
    time = svg.scale(ends, _LEFT, _WIDTH - _RIGHT)
    page.rectangle(_LEFT, _TOP, _WIDTH - _LEFT - _RIGHT, row * len(stages), svg.PALE)
    for number, spans in enumerate(stages):
        y = _TOP + number * row
        for span in _drawn(spans, time):
            x = time.place(span.begin)
            width = time.place(span.end) - x
            page.rectangle(x, y, width * _GAP, row * _GAP, COLOURS[span.kind], span.tip)
        if row >= 12 or number in (0, len(stages) - 1):
            page.words(_LEFT - 8, y + row / 2 + 4, f"stage {number}", "end")
    _axis_of_time(page, time, below)
    return str(page)


def _legend(page: svg.Page) -> None:
    x = _LEFT
    for kind, colour in (*COLOURS.items(), ("idle", svg.PALE)):
        page.rectangle(x, 38, 12, 12, colour)
        page.words(x + 16, 48, kind)
        x += 16 + 9 * len(kind) + 12


def _axis_of_time(page: svg.Page, time: svg.Scale, y: float) -> None:
    unit, factor = ("s", 1.0) if time.most >= 1 else ("ms", 1e3)
    for tick in time.ticks(10):
        x = time.place(tick)
        page.line([(x, y), (x, y + 5)], svg.INK)
        page.words(x, y + 20, f"{tick * factor:g}", "middle")
    page.words(_WIDTH - _RIGHT, y + 40, unit, "end")


def _drawn(spans: Iterable[Span], time: svg.Scale) -> Iterator[Span]:
    """Yield the spans; those that are too narrow together, by the kind that takes most of them."""
    pixels = (time.last - time.first) / (time.most - time.least)
    for is_narrow, group in groupby(spans, lambda span: (span.end - span.begin) * pixels < 1):
        if is_narrow:
            yield from _together(list(group), _NARROWEST / pixels)
        else:
            yield from group


def _together(spans: Sequence[Span], least: float) -> Iterator[Span]:
    """Yield spans at least so long, each for consecutive ones with little idle time between."""
    waiting: list[Span] = []
    for span in spans:
        if waiting and span.begin - waiting[-1].end > least:
            yield _as_one(waiting)
            waiting = []
        waiting.append(span)
        if waiting[-1].end - waiting[0].begin >= least:
            yield _as_one(waiting)
            waiting = []
    if waiting:
        yield _as_one(waiting)


def _as_one(spans: Sequence[Span]) -> Span:
    if len(spans) == 1:
        return spans[0]
    lengths = dict.fromkeys(COLOURS, 0.0)
    for span in spans:
        lengths[span.kind] += span.end - span.begin
    most = max(lengths, key=lengths.__getitem__)
    return Span(spans[0].begin, spans[-1].end, most, format_count(len(spans), "action"))


@dataclass(frozen=True)
class Choice:
    """The best layout on so many nodes: hours of the whole training, and hours of nodes."""

    nodes: int
    hours: float
    node_hours: float
    tip: str = ""


def front(choices: Sequence[Choice]) -> list[Choice]:
    """Return the choices that no other beats in both: the longest first."""
    found: list[Choice] = []
    for choice in sorted(choices, key=lambda one: (one.node_hours, one.hours)):
        if not found or choice.hours < found[-1].hours:
            found.append(choice)
    return found


def trade(choices: Sequence[Choice], title: str) -> str:
    """Return the drawing of time against node-hours, with the front as a line."""
    page = svg.Page(800, 520, title)
    page.words(70, 24, title, size=16)
    x = svg.scale_by_factors([choice.node_hours for choice in choices], 70, 770)
    y = svg.scale_by_factors([choice.hours for choice in choices], 450, 50)
    page.line([(70, 50), (70, 450), (770, 450)], svg.INK)
    for tick in x.ticks():
        page.line([(x.place(tick), 450), (x.place(tick), 455)], svg.INK)
        page.words(x.place(tick), 470, format_number(tick), "middle")
    for tick in y.ticks():
        page.line([(65, y.place(tick)), (70, y.place(tick))], svg.INK)
        page.words(60, y.place(tick) + 4, format_number(tick), "end")
    page.words(420, 500, "node-hours", "middle")
    page.words(14, 44, "hours")
    best = front(choices)
    page.line([(x.place(one.node_hours), y.place(one.hours)) for one in best], svg.BLUE, 1.5)
    for choice in choices:
        colour = svg.BLUE if choice in best else svg.ORANGE
        place = x.place(choice.node_hours), y.place(choice.hours)
        page.dot(*place, 4, colour, choice.tip)
        page.words(place[0] + 7, place[1] - 6, format_count(choice.nodes, "node"))
    return str(page)
