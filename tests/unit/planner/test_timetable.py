"""The quick course of a pipeline is the simulated one."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpczero.parallel.pipeline.schedule import schedule
from hpczero.parallel.pipeline.simulate import Times, simulate
from hpczero.planner import timetable
from hpczero.planner.timetable import Durations, course_of

KINDS = [("1f1b", 1), ("gpipe", 1), ("interleaved", 2), ("interleaved", 3)]


@st.composite
def durations(draw: st.DrawFn, parts: int) -> Durations:
    seconds = st.floats(0.5, 2.0)
    lists = (draw(st.lists(seconds, min_size=parts, max_size=parts)) for _ in range(2))
    transfers = st.lists(st.floats(0.0, 0.5), min_size=parts - 1, max_size=parts - 1)
    return Durations(*lists, draw(transfers))


@given(st.data(), st.sampled_from(KINDS), st.integers(2, 5), st.integers(1, 12))
@settings(max_examples=60, deadline=None)
def test_it_is_the_simulated_one(
    data: st.DataObject, kind: tuple[str, int], stages: int, count: int
) -> None:
    name, chunks = kind
    of = data.draw(durations(stages * chunks))
    times = Times({"forward": of.forward, "backward": of.backward}, of.transfers)
    simulated = simulate(schedule(name, stages, chunks, count), chunks, count, times).intervals
    course = course_of(name, stages, chunks, count, of)
    assert course.begins == pytest.approx([stage[0].begin for stage in simulated])
    assert course.ends == pytest.approx([stage[-1].end for stage in simulated])


def test_without_a_pipeline_one_follows_the_other() -> None:
    course = course_of("1f1b", 1, 1, 10**9, Durations([1.0], [2.0], []))
    assert (course.begins, course.ends) == ([0.0], [3e9])


@pytest.mark.parametrize(("kind", "chunks"), KINDS)
def test_long_ones_are_carried_on(kind: str, chunks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    stages, count = 4, 64
    parts = range(stages * chunks)
    of = Durations(
        [1.0 + 0.02 * (part % 3) for part in parts],
        [2.0 + 0.03 * (part % 2) for part in parts],
        [0.05] * (len(parts) - 1),
    )
    exact = max(course_of(kind, stages, chunks, count, of).ends)
    monkeypatch.setattr(timetable, "_EXACT", 0)
    assert max(course_of(kind, stages, chunks, count, of).ends) == pytest.approx(exact, rel=0.01)


def test_a_stage_that_is_slower_by_a_little_shows_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """The middle of the schedule repeats itself, but only once the slowest has caught up."""
    of = Durations(
        [1.66, *[1.73] * 8, 1.60],
        [1.71, *[1.855] * 8, 1.78],
        [0.00045, 0.00045, 0.00045, 0.016, 0.016, 0.00045, 0.00045, 0.00045, 0.016],
    )
    exact = max(course_of("interleaved", 5, 2, 384, of).ends)
    monkeypatch.setattr(timetable, "_EXACT", 0)
    assert max(course_of("interleaved", 5, 2, 384, of).ends) == pytest.approx(exact, rel=1e-4)
