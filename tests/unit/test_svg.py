"""Pages of SVG: valid XML, round ticks, no words that do more than be read."""

from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpczero.svg import Page, Scale, scale, scale_by_factors

NAME = "{http://www.w3.org/2000/svg}"


@given(st.text(), st.text())
def test_any_words_are_words(title: str, words: str) -> None:
    page = Page(100, 50, "title")
    page.words(1, 2, words)
    page.rectangle(0, 0, 1, 1, "#000000", title)
    root = ElementTree.fromstring(str(page))
    (text,) = root.iter(f"{NAME}text")
    assert (text.text or "") == "".join(letter for letter in words if letter.isprintable())
    assert {element.tag for element in root.iter()} <= {
        NAME + tag for tag in ("svg", "title", "rect", "text")
    }


@given(st.floats(1e-6, 1e9), st.integers(2, 20))
def test_ticks_are_round_few_and_inside(most: float, about: int) -> None:
    of = Scale(0.0, most, 0.0, 100.0)
    ticks = list(of.ticks(about))
    assert 0 < len(ticks) <= about + 1
    assert all(-1e-9 <= of.place(tick) <= 100 + 1e-6 for tick in ticks)
    if len(ticks) > 1:
        digits = f"{ticks[1] - ticks[0]:.3e}"
        assert digits.partition("e")[0] in ("1.000", "2.000", "5.000")


@pytest.mark.parametrize("values", [[], [0.0], [3.0, 7.0]])
def test_a_scale_holds_its_values(values: list[float]) -> None:
    of = scale(values, 10.0, 110.0)
    assert all(10 <= of.place(value) <= 110 for value in values)


@given(st.lists(st.floats(1e-6, 1e9), min_size=1, max_size=9))
def test_a_scale_by_factors_holds_its_values_in_order(values: list[float]) -> None:
    of = scale_by_factors(values, 10.0, 110.0)
    places = [of.place(value) for value in sorted(values)]
    assert places == sorted(places)
    assert all(10 <= place <= 110 for place in places)
    assert all(of.least <= tick <= of.most for tick in of.ticks())
