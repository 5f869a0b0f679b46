"""Charts of rows of figures over steps or time: lines, and parts that are stacked (pure)."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import floor, log10

import numpy as np

from hpczero.report.marks import (
    LINE,
    Area,
    Dot,
    Drawing,
    Line,
    Mark,
    Place,
    Rectangle,
    Words,
    legend,
    lines_of_legend,
)
from hpczero.runs.columns import Numbers
from hpczero.runs.curves import Curve, curve
from hpczero.svg import Scale
from hpczero.text import format_number

WIDTH, HEIGHT = 480, 260
_LEFT, _RIGHT, _TOP, _BELOW = 58, 14, 34, 40
_FEW = 40  # points that are also shown as dots
_FACTORS = 50.0  # the largest is so many times the smallest: equal distances are factors


@dataclass(frozen=True)
class Series:
    """`ends`: the first and the last known (x, value), which a long curve's points are means of."""

    name: str
    curve: Curve
    colour: str
    dashes: str = ""
    ends: tuple[Place, Place] | None = None

    @property
    def last(self) -> float:
        return self.ends[1][1] if self.ends else float(self.curve.mean[-1])


def series(name: str, x: Numbers, y: Numbers, points: int, colour: str, dashes: str = "") -> Series:
    """Return the known values of `y` over `x` as a line of so many points."""
    known = np.flatnonzero(np.isfinite(x) & np.isfinite(y))
    ends = None
    if known.size:
        first, last = int(known[0]), int(known[-1])
        ends = (float(x[first]), float(y[first])), (float(x[last]), float(y[last]))
    return Series(name, curve(x, y, points), colour, dashes, ends)


@dataclass(frozen=True)
class Layer:
    """A part of a stack; one value for each place on the x axis."""

    name: str
    values: Numbers
    colour: str


@dataclass(frozen=True)
class Axes:
    """Names of the axes, and how values are written; `marked`: moments (x, what happened there)."""

    title: str
    x: str
    y: str
    words: Callable[[float], str] = format_number
    from_zero: bool = False
    may_be_by_factors: bool = False
    marked: Sequence[tuple[float, str]] = ()
    width: float = WIDTH


def lines(axes: Axes, every: Sequence[Series]) -> Drawing | None:
    """Return the chart; None if no series has a point."""
    shown = [one for one in every if len(one.curve)]
    if not shown:
        return None
    frame = _Frame(axes, [one.name for one in shown] if len(shown) > 1 else [])
    x = scale_between(
        float(min(one.curve.x[0] for one in shown)),
        float(max(one.curve.x[-1] for one in shown)),
        frame.left,
        frame.right,
    )
    y = frame.scale_of(
        float(min(one.curve.low.min() for one in shown)),
        float(max(one.curve.high.max() for one in shown)),
    )
    marks = [*frame.marks(x, y)]
    marks += frame.legend([(one.name, one.colour, one.dashes) for one in shown])
    for one in shown:
        marks += _marks_of(one, x, y, axes)
    marks += frame.moments(x)
    words = " ".join(_in_words(one, axes) for one in shown)
    kind = f"Line chart of {axes.y} over {axes.x}"
    return Drawing(axes.title, axes.width, frame.height, f"{kind}. {words}", marks)


def stacked(
    axes: Axes, x_values: Numbers, layers: Sequence[Layer], over: Sequence[Series] = ()
) -> Drawing | None:
    """Return the chart of parts that add up, under lines; None without a place on the x axis."""
    if not len(x_values):
        return None
    names = [*(layer.name for layer in layers), *(one.name for one in over)]
    frame = _Frame(axes, names)
    tops = np.cumsum([layer.values for layer in layers], axis=0)
    x = scale_between(float(x_values[0]), float(x_values[-1]), frame.left, frame.right)
    most = max([float(tops[-1].max()), *(float(one.curve.high.max()) for one in over)])
    y = Scale(0.0, most * 1.05 or 1.0, frame.bottom, frame.top)
    marks: list[Mark] = list(frame.marks(x, y))
    marks += frame.legend(
        [
            *((layer.name, layer.colour, "") for layer in layers),
            *((one.name, one.colour, "3 3") for one in over),
        ]
    )
    below = np.zeros(len(x_values))
    for layer, top in zip(layers, tops, strict=True):
        if (top > below).any():
            marks.append(_band(x, y, x_values, below, top, layer.colour))
        below = top
    for top in tops[:-1]:  # a seam, as neighbours may look alike
        marks.append(Line(_places(x, y, x_values, top), "page", 0.8))
    for one in over:
        marks.append(Line(_places(x, y, one.curve.x, one.curve.mean), one.colour, 1.6, "3 3"))
    marks += frame.moments(x)
    words = [
        f"{layer.name}: {axes.words(float(layer.values.mean()))} on average" for layer in layers
    ]
    kind = f"Stacked areas of {axes.y} over {axes.x}"
    words += [_in_words(one, axes) for one in over]
    return Drawing(axes.title, axes.width, frame.height, f"{kind}. {'; '.join(words)}.", marks)


def scale_between(least: float, most: float, first: float, last: float) -> Scale:
    """Return a scale that begins and ends at these values, also if they are the same."""
    if most > least:
        return Scale(least, most, first, last)
    margin = abs(least) * 0.5 or 0.5
    return Scale(least - margin, most + margin, first, last)


