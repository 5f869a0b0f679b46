"""Losses at equal steps, tokens and times, against sums in plain Python."""

import math
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpczero.runs.axes import Course, course_of
from hpczero.runs.record import read_run
from tests.support.made_runs import Made, evaluated, line, stamp

LENGTH = 60  # tokens of the text that is learned


def course(made: Made) -> Course:
    with tempfile.TemporaryDirectory() as folder:
        return course_of(read_run(made.write(Path(folder) / "run")))


@st.composite
def cut_texts(draw: st.DrawFn) -> tuple[list[float], list[list[int]]]:
    """Draw a loss for every token, and the steps of two runs that read the same text."""
    losses = draw(st.lists(st.floats(0, 10), min_size=LENGTH, max_size=LENGTH))
    ends = st.sets(st.integers(1, LENGTH - 1), max_size=20)
    return losses, [sorted({*draw(ends), LENGTH}) for _ in range(2)]


def steps_of(losses: list[float], ends: list[int], again: list[int]) -> Iterator[dict[str, Any]]:
    """Yield the lines of steps that end at these tokens, with restarts.

    Each of `again` is the number of a line after which the run was restarted two steps before it;
    the lines of the steps that were lost are nonsense.
    """
    begins = [0, *ends[:-1]]
    for step, (begin, end) in enumerate(zip(begins, ends, strict=True), 1):
        if step in again:
            for lost in (step, step + 1):
                yield line(lost, 1e3, tokens=77, seconds=5.0)
        loss = sum(losses[begin:end]) / (end - begin)
        yield line(step, loss, tokens=end - begin, seconds=0.5)


@settings(max_examples=30, deadline=None)
@given(cut_texts(), st.lists(st.integers(1, 20), max_size=3), st.data())
def test_runs_with_other_batches_have_the_same_loss_at_equal_tokens(
    cut: tuple[list[float], list[list[int]]], again: list[int], data: st.DataObject
) -> None:
    """A loss is the mean over the tokens of a span, however steps and restarts cut the text."""
    losses, (ends, other_ends) = cut
    both = sorted({0, *ends} & {0, *other_ends})
    x = data.draw(st.sampled_from(both[1:]))
    begin = data.draw(st.sampled_from([place for place in both if place < x]))
    wanted = sum(losses[begin:x]) / (x - begin)
    for its_ends, restarts in ((ends, again), (other_ends, [])):
        of_run = course(Made(list(steps_of(losses, its_ends, restarts))))
        assert of_run.end("tokens") == LENGTH
        assert of_run.training_loss("tokens", x, x - begin) == pytest.approx(wanted, abs=1e-9)
        assert of_run.end("seconds") == pytest.approx(0.5 * len(its_ends))


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.tuples(st.floats(0, 9), st.integers(1, 9)), min_size=1, max_size=30),
    st.integers(1, 1080),
    st.integers(1, 1080),
)
def test_a_loss_is_the_mean_of_the_steps_in_its_span(
    steps: list[tuple[float, int]], quarters: int, wide: int
) -> None:
    lines = [line(step, loss, tokens) for step, (loss, tokens) in enumerate(steps, 1)]
    total = sum(tokens for _, tokens in steps)
    x, span = min(quarters / 4, total), wide / 4  # which are exact
    ends = [sum(tokens for _, tokens in steps[:count]) for count in range(1, len(steps) + 1)]
    inside = [one for one, end in zip(steps, ends, strict=True) if x - span < end <= x]
    inside = inside or [one for one, end in zip(steps, ends, strict=True) if end <= x][-1:]
    found = course(Made(lines)).training_loss("tokens", x, span)
    if inside:
        wanted = sum(loss * tokens for loss, tokens in inside) / sum(t for _, t in inside)
        assert found == pytest.approx(wanted)
    else:
        assert math.isnan(found)


def test_steps_whose_lines_are_missing_count_as_the_next_one() -> None:
    of_run = course(Made([line(1, 3.0, 10), line(4, 2.0, 20), line(5, 1.0, 20)]))
    assert of_run.of_axis["tokens"].tolist() == [10, 70, 90]
    assert of_run.of_axis["seconds"].tolist() == [1, 4, 5]


def test_the_clock_has_what_was_lost_and_not_the_time_between_two_jobs() -> None:
    """The first job dies at 7 s after a save at step 2; the second begins at 100 s."""
    events = [
        {"time": stamp(0), "event": "start"},
        {"time": stamp(7), "event": "save", "step": 2},
        {"time": stamp(100), "event": "start"},
        {"time": stamp(100.5), "event": "resume", "step": 2},
    ]
    lines = [
        *(line(step, 3.0) for step in (1, 2, 3, 4)),
        *(line(step, 3.0) | {"time": stamp(100 + step)} for step in (3, 4, 5)),
    ]
    of_run = course(Made(lines, events=events))
    assert of_run.of_axis["steps"].tolist() == [1, 2, 3, 4, 5]
    assert of_run.of_axis["clock"].tolist() == pytest.approx([1, 2, 10, 11, 12], abs=1e-5)
    assert of_run.of_axis["seconds"].tolist() == [1, 2, 3, 4, 5]


def test_an_evaluation_counts_between_two_of_them_only() -> None:
    lines = [line(1, 3.0, **evaluated(3)), line(2, 3.0), line(3, 3.0, **evaluated(1)), line(4, 3.0)]
    of_run = course(Made(lines))
    found = [of_run.validation_loss("tokens", x) for x in (50, 100, 150, 200, 300)]
    assert found[1:] == pytest.approx([3, 2.5, 2, 1])
    assert math.isnan(found[0])
    assert math.isnan(of_run.validation_loss("tokens", 400))


@pytest.mark.parametrize("bad", [None, "x", -5, float("nan"), float("inf")])
def test_an_axis_that_is_not_known_is_not_guessed(bad: object) -> None:
    lines = [line(1, 3.0), line(2, 2.0) | {"tokens": bad}, line(3, 1.0)]
    of_run = course(Made(lines))
    assert math.isnan(of_run.end("tokens"))
    assert math.isnan(of_run.training_loss("tokens", 100, 10))
    assert of_run.training_loss("steps", 3, 2) == 1.5, "the mean over steps"


def test_a_loss_that_is_not_finite_is_not_left_out_of_a_mean() -> None:
    of_run = course(Made([line(1, 3.0), line(2, float("nan")), line(3, 1.0)]))
    assert math.isnan(of_run.training_loss("steps", 3, 2))
    assert of_run.training_loss("steps", 3, 1) == 1.0
