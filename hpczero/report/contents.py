"""A report as data: sections of words, tables and figures, of which pages are written (pure)."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from hpczero.report.charts import Series
from hpczero.report.marks import Drawing

_ROWS = 24  # of a table beside a chart


@dataclass(frozen=True)
class Table:
    """`folded`: behind a line that opens it. Columns of numbers stand to the right."""

    caption: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    folded: bool = False


@dataclass(frozen=True)
class Figure:
    """`name`: of its file, where it gets one. `wide`: as wide as the page."""

    name: str
    drawing: Drawing
    caption: str
    table: Table | None = None
    wide: bool = False


@dataclass(frozen=True)
class Text:
    """A paragraph, or a warning."""

    words: str
    warns: bool = False


@dataclass(frozen=True)
class Preformatted:
    caption: str
    words: str


Block = Table | Figure | Text | Preformatted


@dataclass(frozen=True)
class Section:
    title: str
    blocks: Sequence[Block]

    @property
    def figures(self) -> Iterator[Figure]:
        return (block for block in self.blocks if isinstance(block, Figure))


@dataclass(frozen=True)
class Chapter:
    """Words on one run, or on several together. `facts`: name -> value, at its head."""

    title: str
    facts: Mapping[str, str]
    sections: Sequence[Section] = field(default_factory=tuple)

    @property
    def figures(self) -> Iterator[Figure]:
        return (figure for section in self.sections for figure in section.figures)


@dataclass(frozen=True)
class Report:
    title: str
    chapters: Sequence[Chapter]
    footer: str = ""

    def named_figures(self) -> Iterator[tuple[str, Figure]]:
        """Yield the figures with names for their files, which only this program makes up."""
        for number, chapter in enumerate(self.chapters, 1):
            for figure in chapter.figures:
                several = len(self.chapters) > 1
                yield f"{number}-{figure.name}" if several else figure.name, figure


def points_of(every: Sequence[Series], x: str, words: object = None) -> Table | None:
    """Return the points of a chart as a table: all, or as many as fit in between the ends."""
    shown = [series for series in every if len(series.curve)]
    if not shown:
        return None
    longest = max(shown, key=lambda series: len(series.curve)).curve
    chosen = np.unique(np.linspace(0, len(longest) - 1, min(_ROWS, len(longest))).astype(int))
    rows = []
    for at in chosen:
        place = float(longest.x[at])
        values = [_near(series, place) for series in shown]
        rows.append([f"{place:,.0f}" if abs(place) >= 10 else f"{place:.4g}", *values])
    few = "Points" if len(chosen) == len(longest) else f"{len(chosen)} of {len(longest)} points"
    return Table(few, [x, *(series.name for series in shown)], rows, folded=True)


def _near(series: Series, place: float) -> str:
    """Return the value at the point next to a place; "" where the series has none so far out."""
    x = series.curve.x
    at = int(np.abs(x - place).argmin())
    width = (x[-1] - x[0]) / max(1, len(x) - 1)
    return f"{series.curve.mean[at]:.5g}" if abs(x[at] - place) <= width else ""
