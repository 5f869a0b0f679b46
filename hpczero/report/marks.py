"""Drawings as lists of marks: rectangles, lines, areas, cells, dots and words (pure).

What paints them knows no figures: `as_svg` for pages, `as_png` for slides. A colour is a name of
COLOURS; a page has one for light and one for dark surroundings.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from hpczero import svg

# name -> on a light page, on a dark one. Those of series are Okabe and Ito's, light ones darkened
# until a line of them stands out from white (tests/unit/report/test_colours.py).
COLOURS = {
    "page": ("#ffffff", "#15181c"),
    "ink": ("#1f2328", "#e6e8eb"),
    "quiet": ("#57606a", "#9aa4b0"),
    "pale": ("#dfe3e8", "#30363d"),
    "blue": (svg.BLUE, "#4fa3dd"),
    "vermillion": ("#d55e00", "#f0833a"),
    "green": ("#00835f", "#2fbf95"),
    "purple": ("#a8487e", "#d98cb6"),
    "orange": ("#a96f00", "#e6a81f"),
    "sky": ("#2f86b8", "#7cc6f2"),
    "grey": ("#6e7781", "#8b949e"),
}
SERIES = ("blue", "vermillion", "green", "purple", "orange", "sky", "grey")
DASHES = ("", "6 3", "2 3", "8 3 2 3")  # tell series apart where colours do not
# from few to much: cividis, which is even in lightness; the same on any page
LEVELS = (
    *("#00224e", "#123570", "#3b496c", "#575d6d", "#707173"),
    *("#8a8678", "#a59c74", "#c3b369", "#e1cc55", "#fee838"),
)
COLOURS |= {f"level{number}": (colour, colour) for number, colour in enumerate(LEVELS)}

Place = tuple[float, float]


@dataclass(frozen=True)
class Rectangle:
    """`tip` is shown where the mouse rests."""

    x: float
    y: float
    width: float
    height: float
    fill: str
    tip: str = ""


@dataclass(frozen=True)
class Cells:
    """Many rectangles (x, y, width, height) of one colour."""

    places: Sequence[tuple[float, float, float, float]]
    fill: str


@dataclass(frozen=True)
class Line:
    points: Sequence[Place]
    stroke: str
    width: float = 1.6
    dashes: str = ""


@dataclass(frozen=True)
class Area:
    points: Sequence[Place]
    fill: str
    opacity: float = 1.0


@dataclass(frozen=True)
class Dot:
    x: float
    y: float
    radius: float
    fill: str
    tip: str = ""


@dataclass(frozen=True)
class Words:
    """`anchor`: start, middle or end of the text lies at x."""

    x: float
    y: float
    text: str
    anchor: str = "start"
    size: int = 12
    fill: str = "ink"


Mark = Rectangle | Cells | Line | Area | Dot | Words


@dataclass(frozen=True)
class Drawing:
    """A drawing of a size in pixels; `description` says in words what is to be seen."""

    title: str
    width: float
    height: float
    description: str
    marks: Sequence[Mark] = field(default_factory=tuple)


def colour_of(number: int) -> str:
    """Return the colour of a series."""
    return SERIES[number % len(SERIES)]


def dashes_of(number: int) -> str:
    """Return the dashes of a series: they change when the colours begin again."""
    return DASHES[number // len(SERIES) % len(DASHES)]


def level_of(share: float) -> str:
    """Return the colour of a share, from 0 to 1."""
    return f"level{min(len(LEVELS) - 1, max(0, int(share * len(LEVELS))))}"


def legend(names: Sequence[tuple[str, str, str]], x: float, y: float, most: float) -> list[Mark]:
    """Return the names (name, colour, dashes), in lines from (x, y) on, none wider than `most`."""
    marks: list[Mark] = []
    left = x
    for name, colour, dashes in names:
        width = 30 + 6.4 * len(name)
        if left > x and left + width > x + most:
            left, y = x, y + LINE
        if dashes:
            marks.append(Line([(left, y - 4), (left + 14, y - 4)], colour, 2.5, dashes))
        else:
            marks.append(Rectangle(left, y - 9, 10, 10, colour))
        marks.append(Words(left + 18, y, name, size=11))
        left += width
    return marks


def lines_of_legend(names: Sequence[str], most: float) -> int:
    """Return how many lines `legend` takes."""
    marks = legend([(name, "ink", "") for name in names], 0, 0, most)
    return len({mark.y for mark in marks if isinstance(mark, Words)})


LINE = 16  # pixels from a line of words to the next
