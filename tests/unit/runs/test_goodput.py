"""Every second of every rank is booked once: beside a booking made by hand."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hpczero.runs import rank_times
from hpczero.runs.columns import seconds_of
from hpczero.runs.goodput import KINDS, Goodput, goodput
from hpczero.runs.job_scripts import job_scripts
from hpczero.runs.record import Run, read_run
from tests.support.run_files import moment, ranks_on, write_rank_times, write_run

NOTHING = dict.fromkeys(KINDS, 0.0)


def step(number: int, time: float, seconds: float = 1.0, **more: float) -> dict[str, Any]:
    """Return the line of a step: 60 % computing, 30 % waits, 10 % data."""
    parts = {"compute_seconds": 0.6, "comm_seconds": 0.3, "data_seconds": 0.1}
    shares = {name: share * seconds for name, share in parts.items()}
    return {"step": number, "time": time, "step_seconds": seconds, **shares, **more}


def killed_and_resumed(folder: Path, job: str | None = None, **again: Any) -> Run:
    """Write a run of 2 ranks, killed at second 19 after step 7, and of 3, which go on behind 5."""
    first = [step(at, 11 + at) for at in range(1, 5)]
    first += [step(5, 16.5, evaluation_seconds=0.5)]
    second = [step(at, 63 + 2 * at, seconds=2.0) for at in range(6, 9)]
    lost = {"lost_steps": 2, "lost_seconds": 2.0, "lost_until": moment(19)} | again
    events = [
        {"event": "start", "time": 0, "job": job, "began": moment(-5), "ranks": ranks_on("a", "a")},
        {"event": "first", "time": 12, "step": 1, "seconds": 1.0},
        {"event": "save", "time": 16.9, "step": 5, "stalled": 0.4},
        {
            "event": "start",
            "time": 62,
            "job": job,
            "began": moment(60),
            "ranks": ranks_on("b", "b", "b"),
        },
        {"event": "resume", "time": 70, "step": 5, **lost},
        {"event": "first", "time": 75, "step": 6, "seconds": 2.0},
        {"event": "stop", "time": 80, "state": "finished"},
    ]
    return read_run(write_run(folder, first + second, events))


BOOKED = NOTHING | {
    "computing": 2 * 3.0 + 3 * 3.6,
    "communication": 2 * 1.5 + 3 * 1.8,
    "data": 2 * 0.5 + 3 * 0.6,
    "evaluation": 2 * 0.5,
    "saving": 2 * 0.4,
    "start": 2 * 16.0,  # from second -5 to 11
    "restart": 3 * 13.0,  # from second 60 to 73
    "lost": 2 * 2.0,
    "ending": 3 * 1.0,
    "idle": 2 * 0.1,
}


def test_a_run_with_a_kill_and_a_resume(tmp_path: Path) -> None:
    found = goodput(killed_and_resumed(tmp_path / "r"))
    assert found.of_kind == pytest.approx(BOOKED)
    assert found.allocated == pytest.approx(2 * 24 + 3 * 20)
    useful = sum(BOOKED[kind] for kind in ("computing", "communication", "data", "evaluation"))
    assert found.share == pytest.approx(useful / 108)
    sums = {"allocated": pytest.approx(108), "share": found.share, "queue": None}
    assert found.as_data() == {**found.of_kind, **sums}


def test_ranks_divide_the_seconds_of_steps_as_their_mean_does(tmp_path: Path) -> None:
    run = killed_and_resumed(tmp_path / "r")
    ranks = [{"compute": 3, "wait": 1, "data": 1}, {"compute": 1, "wait": 4, "data": 0}]
    write_rank_times(run.path, 2, (1, 5, ranks), (6, 7, ranks))
    write_rank_times(run.path, 3, (6, 8, [{"compute": 4, "wait": 2}] * 3))
    found = goodput(run, rank_times.read(run.path))
    means = {"computing": 2 * 2.0 + 3 * 4, "communication": 2 * 2.5 + 3 * 2, "data": 2 * 0.5}
    assert found.of_kind == pytest.approx(BOOKED | means)


def with_books(run: Run, submitted: float, *links: tuple[float, str, str, str]) -> Run:
    """Add the record of a submission, whose jobs noted these links."""
    books = run.path / "batch" / f"20270115T08{len(links):04}-0123456789ab"
    books.mkdir(parents=True)
    (books / "submission.json").write_text(json.dumps({"submitted": moment(submitted)}))
    lines = [f"{moment(at)} {job} {event} {detail}\n" for at, job, event, detail in links]
    (books / "links").write_text("".join(lines))
    return run


def booked(run: Run) -> Goodput:
    return goodput(run, (), job_scripts(run.path))


def test_what_nobody_submitted_has_no_queue(tmp_path: Path) -> None:
    assert booked(killed_and_resumed(tmp_path / "r")).queued is None


def test_jobs_wait_from_their_submission_or_the_end_of_what_the_run_did(tmp_path: Path) -> None:
    """The chain 7, 8, 9 was submitted at -100; 7 was killed at 19, 9 had nothing to do."""
    run = killed_and_resumed(tmp_path / "r")
    links = [(-10, "7", "began", "none"), (50, "8", "began", "x"), (81, "8", "ended", "0")]
    with_books(run, -100, *links, (95, "9", "passed", "0"))
    assert booked(run).queued == pytest.approx(90 + (50 - 19))


def test_a_job_that_is_requeued_waits_again_from_what_it_did(tmp_path: Path) -> None:
    run = killed_and_resumed(tmp_path / "r")
    with_books(run, -30, (-10, "7", "began", "none"), (55, "7", "began", "x"))
    assert booked(run).queued == pytest.approx(20 + (55 - 19))


def test_the_time_of_a_job_is_that_of_its_script(tmp_path: Path) -> None:
    """From -10 to 90 instead of from -5 to 80; another job's times change nothing."""
    run = killed_and_resumed(tmp_path / "r", job="7")
    with_books(run, -30, (-10, "7", "began", "none"), (55, "8", "began", "x"))
    with_books(run, 40, (56, "7", "began", "x"), (90, "7", "ended", "0"), (91, "7", "ended", "0"))
    found = booked(run)
    assert found.of_kind == pytest.approx(
        BOOKED | {"start": 2 * 21.0, "restart": 3 * 17.0, "ending": 3 * 11.0}
    )
    assert found.allocated == pytest.approx(2 * 29 + 3 * 34)