def tick_words(value: float) -> str:
    """Return a round value, short: 20k, 0.5, 3e-04."""
    size = abs(value)
    for limit, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if size >= limit * 0.99999:
            return f"{value / (1e3 if unit == 'k' else limit):.6g}{unit}"
    return f"{value:.1e}".replace(".0e", "e") if 0 < size < 1e-3 else f"{value:.6g}"


class _Frame:
    """Places of a chart's axes, below its title and legend."""

    def __init__(self, axes: Axes, names: Sequence[str]) -> None:
        self._axes = axes
        self.left, self.right = _LEFT, axes.width - _RIGHT
        rows = lines_of_legend(names, self.right - self.left) if names else 0
        self.top = _TOP + rows * LINE
        self.height = HEIGHT + rows * LINE
        self.bottom = self.height - _BELOW

    def scale_of(self, least: float, most: float) -> Scale:
        first, last = self.bottom, self.top
        if self._axes.may_be_by_factors and least > 0 and most / least > _FACTORS:
            return Scale(least / 1.2, most * 1.2, first, last, by_factors=True)
        if self._axes.from_zero:
            least = min(0.0, least)
        margin = (most - least) * 0.06 or abs(most) * 0.1 or 0.5
        return Scale(least if least == 0 else least - margin, most + margin, first, last)

    def legend(self, names: Sequence[tuple[str, str, str]]) -> list[Mark]:
        if len(names) < 2:
            return []
        return legend(names, self.left, _TOP + 6, self.right - self.left)

    def marks(self, x: Scale, y: Scale) -> Iterator[Mark]:
        axes = self._axes
        yield Words(8, 18, axes.title, size=14)
        for tick in y_ticks(y):
            at = y.place(tick)
            yield Line([(self.left, at), (self.right, at)], "pale", 1)
            yield Words(self.left - 6, at + 4, tick_words(tick), "end", 11, "quiet")
        yield Line([(self.left, self.bottom), (self.right, self.bottom)], "quiet", 1)
        for tick in x.ticks(6):
            at = x.place(tick)
            yield Line([(at, self.bottom), (at, self.bottom + 4)], "quiet", 1)
            yield Words(at, self.bottom + 16, tick_words(tick), "middle", 11, "quiet")
        yield Words(self.right, self.height - 8, axes.x, "end", 11, "quiet")
        yield Words(self.right, 18, axes.y, "end", 11, "quiet")

    def moments(self, x: Scale) -> Iterator[Mark]:
        """Yield the lines of what happened, which lie over the others."""
        for value, what in self._axes.marked:
            if x.least <= value <= x.most:
                at = x.place(value)
                yield Line([(at, self.top), (at, self.bottom)], "ink", 1, "4 3")
                yield Rectangle(at - 3, self.bottom - 3, 6, 6, "ink", what)


def y_ticks(y: Scale) -> list[float]:
    """Return the round values to write: of many factors the powers of ten alone."""
    ticks = list(y.ticks(5))
    if y.by_factors and len(ticks) > 7:
        ticks = [tick for tick in ticks if abs(log10(tick) - round(log10(tick))) < 1e-9]
        each = -(-len(ticks) // 7)
        ticks = ticks[::each]
    if len(ticks) < 2 and y.by_factors:
        ticks = list(Scale(y.least, y.most, 0, 1).ticks(4))
    return [tick for tick in ticks if not y.by_factors or tick > 0]


def _marks_of(one: Series, x: Scale, y: Scale, axes: Axes) -> Iterator[Mark]:
    shown = one.curve
    if shown.is_reduced:
        band = _band(x, y, shown.x, shown.low, shown.high, one.colour)
        yield Area(band.points, band.fill, 0.25)
    places = _places(x, y, shown.x, shown.mean)
    if len(places) > 1:
        yield Line(places, one.colour, 1.6, one.dashes)
    if len(places) <= _FEW:
        for (left, top), step, value in zip(places, shown.x, shown.mean, strict=True):
            tip = f"{one.name}: {axes.words(float(value))} at {axes.x} {_whole(step)}"
            yield Dot(left, top, 2.6, one.colour, tip)


def _band(x: Scale, y: Scale, x_values: Numbers, low: Numbers, high: Numbers, colour: str) -> Area:
    upper = _places(x, y, x_values, high)
    lower = _places(x, y, x_values, low)
    if len(upper) == 1:  # as a bar
        (at, top), (_, bottom) = upper[0], lower[0]
        return Area([(at - 8, bottom), (at - 8, top), (at + 8, top), (at + 8, bottom)], colour)
    return Area([*upper, *reversed(lower)], colour)


def _places(x: Scale, y: Scale, x_values: Numbers, y_values: Numbers) -> list[Place]:
    return [
        (x.place(float(one)), y.place(float(value)))
        for one, value in zip(x_values, y_values, strict=True)
    ]


def _in_words(one: Series, axes: Axes) -> str:
    """Return the first, the last and the extreme values of a series."""
    shown, words = one.curve, axes.words
    low, high = int(shown.low.argmin()), int(shown.high.argmax())
    means = ((float(shown.x[at]), float(shown.mean[at])) for at in (0, -1))
    (begin, first), (end, last) = one.ends or means
    return (
        f"{one.name}: from {words(first)} at {_whole(begin)} to {words(last)} at {_whole(end)}; "
        f"lowest {words(float(shown.low[low]))} near {_whole(shown.x[low])}, highest "
        f"{words(float(shown.high[high]))} near {_whole(shown.x[high])}."
    )


def _whole(value: float) -> str:
    value = float(value)
    return f"{value:,.0f}" if value == floor(value) or abs(value) >= 100 else f"{value:.3g}"
