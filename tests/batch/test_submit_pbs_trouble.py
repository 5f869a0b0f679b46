"""submit and its kin where something is in the way: lost answers, full disks, two users of one run, impatience."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace

import pytest

from hpczero.batch import pbs, scheduler, submission, submit
from hpczero.cli import main
from hpczero.lock import Holder, RunLock
from hpczero.spec.load import load
from hpczero.train import rundir
from tests.batch import fakes
from tests.batch.conftest import record


def test_two_who_submit_a_run_at_once(queue: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "runs" / "a-run" / "batch").mkdir(parents=True)
    with RunLock(tmp_path / "runs" / "a-run" / "batch"):
        assert main(["submit", "spec.toml"]) == 2
        assert "runs/a-run/batch is in use by process" in capsys.readouterr().err
    assert not fakes.calls(queue, "qsub")
    assert main(["submit", "spec.toml"]) == 0


def test_a_submission_that_is_interrupted_is_taken_back(queue: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also the job that was entered when the user lost patience."""
    real = pbs.submit

    def impatient(words: Sequence[str]) -> str:
        number = real(words)
        if number == "18.pbs":
            raise KeyboardInterrupt
        return number

    monkeypatch.setattr(pbs, "submit", impatient)
    assert main(["submit", "spec.toml"]) == 1
    assert [fakes.state(queue, number) for number in ("17.pbs", "18.pbs")] == ["F", "F"]
    monkeypatch.undo()


def test_a_job_that_is_still_on_its_way_into_the_queue(queue: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server enters it a moment after its answer was given up: it is not submitted once more."""
    (queue / "lose").touch()
    real, waited = pbs.jobs, []
    monkeypatch.setattr(pbs, "jobs", lambda user, numbers: real(user, numbers) if waited else [])
    own = submission.Submission.new(tmp_path / "runs" / "x", "pbs", "generic/pbs", 1, 1, 60, 1)
    own.path.mkdir(parents=True)
    (own.path / "job.sh").write_text(f"#!/bin/bash\n#PBS -v HPCZERO_TAG={own.tag(0)}\n")
    assert submit.Chain(own, sleep=waited.append).submit().jobs == ("17.pbs",)
    assert len(fakes.calls(queue, "qsub")) == 1


def test_a_server_without_history(queue: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (queue / "forgetful").touch()
    assert main(["submit", "spec.toml"]) == 0
    assert main(["status", "a-run"]) == 0
    assert "job 17.pbs  queued" in capsys.readouterr().out
    for number in record(tmp_path).jobs:
        fakes.state(queue, number, "F")
    scheduler.forget("pbs")
    assert main(["status", "a-run"]) == 0
    said = capsys.readouterr()
    assert "never began" in said.out
    assert said.err == ""
    assert main(["submit", "spec.toml"]) == 0


def test_a_home_that_cannot_be_written_loses_no_job(
    queue: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "/proc/nothing")
    assert main(["submit", "spec.toml"]) == 0
    said = capsys.readouterr()
    assert "submitted as job 17.pbs, 18.pbs and 19.pbs" in said.out
    assert "cannot write /proc/nothing/hpczero/runs" in said.err
    assert main(["status", "runs/a-run"]) == 0
    assert main(["cancel", "runs/a-run"]) == 0


def test_what_is_cancelled_is_cancelled(queue: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also where the books cannot be written any more, and jobs that are known by their tag only."""
    assert main(["submit", "spec.toml"]) == 0
    own = record(tmp_path)
    (own.path / "over").mkdir()  # as good as a full disk
    kept = json.loads((own.path / "submission.json").read_text())
    (own.path / "submission.json").write_text(json.dumps(kept | {"jobs": ["17.pbs"], "complete": False}))
    assert main(["cancel", "a-run"]) == 0
    said = capsys.readouterr()
    assert "cancelled: 17.pbs, 18.pbs and 19.pbs" in said.out
    assert "over: Is a directory" in said.err
    assert [fakes.state(queue, number) for number in own.jobs] == ["F", "F", "F"]


def test_the_lock_of_a_job_that_is_gone_keeps_nobody_waiting(queue: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["submit", "spec.toml"]) == 0
    for number in record(tmp_path).jobs:
        fakes.state(queue, number, "F")
    lock = tmp_path / "runs" / "a-run" / "lock"
    elsewhere = Holder("n7", "another kernel", 1, 0.0, "ada", "today", "99.pbs")
    lock.write_text(json.dumps(asdict(elsewhere)))
    assert main(["submit", "spec.toml"]) == 2
    assert "is in use by process 1 on n7, started by ada at today, batch job 99.pbs" in capsys.readouterr().err
    lock.write_text(json.dumps(asdict(elsewhere) | {"job": "17.pbs"}))
    assert main(["submit", "spec.toml"]) == 0


def test_the_job_works_in_the_folder_that_was_meant_here(
    queue: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever the variable is on a compute node."""
    monkeypatch.setenv("SCRATCH_OF_MINE", str(tmp_path / "scratch"))
    assert main(["submit", "spec.toml", "--set", "output=$SCRATCH_OF_MINE/runs"]) == 0
    (own,) = submission.of_run(tmp_path / "scratch" / "runs" / "a-run")
    monkeypatch.setenv("SCRATCH_OF_MINE", "/elsewhere")
    assert rundir.path_of(load(own.path / "spec.toml").spec) == tmp_path / "scratch" / "runs" / "a-run"
    monkeypatch.delenv("SCRATCH_OF_MINE")
    assert main(["submit", "spec.toml", "--set", "output=$SCRATCH_OF_MINE/runs"]) == 2
    assert "what follows the $ is not set here" in capsys.readouterr().err


def test_a_layout_can_be_probed_again(queue: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each probe is a run of its own: the first one being finished says nothing about another layout."""
    for moment in (1, 2):
        monkeypatch.setattr(submit, "datetime", SimpleNamespace(now=lambda zone, moment=moment: datetime(2026, 1, 5, 10, 0, moment, tzinfo=zone)))
        assert main(["submit", "spec.toml", "--probe"]) == 0
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["a-run.probe-20260105T100001", "a-run.probe-20260105T100002"]


def test_another_run_is_no_new_question(queue: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a-run", "b-run"):
        assert main(["submit", "spec.toml", "--set", f"name={name}"]) == 0
    asked = len(fakes.calls(queue, "qstat"))
    for name in ("a-run", "b-run"):
        assert main(["status", name]) == 0
    assert main(["status"]) == 0
    assert len(fakes.calls(queue, "qstat")) == asked + 1
