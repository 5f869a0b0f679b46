"""`hpczero runs`, and `status` of runs that nobody submitted."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hpczero.cli import main
from hpczero.commands import jobs
from hpczero.lock import RunLock
from hpczero.text import format_age
from tests.support import fakes
from tests.support.launch import BLOCKER
from tests.support.runs import by_hand


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Runs in every state."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    by_hand(tmp_path / "runs" / "done", ended="finished", saved=100)
    by_hand(tmp_path / "runs" / "deep" / "er" / "halted", ended="stopped", saved=40)
    by_hand(tmp_path / "runs" / "killed")
    by_hand(tmp_path / "runs" / "killed" / "inside")  # a run's folder is its own
    (tmp_path / "runs" / "notes").mkdir()
    return tmp_path


def rows(text: str) -> dict[str, list[str]]:
    return {line.split()[0]: line.split() for line in text.splitlines()}


def test_all_runs_below_a_folder(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with RunLock(by_hand(folder / "runs" / "now")):
        assert main(["runs"]) == 0
    said = rows(capsys.readouterr().out)
    assert said["run"] == ["run", "state", "step", "loss", "tokens/s", "left", "saved", "age"]
    found = {name: row[1] for name, row in said.items() if name != "run"}
    assert found == {
        "deep/er/halted": "continues",
        "done": "finished",
        "killed": "failed",
        "now": "running",
    }
    assert said["now"][2:6] == ["40/100", "4.6000", "50", "0:02:00"]
    assert said["now"][-1] in ("s", "min")


def test_as_json_and_of_one_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [Path(one["run"]).name for one in found] == ["halted", "done", "killed"]
    assert {"state", "step", "steps", "loss", "tokens_per_second", "age_seconds"} <= found[0].keys()
    assert main(["runs", "runs/done"]) == 0
    assert rows(capsys.readouterr().out)["done"][1] == "finished"
    assert main(["runs", "runs/notes"]) == 0
    assert capsys.readouterr().out == "no run lies below runs/notes\n"
    assert main(["runs", "nowhere"]) == 2
    assert "nowhere is no folder" in capsys.readouterr().err


def test_losses_of_evaluations_and_other_orders(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The newest of the lines counts, else the summary's; what is not known comes last."""
    done, killed = folder / "runs" / "done", folder / "runs" / "killed"
    (done / "summary.json").write_text('{"state": "finished", "validation_loss": 4.5}')
    lines = [{"step": step, "step_seconds": 1, "loss": 9 - step} for step in range(1, 5)]
    lines[1]["validation_loss"], lines[2]["validation_loss"] = 3.5, 4.25
    (killed / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    faster = {"step": 40, "step_seconds": 2.0, "loss": 4.6, "tokens_per_second": 60.0}
    (done / "metrics.jsonl").write_text(json.dumps(faster) + "\n")
    orders = {
        "name": ["deep/er/halted", "done", "killed"],
        "validation": ["killed", "done", "deep/er/halted"],
        "loss": ["deep/er/halted", "done", "killed"],
        "speed": ["done", "deep/er/halted", "killed"],
        "state": ["deep/er/halted", "killed", "done"],
    }
    for order, names in orders.items():
        assert main(["runs", "--sort", order]) == 0
        said = rows(capsys.readouterr().out)
        assert list(said)[1:] == names, order
    assert said["run"][-2:] == ["validation", "age"]
    assert (said["killed"][-3], said["done"][-3]) == ("4.2500", "4.5000")
    assert main(["runs", "--sort", "age", "--json"]) == 0
    ages = [one["age_seconds"] for one in json.loads(capsys.readouterr().out)]
    assert ages == sorted(ages)
    assert main(["status", "runs/done"]) == 0
    assert "loss 4.6000, validation loss 4.5000\n" in capsys.readouterr().out


def test_status_of_a_run_that_was_started_by_hand(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("runs/deep/er/halted", "done"):
        assert main(["status", name]) == 0
    said = capsys.readouterr().out
    assert "halted: continues (SIGTERM)" in said
    assert "done: finished" in said
    assert "node-hours" not in said
    (folder / "spec.toml").write_text('name = "killed"\noutput = "runs"\n')
    assert main(["status", "spec.toml"]) == 0
    assert "killed: failed (it ended without a word" in capsys.readouterr().out
    assert main(["status", "nobody"]) == 2
    for verb in ("cancel", "logs"):
        assert main([verb, "done"]) == 2
        said = capsys.readouterr().err
    assert "was started by hand" in said
    assert f"touch {folder}/runs/done/stop" in said


def test_links_are_not_followed_and_what_cannot_be_read_is_said(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "runs" / "round").symlink_to("..")
    real = os.scandir

    def scandir(path: str) -> object:
        if str(path).endswith("notes"):
            raise PermissionError(13, "Permission denied", str(path))
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    assert main(["runs"]) == 0
    said = capsys.readouterr()
    assert len(said.out.splitlines()) == 4
    assert "not looked into: " in said.err
    assert "runs/notes: Permission denied" in said.err


def test_somebody_elses_jobs_are_not_asked_for(
    queue: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The scheduler tells of a user's own jobs: another's would look as if they were gone."""
    assert main(["submit", "spec.toml"]) == 0
    asked = len(fakes.calls(queue, "qstat"))
    monkeypatch.setattr(jobs, "_is_mine", lambda run: False)
    capsys.readouterr()
    assert main(["runs"]) == 0
    assert rows(capsys.readouterr().out)["a-run"][1] == "unknown"
    assert len(fakes.calls(queue, "qstat")) == asked
    monkeypatch.undo()


def test_a_submitted_run_is_listed_too(queue: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["submit", "spec.toml"]) == 0
    capsys.readouterr()
    assert main(["runs"]) == 0
    assert rows(capsys.readouterr().out)["a-run"][1:3] == ["queued", "0/40"]
    assert main(["cancel", "a-run"]) == 0
    assert main(["runs"]) == 0
    assert rows(capsys.readouterr().out.partition("\n")[2])["a-run"][1] == "cancelled"


def test_on_a_login_node(folder: Path) -> None:
    program = BLOCKER.format(blocked=["torch", "mpi4py", "numba"])
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run(
        [sys.executable, "-c", program, "runs"],
        env=variables,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "finished" in done.stdout


@pytest.mark.parametrize(
    ("seconds", "age"), [(None, "?"), (0.2, "0 s"), (59, "59 s"), (3700, "1 h"), (2e5, "2 d")]
)
def test_ages(seconds: float | None, age: str) -> None:
    assert format_age(seconds) == age


def test_a_name_with_signs_that_a_terminal_acts_on(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = by_hand(folder / "runs" / "\x1b[31mred", ended="stopped")
    (run / "summary.json").write_text(json.dumps({"state": "failed", "reason": "\x1b]0;x\x07"}))
    assert main(["runs"]) == 0
    assert main(["status", str(run)]) == 0
    said = capsys.readouterr()
    assert "\x1b" not in said.out + said.err
    assert "\\x1b[31mred" in said.out
