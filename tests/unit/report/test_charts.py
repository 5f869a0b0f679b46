"""Charts: scales, ticks, and marks where values say; colours that readers can tell apart."""

from itertools import pairwise

import numpy as np
import pytest

from hpczero.report.charts import Axes, Layer, lines, series, stacked, tick_words
from hpczero.report.marks import COLOURS, LEVELS, SERIES, Area, Dot, Words, level_of


def luminance(colour: str) -> float:
    """Return the relative luminance as WCAG 2 defines it."""
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
    ]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    bright, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (bright + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("surroundings", [0, 1])
def test_words_and_marks_stand_out(surroundings: int) -> None:
    page = COLOURS["page"][surroundings]
    for name in ("ink", "quiet"):
        assert contrast(COLOURS[name][surroundings], page) >= 4.5, name
    for name in SERIES:
        assert contrast(COLOURS[name][surroundings], page) >= 3, name


def test_levels_grow_lighter_evenly() -> None:
    steps = [luminance(after) - luminance(before) for before, after in pairwise(LEVELS)]
    assert min(steps) > 0
    assert [level_of(share) for share in (0, 0.5, 1.0, 2.0)] == [
        *("level0", "level5", "level9", "level9")
    ]


@pytest.mark.parametrize(
    ("value", "words"),
    [(0, "0"), (0.0005, "5e-04"), (0.3, "0.3"), (1500, "1500"), (20000, "20k"), (3e6, "3M")],
)
def test_ticks_are_short(value: float, words: str) -> None:
    assert tick_words(value) == words


@pytest.mark.parametrize("values", [[1.0], [2.0, 2.0], [0.0, 0.0, 0.0], [-1.0, 5.0], [1e-9, 1e9]])
def test_any_values_lie_inside(values: list[float]) -> None:
    x = np.arange(1.0, len(values) + 1)
    drawing = lines(
        Axes("a", "step", "b", may_be_by_factors=True),
        [series("one", x, np.array(values), 100, "blue")],
    )
    assert drawing
    dots = [mark for mark in drawing.marks if isinstance(mark, Dot)]
    assert len(dots) == len(values)
    for dot in dots:
        assert 0 <= dot.x <= drawing.width
        assert 0 <= dot.y <= drawing.height
    assert any(isinstance(mark, Words) and mark.size == 11 for mark in drawing.marks)


def test_nothing_gives_no_chart() -> None:
    nothing = series("one", np.array([1.0]), np.array([np.nan]), 100, "blue")
    assert lines(Axes("a", "step", "b"), [nothing]) is None
    assert stacked(Axes("a", "step", "b"), np.array([]), []) is None


def test_a_long_curve_keeps_its_extremes_in_its_band() -> None:
    x = np.arange(100_000.0)
    y = np.sin(x / 1000)
    y[54_321] = 9.0
    drawing = lines(Axes("a", "step", "b"), [series("one", x, y, 300, "blue")])
    assert drawing
    (band,) = (mark for mark in drawing.marks if isinstance(mark, Area))
    assert len(band.points) <= 600
    top = min(y for _, y in band.points)
    others = sorted(y for _, y in band.points)[1:]
    assert top < others[0] - 50
    assert "highest 9.00 near 54," in drawing.description


def test_stacked_areas_are_as_high_as_their_sums() -> None:
    x = np.array([1.0, 2.0, 3.0])
    layers = [
        Layer("a", np.array([1.0, 2.0, 3.0]), "blue"),
        Layer("b", np.array([3.0, 2.0, 1.0]), "green"),
    ]
    drawing = stacked(Axes("a", "step", "b"), x, layers)
    assert drawing
    first, second = (mark for mark in drawing.marks if isinstance(mark, Area))
    bottom = first.points[-1][1]
    heights = [bottom - y for _, y in second.points[:3]]
    assert heights == pytest.approx([heights[0]] * 3)
    assert [bottom - y for _, y in first.points[:3]] == pytest.approx(
        [heights[0] * share for share in (0.25, 0.5, 0.75)]
    )
    assert second.points[3:] == list(reversed(first.points[:3]))
