"""Runs are read from their folders, whatever lies there."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from hpczero.errors import InputError
from hpczero.runs import record
from hpczero.runs.record import read_run
from tests.support.run_files import BEGAN, ranks_on, write_run


def test_a_folder_that_is_no_run(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none"):
        with pytest.raises(InputError, match="is no run"):
            read_run(path)


def test_a_run_that_stopped_before_its_first_step(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "r", [], [{"event": "start", "time": 0}]))
    assert (run.steps, len(run.metrics), run.summary, run.problems) == (0, 0, {}, ())
    (job,) = run.jobs
    assert (job.number, job.first, job.last, job.ended - job.began, job.ranks) == (1, 0, 0, 0, [])
    assert run.changed_settings == {"train.steps": 123}


def test_jobs_of_a_run_that_was_killed_and_went_on(tmp_path: Path) -> None:
    """Killed after step 7 at second 18; the next job goes on behind step 5."""
    again = {"lost_steps": 2, "lost_seconds": 3.5, "lost_until": "2027-01-15T08:00:18+00:00"}
    events = [
        {"event": "start", "time": 0, "ranks": ranks_on("a", "b")},
        {"event": "layout", "time": 1, "data": 2},
        {"event": "first", "time": 11, "step": 1},
        {"event": "start", "time": 100, "ranks": ranks_on("c")},
        {"event": "resume", "time": 101, "step": 5, **again},
        {"event": "stop", "time": 120, "state": "finished", "reason": ""},
    ]
    metrics = [{"step": step, "time": 10 + step} for step in range(1, 6)]
    metrics += [{"step": step, "time": 100 + step} for step in range(6, 11)]
    run = read_run(write_run(tmp_path / "r", metrics, events))
    first, second = run.jobs
    assert (first.number, first.first, first.last, first.state) == (1, 0, 5, "")
    assert (first.began - BEGAN, first.ended - BEGAN, first.lost) == (0, 18, 3.5)
    assert first.layout["data"] == 2
    assert first.hosts == {0: "a", 1: "b"}
    assert (second.number, second.first, second.last, second.state) == (2, 5, 10, "finished")
    assert (second.began - BEGAN, second.ended - BEGAN, second.lost) == (100, 120, 0)
    assert run.steps == 10


def test_hosts_of_strangers_are_fit_to_be_printed(tmp_path: Path) -> None:
    ranks: list[Any] = [
        {"rank": 0, "host": "\x1b[31mred\n"},
        {"rank": [1], "host": "a"},
        {"rank": 2},
        "no table",
        {"rank": 3, "host": {"x": 1}},
    ]
    run = read_run(write_run(tmp_path / "r", [], [{"event": "start", "ranks": ranks}]))
    assert run.jobs[0].hosts == {0: "\\x1b[31mred\\n", 2: "None", 3: "{'x': 1}"}


@pytest.mark.parametrize(
    "event",
    [
        {"event": "start", "ranks": 7, "time": []},
        {"event": "start", "ranks": {"a": 1}, "time": "never"},
        {"event": ["start"]},
        {"event": {"start": 1}, "time": 5},
        {"event": "resume", "step": "x", "lost_until": 9, "lost_seconds": [], "time": 1e300},
        {"event": "resume", "step": 10**400, "lost_seconds": -4},
        {"event": "resume", "step": 1e999, "lost_seconds": 1e999},
        {"event": "resume", "step": None, "lost_seconds": None},
        {"event": "stop", "state": 5, "reason": ["\x1b"]},
    ],
    ids=lambda event: json.dumps(event)[:40],
)
def test_events_of_strangers_raise_nothing(tmp_path: Path, event: dict[str, Any]) -> None:
    folder = tmp_path / "r"
    write_run(folder, [{"step": 1, "time": 1}], [])
    lines = [{"event": "start", "time": "2026-01-01"}, event, {"event": "start"}, event]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "events.jsonl").write_text(text)
    run = read_run(folder)
    for job in run.jobs:
        assert job.lost >= 0
        assert isinstance(job.state, str)
    assert len(run.jobs) >= 2


def test_damaged_files_are_problems_that_are_told(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "r", [{"step": 1}], [{"event": "start"}])
    (folder / "spec.toml").write_text("[train]\nsteps = \x1b")
    for name in ("metrics", "events", "memory"):
        with (folder / f"{name}.jsonl").open("a") as file:
            file.write("[" * 10_000 + "\n{half")
    (folder / "summary.json").write_text("{")
    run = read_run(folder)
    assert (run.spec, run.settings, run.changed_settings, run.summary) == (None, {}, {}, {})
    said = "\n".join(run.problems)
    for name in ("spec.toml", "metrics.jsonl: 2", "events.jsonl: 2", "memory.jsonl: 2", "summary"):
        assert name in said
    assert "\x1b" not in said


@pytest.mark.parametrize("content", ["[1]", "null", "9" * 5000, "[" * 200_000, "NaN", '"x"'])
def test_a_summary_that_is_no_table(tmp_path: Path, content: str) -> None:
    folder = write_run(tmp_path / "r", [], [])
    (folder / "summary.json").write_text(content)
    assert read_run(folder).summary == {}


def test_links_pipes_and_folders_in_place_of_files(tmp_path: Path) -> None:
    folder = tmp_path / "r"
    folder.mkdir()
    (folder / "spec.toml").mkdir()
    os.mkfifo(folder / "metrics.jsonl")
    (folder / "events.jsonl").symlink_to(folder / "events.jsonl")
    os.mkfifo(folder / "memory.jsonl")
    (folder / "summary.json").symlink_to("/dev/zero")
    run = read_run(folder)
    assert (run.steps, list(run.events), run.jobs, run.summary) == (0, [], [], {})
    assert any("spec.toml" in problem for problem in run.problems)


def test_thousands_of_restarts(tmp_path: Path) -> None:
    events = [
        event
        for number in range(3000)
        for event in (
            {"event": "start", "time": 10 * number},
            {"event": "resume", "time": 10 * number + 1, "step": number},
        )
    ]
    metrics = [{"step": number + 1, "time": 10 * number + 5} for number in range(3000)]
    run = read_run(write_run(tmp_path / "r", metrics, events))
    jobs = run.jobs
    assert len(jobs) == 1000
    assert (jobs[0].number, jobs[0].first, jobs[0].last) == (2001, 2000, 2001)
    assert (jobs[-1].number, jobs[-1].last) == (3000, 3000)


def test_more_events_than_are_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "_MOST_EVENTS", 3)
    run = read_run(write_run(tmp_path / "r", [], [{"event": "x"}] * 5))
    assert len(run.events) == 3
    assert "only the first 3 lines" in run.problems[0]
