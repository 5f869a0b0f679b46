"""Drawings as SVG: marks and words on a page, and the scales of its axes (pure).

Words are escaped by the XML library. A page has no script and refers to nothing outside of it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import floor, log10
from xml.etree import ElementTree

INK, PALE = "#222222", "#d8d8d8"
# Okabe and Ito's colours, which colour-blind readers tell apart
BLUE, GREEN, ORANGE, PINK, SKY = "#0072b2", "#009e73", "#e69f00", "#cc79a7", "#56b4e9"
_STEPS = (1.0, 2.0, 5.0, 10.0)


@dataclass(frozen=True)
class Span:
    """A stretch of time, drawn from `begin` to `end` (seconds) in the colour of its kind."""

    begin: float
    end: float
    kind: str
    tip: str = ""


@dataclass(frozen=True)
class Scale:
    """Values from `least` to `most` as places from `first` to `last`, in pixels.

    `by_factors`: equal distances are equal factors (a logarithmic scale).
    """

    least: float
    most: float
    first: float
    last: float
    by_factors: bool = False

    def place(self, value: float) -> float:
        least, most = self.least, self.most
        if self.by_factors:
            value, least, most = log10(value), log10(least), log10(most)
        return self.first + (value - least) / (most - least) * (self.last - self.first)

    def ticks(self, about: int = 6) -> Iterator[float]:
        """Yield round values in between: 1, 2 or 5 times a power of ten, or multiples of one."""
        if self.by_factors:
            yield from self._factors()
            return
        step = _round_up((self.most - self.least) / about)
        number = -floor(-self.least / step)
        while number * step <= self.most * (1 + 1e-9):
            yield number * step
            number += 1

    def _factors(self) -> Iterator[float]:
        for power in range(floor(log10(self.least)), floor(log10(self.most)) + 1):
            for step in _STEPS[:3]:
                if self.least <= step * 10.0**power <= self.most:
                    yield step * 10.0**power


def scale(values: Sequence[float], first: float, last: float) -> Scale:
    """Return the scale from 0 to a little more than the largest value."""
    return Scale(0.0, max([1e-12, *values]) * 1.02, first, last)


def scale_by_factors(values: Sequence[float], first: float, last: float) -> Scale:
    """Return the scale of positive values, and a little more at both ends."""
    return Scale(min(values) / 1.2, max(values) * 1.2, first, last, by_factors=True)


def _round_up(value: float) -> float:
    power = 10.0 ** floor(log10(value))
    return next(power * step for step in _STEPS if power * step >= value * (1 - 1e-9))


class Page:
    """A drawing of a size in pixels."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self.width = width
        self.height = height
        size = {"width": str(width), "height": str(height), "viewBox": f"0 0 {width} {height}"}
        font = {"font-family": "sans-serif", "font-size": "12"}
        self._root = ElementTree.Element(
            "svg", {"xmlns": "http://www.w3.org/2000/svg", **size, **font}
        )
        ElementTree.SubElement(self._root, "title").text = title
        self.rectangle(0, 0, width, height, "#ffffff")

    def rectangle(
        self, x: float, y: float, width: float, height: float, fill: str, tip: str = ""
    ) -> None:
        """`tip` is shown where the mouse rests."""
        places = {"x": x, "y": y, "width": width, "height": height}
        self._add("rect", places, {"fill": fill}, tip)

    def dot(self, x: float, y: float, radius: float, fill: str, tip: str = "") -> None:
        self._add("circle", {"cx": x, "cy": y, "r": radius}, {"fill": fill}, tip)

    def line(self, points: Sequence[tuple[float, float]], stroke: str, width: float = 1) -> None:
        words = " ".join(f"{_number(x)},{_number(y)}" for x, y in points)
        how = {"points": words, "fill": "none", "stroke": stroke}
        self._add("polyline", {"stroke-width": width}, how)

    def words(self, x: float, y: float, text: str, anchor: str = "start", size: int = 12) -> None:
        how = {"text-anchor": anchor, "fill": INK, "font-size": str(size)}
        self._add("text", {"x": x, "y": y}, how).text = _printable(text)

    def _add(
        self, name: str, places: dict[str, float], how: dict[str, str], tip: str = ""
    ) -> ElementTree.Element:
        numbers = {key: _number(value) for key, value in places.items()}
        element = ElementTree.SubElement(self._root, name, numbers | how)
        if tip:
            ElementTree.SubElement(element, "title").text = _printable(tip)
        return element

    def __str__(self) -> str:
        return ElementTree.tostring(self._root, encoding="unicode") + "\n"


def _number(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")


def _printable(text: str) -> str:
    """Leave out characters that XML cannot have."""
    return "".join(letter for letter in text if letter.isprintable())
