"""`submit` and its kin in trouble: lost answers, full disks, two users of a run, impatience."""

import json
import subprocess
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace

import pytest

from hpczero.batch import pbs, scheduler, submission, submit
from hpczero.batch.command import QueuedJob
from hpczero.cli import main
from hpczero.errors import HpczeroError
from hpczero.lock import Holder, RunLock
from hpczero.spec.load import load
from hpczero.train import run_directory
from tests.support import fakes
from tests.support.fakes import record


def test_two_who_submit_a_run_at_once(
    queue: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "runs" / "a-run" / "batch").mkdir(parents=True)
    with RunLock(tmp_path / "runs" / "a-run" / "batch"):
        assert main(["submit", "spec.toml"]) == 2
        assert "runs/a-run/batch is in use by process" in capsys.readouterr().err
    assert not fakes.calls(queue, "qsub")
    assert main(["submit", "spec.toml"]) == 0


def test_a_submission_that_is_interrupted_is_taken_back(
    queue: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also the job that was entered when the user lost patience."""
    real = pbs.submit

    def impatient(words: Sequence[str]) -> str:
        number = real(words)
        if number == "18.headnode":
            raise KeyboardInterrupt
        return number

    monkeypatch.setattr(pbs, "submit", impatient)
    assert main(["submit", "spec.toml"]) == 1
    assert [fakes.state(queue, number) for number in ("17.headnode", "18.headnode")] == ["F", "F"]
    monkeypatch.undo()


def test_a_job_that_is_still_on_its_way_into_the_queue(
    queue: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server enters it a moment after the wait for its answer: it is not submitted again."""
    (queue / "lose").touch()
    real = pbs.jobs
    waited: list[float] = []
    monkeypatch.setattr(pbs, "jobs", lambda user, numbers: real(user, numbers) if waited else [])
    own = submission.Submission.new(tmp_path / "runs" / "x", "pbs", "generic/pbs", 1, 1, 60, 1)
    own.path.mkdir(parents=True)
    (own.path / "job.sh").write_text(f"#!/bin/bash\n#PBS -v HPCZERO_TAG={own.tag(0)}\n")
    assert submit.Chain(own, sleep=waited.append).submit().jobs == ("17.headnode",)
    assert len(fakes.calls(queue, "qsub")) == 1


def test_a_job_whose_answer_was_lost_is_not_taken_for_the_one_before(
    queue: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All jobs of a chain have one tag under PBS."""
    real = pbs.submit

    def losing_the_second(words: Sequence[str]) -> str:
        if len(fakes.calls(queue, "qsub")) == 1:
            (queue / "lose").touch()
        return real(words)

    monkeypatch.setattr(pbs, "submit", losing_the_second)
    assert main(["submit", "spec.toml"]) == 0
    assert record(tmp_path).jobs == ("17.headnode", "18.headnode", "19.headnode")
    assert len(fakes.calls(queue, "qsub")) == 3


def test_a_remembered_answer_is_about_the_jobs_that_were_asked_for(
    queue: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[str]] = []

    def jobs(user: str, numbers: Sequence[str]) -> list[QueuedJob]:
        asked.append(list(numbers))
        return []

    monkeypatch.setattr(pbs, "jobs", jobs)
    for numbers in (["1", "2"], ["1"], ["1", "3"]):
        scheduler.jobs("pbs", numbers)
    assert asked == [["1", "2"], ["1", "3"]]


def test_a_server_without_history(
    queue: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (queue / "forgetful").touch()
    assert main(["submit", "spec.toml"]) == 0
    assert main(["status", "a-run"]) == 0
    assert "job 17.headnode  queued" in capsys.readouterr().out
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
    assert "submitted as job 17.headnode, 18.headnode and 19.headnode" in said.out
    assert "cannot write /proc/nothing/hpczero/runs" in said.err
    assert main(["status", "runs/a-run"]) == 0
    assert main(["cancel", "runs/a-run"]) == 0


def test_what_is_cancelled_is_cancelled(
    queue: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also jobs that are known by their tag only, and with a record that cannot be written."""
    assert main(["submit", "spec.toml"]) == 0
    own = record(tmp_path)
    (own.path / "over").mkdir()  # as good as a full disk
    kept = json.loads((own.path / "submission.json").read_text())
    (own.path / "submission.json").write_text(
        json.dumps(kept | {"jobs": ["17.headnode"], "complete": False})
    )
    assert main(["cancel", "a-run"]) == 0
    said = capsys.readouterr()
    assert "cancelled: 17.headnode, 18.headnode and 19.headnode" in said.out
    assert "over: it is no plain file" in said.err
    assert [fakes.state(queue, number) for number in own.jobs] == ["F", "F", "F"]


def test_the_lock_of_a_job_that_is_gone_keeps_nobody_waiting(
    queue: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["submit", "spec.toml"]) == 0
    for number in record(tmp_path).jobs:
        fakes.state(queue, number, "F")
    lock = tmp_path / "runs" / "a-run" / "lock"
    elsewhere = Holder("n7", "another kernel", 1, 0.0, "ada", "today", "99.headnode")
    lock.write_text(json.dumps(asdict(elsewhere)))
    assert main(["submit", "spec.toml"]) == 2
    assert (
        "is in use by process 1 on n7, started by ada at today, batch job 99.headnode"
        in capsys.readouterr().err
    )
    lock.write_text(json.dumps(asdict(elsewhere) | {"job": "17.headnode"}))
    assert main(["submit", "spec.toml"]) == 0


def test_the_job_works_in_the_folder_that_was_meant_here(
    queue: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever the variable is on a compute node."""
    monkeypatch.setenv("SCRATCH_OF_MINE", str(tmp_path / "scratch"))
    assert main(["submit", "spec.toml", "--set", "output=$SCRATCH_OF_MINE/runs"]) == 0
    (own,) = submission.of_run(tmp_path / "scratch" / "runs" / "a-run")
    monkeypatch.setenv("SCRATCH_OF_MINE", "/elsewhere")
    assert (
        run_directory.path_of(load(own.path / "spec.toml").spec)
        == tmp_path / "scratch" / "runs" / "a-run"
    )
    monkeypatch.delenv("SCRATCH_OF_MINE")
    assert main(["submit", "spec.toml", "--set", "output=$SCRATCH_OF_MINE/runs"]) == 2
    assert "what follows the $ is not set here" in capsys.readouterr().err


def test_a_layout_can_be_probed_again(
    queue: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each probe is a run of its own: a finished one does not stop that of another layout."""
    for moment in (1, 2):
        monkeypatch.setattr(
            submit,
            "datetime",
            SimpleNamespace(
                now=lambda zone, moment=moment: datetime(2026, 1, 5, 10, 0, moment, tzinfo=zone)
            ),
        )
        assert main(["submit", "spec.toml", "--probe"]) == 0
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == [
        "a-run.probe-20260105T100001",
        "a-run.probe-20260105T100002",
    ]


def test_another_run_is_no_new_question(queue: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a-run", "b-run"):
        assert main(["submit", "spec.toml", "--set", f"name={name}"]) == 0
    asked = len(fakes.calls(queue, "qstat"))
    for name in ("a-run", "b-run"):
        assert main(["status", name]) == 0
    assert main(["status"]) == 0
    assert len(fakes.calls(queue, "qstat")) == asked + 1


def test_a_chain_of_any_length_is_cancelled(
    queue: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """PBS deletes jobs along with the one that they are held for, and complains of each."""
    assert main(["submit", "spec.toml", "--set", "batch.chain=5"]) == 0
    own = record(tmp_path)
    capsys.readouterr()
    assert main(["cancel", "a-run"]) == 0
    said = capsys.readouterr()
    assert (said.err, said.out.count("headnode")) == ("", 5)
    assert {fakes.state(queue, number) for number in own.jobs} == {"F"}
    assert main(["cancel", "a-run"]) == 0
    assert "has no job in the queue" in capsys.readouterr().out
    assert main(["status", "a-run"]) == 0
    assert "a-run: cancelled" in capsys.readouterr().out


def test_jobs_that_are_gone_already_are_no_failure(queue: Path, tmp_path: Path) -> None:
    """In whatever order they are deleted, and where no history is kept."""
    assert main(["submit", "spec.toml", "--set", "batch.chain=4"]) == 0
    numbers = record(tmp_path).jobs
    scheduler.cancel("pbs", list(reversed(numbers)))
    assert {fakes.state(queue, number) for number in numbers} == {"F"}
    (queue / "forgetful").touch()
    scheduler.cancel("pbs", numbers)
    (queue / "deaf").touch()
    with pytest.raises(HpczeroError, match="qdel failed: Connection refused"):
        scheduler.cancel("pbs", numbers)


def test_a_refusal_in_the_middle_of_a_chain_leaves_nothing_in_the_queue(
    queue: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = pbs.submit

    def refusing(words: Sequence[str]) -> str:
        if len(fakes.calls(queue, "qsub")) == 4:
            (queue / "refuse").write_text("qsub: would exceed limit on jobs of user")
        return real(words)

    monkeypatch.setattr(pbs, "submit", refusing)
    assert main(["submit", "spec.toml", "--set", "batch.chain=6"]) == 2
    said = capsys.readouterr().err
    assert "qsub refused the job: qsub: would exceed limit" in said
    assert "still in the queue" not in said
    assert {fakes.state(queue, f"{number}.headnode") for number in range(17, 21)} == {"F"}


def test_a_server_that_is_not_reached_has_refused_nothing(
    queue: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (queue / "deaf").touch()
    assert main(["submit", "spec.toml", "--set", "batch.chain=1"]) == 1
    said = capsys.readouterr().err
    assert "qsub did not reach the server: Connection refused" in said
    assert "refused the job" not in said


@pytest.mark.parametrize("value", ['a"b"c', "a'b'c", "back\\slash", "blank ", "tab\t"])
def test_a_value_that_qsub_would_change_is_refused(
    queue: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], value: str
) -> None:
    monkeypatch.setenv("SECRET_OF_MINE", value)
    assert main(["submit", "spec.toml"]) == 2
    said = capsys.readouterr().err
    assert "qsub would change the value of SECRET_OF_MINE" in said
    assert value not in said
    assert not fakes.calls(queue, "qsub")


def test_whoever_hands_values_over_is_told_that_all_see_them(
    queue: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["submit", "spec.toml"]) == 0
    assert "PBS shows SECRET_OF_MINE to every user (qstat -xf)" in capsys.readouterr().err
    shown = subprocess.run(
        ["qstat", "-x", "-f", "17"], capture_output=True, text=True, timeout=60, check=True
    ).stdout
    assert "SECRET_OF_MINE=hunter2-and-more" in shown.replace("\n\t", ""), "so it is"
    options = ["--set", "batch.env_pass=[]", "--set", "name=other"]
    assert main(["submit", "spec.toml", *options]) == 0
    assert "PBS shows" not in capsys.readouterr().err
    assert (
        main(
            ["submit", "spec.toml", *options, "--set", "batch.env_inherit=true", "--set", "name=x"]
        )
        == 0
    )
    assert "PBS shows the whole environment" in capsys.readouterr().err


def test_what_pbs_says_itself_at_a_jobs_end_is_shown(
    queue: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["submit", "spec.toml", "--set", "batch.chain=1"]) == 0
    own, number = record(tmp_path), "17.headnode"
    (own.path / "links").write_text(f"2026-01-05T10:00:00Z {number} began none\n")
    own.log(number).write_text("step 1\n")
    killed = "=>> PBS: job killed: walltime 31 exceeded limit 25\n"
    (own.path / f"{number}.OU").write_text(killed)
    fakes.state(queue, number, "F")
    comment = "Job run at Sun Nov 22 at 19:22 on (cn02:ncpus=2) and exceeded resource walltime"
    (queue / number / "end").write_text(
        json.dumps({"substate": 93, "Exit_status": -29, "comment": comment})
    )
    capsys.readouterr()
    assert main(["logs", "a-run"]) == 0
    assert capsys.readouterr().out == "step 1\n" + killed
    assert main(["status", "a-run"]) == 0
    said = capsys.readouterr().out
    assert "a-run: failed (exceeded resource walltime)" in said
    assert said.splitlines()[-1].strip() == killed.strip()


def test_a_job_that_waits_for_its_time_says_when_it_begins(
    queue: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["submit", "spec.toml", "--set", "batch.chain=1"]) == 0
    fakes.state(queue, "17.headnode", "W")
    capsys.readouterr()
    assert main(["status", "a-run"]) == 0
    assert "job 17.headnode  queued: start Thu Dec 31 23:59:00 2026" in capsys.readouterr().out
