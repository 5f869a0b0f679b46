"""Drawings: all of a step is there, in proportion; the front is what nothing beats."""

from collections import defaultdict
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpczero.parallel.pipeline.schedule import schedule
from hpczero.parallel.pipeline.simulate import Times, simulate
from hpczero.planner.drawings import _GAP, COLOURS, Choice, front, step, trade
from hpczero.svg import Span

NAME = "{http://www.w3.org/2000/svg}"


def spans_of(stages: int, micro_batches: int) -> tuple[list[list[Span]], float]:
    actions = schedule("1f1b", stages, 1, micro_batches)
    times = Times({"forward": [1.0] * stages, "backward": [2.0] * stages})
    course = simulate(actions, 1, micro_batches, times)
    rows = [
        [Span(one.begin, one.end, one.action.kind, str(one.action)) for one in row]
        for row in course.intervals
    ]
    return rows, course.makespan


def widths(drawing: str) -> dict[str, float]:
    """Return the pixels of each colour, legend and page left out."""
    found = defaultdict[str, float](float)
    for rectangle in ElementTree.fromstring(drawing).iter(f"{NAME}rect"):
        if rectangle.get("width") != "12":
            found[rectangle.get("fill", "")] += float(rectangle.get("width", "0"))
    return found


@pytest.mark.parametrize(("stages", "micro_batches"), [(1, 1), (4, 6), (3, 40)])
def test_a_step_is_drawn_in_proportion(stages: int, micro_batches: int) -> None:
    rows, makespan = spans_of(stages, micro_batches)
    found = widths(step(rows, "a step"))
    (whole,) = {found["#d8d8d8"]}
    for kind, seconds in (("forward", 1.0), ("backward", 2.0)):
        share = stages * micro_batches * seconds / (makespan * 1.02)
        assert found[COLOURS[kind]] == pytest.approx(share * whole * _GAP, rel=0.01)


def test_each_action_says_what_it_is() -> None:
    drawing = step(spans_of(2, 3)[0], "a step")
    for number in range(3):
        assert drawing.count(f"backward of micro-batch {number} in chunk 0<") == 2


@pytest.mark.slow
def test_a_step_of_many_actions_is_a_small_drawing() -> None:
    """What is narrower than a pixel is drawn with its neighbours; the time at work stays."""
    rows, makespan = spans_of(16, 2_000)
    drawing = step(rows, "a long step")
    assert len(drawing) < 5_000_000
    found = widths(drawing)
    at_work = found[COLOURS["forward"]] + found[COLOURS["backward"]]
    share = 16 * 2_000 * 3 / (makespan * 1.02)
    assert at_work == pytest.approx(share * found["#d8d8d8"] * _GAP, rel=0.02)


@given(
    st.lists(st.tuples(st.floats(0.1, 1e6), st.floats(0.1, 1e6)), min_size=1, max_size=20),
)
def test_the_front_is_what_nothing_beats(pairs: list[tuple[float, float]]) -> None:
    choices = [Choice(number, *pair) for number, pair in enumerate(pairs)]
    best = front(choices)
    for choice in choices:
        beaten = any(
            other.hours <= choice.hours
            and other.node_hours <= choice.node_hours
            and (other.hours, other.node_hours) != (choice.hours, choice.node_hours)
            for other in choices
        )
        assert beaten or any(
            (one.hours, one.node_hours) == (choice.hours, choice.node_hours) for one in best
        )
        assert not (beaten and choice in best)


def test_the_trade_names_each_number_of_nodes() -> None:
    drawing = trade([Choice(1, 100.0, 100.0), Choice(8, 20.0, 160.0, "a tip <&>")], "7B")
    assert ElementTree.fromstring(drawing) is not None
    assert ">1 node<" in drawing
    assert ">8 nodes<" in drawing
    assert "a tip &lt;&amp;&gt;" in drawing
