"""The bound of a pipeline's course: nothing is above it, and what occurs is close to it."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpczero.planner.shortest_course import shortest_course
from hpczero.planner.timetable import Course, Durations
from tests.support.exact_time import simulated

KINDS = [("1f1b", 1), ("gpipe", 1), ("interleaved", 2), ("interleaved", 3)]


def both(kind: tuple[str, int], stages: int, count: int, of: Durations) -> tuple[Course, Course]:
    """Return the bound, and the course of all actions."""
    name, chunks = kind
    bound = shortest_course(name, stages, chunks, count, of)
    return bound, simulated(name, stages, chunks, count, of)


@st.composite
def any_durations(draw: st.DrawFn, parts: int) -> Durations:
    seconds = st.lists(st.floats(0.2, 2.0), min_size=parts, max_size=parts)
    transfers = st.lists(st.floats(0.0, 0.5), min_size=parts - 1, max_size=parts - 1)
    return Durations(draw(seconds), draw(seconds), draw(transfers))


@given(st.data(), st.sampled_from(KINDS), st.integers(2, 6), st.integers(1, 20))
@settings(max_examples=150, deadline=None)
def test_no_stage_ends_before_its_bound(
    data: st.DataObject, kind: tuple[str, int], stages: int, count: int
) -> None:
    of = data.draw(any_durations(stages * kind[1]))
    bound, course = both(kind, stages, count, of)
    for least, stage in ((bound.begins, course.begins), (bound.ends, course.ends)):
        assert all(one <= other * (1 + 1e-9) for one, other in zip(least, stage, strict=True))


def usual(choice: random.Random, parts: int) -> Durations:
    """Draw stages that are alike but for the first and the last, and messages that are short."""
    backward = choice.uniform(1.5, 3.0)
    relative = [1.0] * parts
    relative[0] = choice.uniform(0.8, 1.3)  # it has the embedding
    relative[-1] = choice.uniform(1.0, 2.0)  # and this one the product with the vocabulary
    message = choice.uniform(0.0, 0.05)
    return Durations(relative, [backward * one for one in relative], [message] * (parts - 1))


@pytest.mark.parametrize("kind", ["1f1b", "gpipe"])
def test_the_bound_of_usual_stages_is_their_time(kind: str) -> None:
    choice = random.Random(1)
    for _ in range(100):
        stages, count = choice.randint(2, 12), choice.randint(1, 32)
        of = usual(choice, stages)
        bound, course = both((kind, 1), stages, count, of)
        assert max(bound.ends) == pytest.approx(max(course.ends), rel=0.01), (stages, count, of)


@pytest.mark.parametrize("chunks", [2, 4])
def test_the_bound_of_chunks_is_a_tenth_below_at_most(chunks: int) -> None:
    choice = random.Random(2)
    for _ in range(60):
        stages, count = choice.randint(2, 8), choice.randint(1, 32)
        of = usual(choice, stages * chunks)
        bound, course = both(("interleaved", chunks), stages, count, of)
        assert 0.9 * max(course.ends) < max(bound.ends) <= max(course.ends) * (1 + 1e-9)


def test_one_stage_is_its_time() -> None:
    assert both(("1f1b", 1), 1, 5, Durations([1.0], [2.0], []))[0].ends == [15.0]