@pytest.mark.parametrize(
    "content", ["", "[]", "7", '{"submitted": 1e999}', "[" * 100_000, '{"submitted": "0001-01-01"}']
)
def test_books_that_tell_nothing_change_nothing(tmp_path: Path, content: str) -> None:
    run = killed_and_resumed(tmp_path / "r")
    with_books(run, 0, (1, "7", "began", "x"))
    (record,) = run.path.glob("batch/*/submission.json")
    record.write_text(content)
    (record.parent / "links").write_text("x\n\n- 7 began\nnan 7 began 0\n" + content)
    found = booked(run)
    assert (found.queued, found.of_kind) == (None, pytest.approx(BOOKED))


def test_a_run_without_jobs_has_no_share(tmp_path: Path) -> None:
    found = goodput(read_run(write_run(tmp_path / "r", [step(1, 1)], [])))
    assert (found.allocated, found.share) == (0, None)


def test_a_job_that_ends_before_its_first_step_is_all_start(tmp_path: Path) -> None:
    events = [{"event": "start", "time": 0}, {"event": "stop", "time": 9, "state": "stopped"}]
    found = goodput(read_run(write_run(tmp_path / "r", [], events)))
    assert found.of_kind == NOTHING | {"start": 9}


def test_a_start_and_a_resume_at_the_same_moment(tmp_path: Path) -> None:
    """Times have milliseconds; the lost steps are those of the job before, also then."""
    events = [
        {"event": "start", "time": 0},
        {"event": "start", "time": 50},
        {"event": "resume", "time": 50, "lost_seconds": 4.0, "lost_until": moment(30)},
        {"event": "stop", "time": 60},
    ]
    found = goodput(read_run(write_run(tmp_path / "r", [], events)))
    assert found.of_kind["lost"] > 0
    assert found.allocated == pytest.approx(40)


@pytest.mark.parametrize("lost", [1e308, 10**400, -5, "x", None, [1], float("nan"), 1e999])
def test_seconds_that_cannot_be_change_no_sum(tmp_path: Path, lost: object) -> None:
    run = killed_and_resumed(tmp_path / "r", lost_seconds=lost)
    found = goodput(run)
    assert found.allocated == pytest.approx(108)
    assert min(found.of_kind.values()) >= 0


NUMBERS = st.sampled_from([0.0, 0.5, 3.0, -1.0, 1e6, 1e308, float("nan"), float("inf"), None, "x"])
LINES = st.lists(
    st.fixed_dictionaries(
        {"step": st.integers(0, 9), "time": st.floats(0, 100)},
        optional=dict.fromkeys(
            ("compute_seconds", "comm_seconds", "data_seconds", "evaluation_seconds"), NUMBERS
        ),
    ),
    max_size=8,
)
EVENTS = st.lists(
    st.fixed_dictionaries(
        {
            "event": st.sampled_from(["start", "resume", "first", "save", "stop"]),
            "time": st.floats(0, 100),
        },
        optional={
            **dict.fromkeys(("lost_seconds", "stalled", "seconds", "step"), NUMBERS),
            "began": st.floats(-10, 100).map(moment),
            "lost_until": st.floats(0, 100).map(moment),
        },
    ),
    max_size=8,
)


@given(LINES, EVENTS)
@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_parts_add_up_whatever_the_files_say(
    tmp_path: Path, lines: list[dict[str, Any]], events: list[dict[str, Any]]
) -> None:
    run = read_run(write_run(tmp_path / "r", lines, events))
    found = goodput(run)
    whole = sum(job.ended - _began(job.start, job.began) for job in run.jobs)
    assert found.allocated == pytest.approx(whole)
    assert min(found.of_kind.values()) >= 0


def _began(start: Any, began: float) -> float:
    of_process = seconds_of(start.get("began"))
    return of_process if of_process < began else began
