"""Runs as jobs, submitted as a user would, on a real Slurm of two nodes
(scripts/slurm_testbed.sh); skipped where there is no Slurm.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.launch import CHECKOUT, hpczero
from tests.support.slurm import await_that, running
from tests.support.slurm_user import LAUNCHERS, User, mpich, over, queued_jobs, states

pytestmark = pytest.mark.skipif(not mpich(), reason="the jobs here are started by MPICH")

STEPS = 6000  # of a run that is to be interrupted: half a minute at least, after its first save
LONG = ("--set", f"train.steps={STEPS}", "--set", "checkpoint.every=100")


@pytest.fixture(scope="module")
def slurm() -> Iterator[dict[str, str]]:
    with running() as variables:
        yield variables


@pytest.fixture
def user(tmp_path: Path, slurm: dict[str, str]) -> Iterator[User]:
    yield User(tmp_path, slurm)
    subprocess.run(
        ["scancel", "--quiet", "--user", str(os.getuid())],
        env={**os.environ, **slurm},
        timeout=60,
        check=False,
    )
    await_that(lambda: not queued_jobs(slurm), 90, "the queue is empty")


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.few(1)
def test_a_run_of_two_nodes_from_the_queue_to_its_end(user: User, launcher: str) -> None:
    user.submits(
        "plain", "--set", "batch.begin=now+1hour", "--set", "batch.chain=3", launcher=launcher
    )
    waiting = user.status("plain")
    assert (waiting["state"], waiting["reason"], waiting["step"]) == ("queued", "BeginTime", 0)
    for link in waiting["links"]:
        user.does("scontrol", "update", f"JobId={link['number']}", "StartTime=now")
    found = user.waits("plain", over, "the job ends")
    assert (found["state"], found["step"], found["steps"], found["last_save"]) == (
        "finished",
        30,
        30,
        30,
    )
    assert len(user.losses("plain")) == 30
    assert "layout" in user.does(*hpczero("logs", "plain"))
    assert "plain" in user.does(*hpczero("status"))
    assert "all 30 steps are done" in user.does(
        *hpczero("submit", "spec.toml", "--set", "name=plain")
    )


@pytest.mark.slow
def test_a_run_is_watched_and_cancelled(user: User) -> None:
    user.submits("long", "--set", "train.steps=100000", "--set", "batch.chain=3")
    found = user.waits("long", lambda found: found["step"] > 3, "the run makes steps")
    assert found["state"] == "running"
    assert states(found) == ["running", "queued", "queued"]
    assert found["tokens_per_second"] > 0
    assert "rank 1: process " in user.does(*hpczero("logs", "long", "--rank", "1"))
    options = ["--set", "name=long", *LAUNCHERS["mpirun"]]
    again = user.does(*hpczero("submit", "spec.toml", *options), code=2)
    assert "is in use by" in again or "submitted already" in again
    user.does(*hpczero("cancel", "long"))
    found = user.waits("long", over, "the jobs are gone")
    assert states(found) == ["interrupted", "cancelled", "cancelled"]
    assert found["state"] == "cancelled"
    assert found["last_save"] == found["step"], "it was asked to stop, and saved"


@pytest.mark.slow
def test_a_hung_run_that_is_cancelled_is_explained_by_its_directory(user: User) -> None:
    """Slurm cancels it as soon as it hangs: the ranks say what they do before they are killed."""
    family = 'model.family="tests.support.hanging:build"'
    user.submits("hung", "--set", family, "--set", "train.steps=1000000")
    user.waits("hung", lambda found: found["step"] > 3, "the run makes steps")
    (user.folder / "hang").touch()
    steps = -1
    while steps != (steps := len(user.losses("hung"))):
        time.sleep(2)
    user.does(*hpczero("cancel", "hung"))
    user.waits("hung", over, "the job is gone")
    said = user.does(*hpczero("blame", "runs/hung"))
    assert re.search(r"Rank 1 on \S+ is behind", said), said
    assert re.search(r"For it rank 0 waited for \d+ s in \w+.* \(number \d+ along \w+\)", said), (
        said
    )


@pytest.mark.slow
def test_a_job_that_fails_says_why_and_ends_the_chain(user: User) -> None:
    user.submits("wrong", "--set", "batch.begin=now+1hour", "--set", "batch.chain=3")
    (spec,) = (user.folder / "runs" / "wrong").glob("batch/*/spec.toml")
    before = spec.read_text()
    spec.write_text(before.replace('"synthetic"', '"nowhere.h5"'))  # submit would have seen it
    assert spec.read_text() != before
    for link in user.status("wrong")["links"]:
        user.does("scontrol", "update", f"JobId={link['number']}", "StartTime=now")
    found = user.waits("wrong", over, "the chain ends")
    assert states(found) == ["failed", "passed", "passed"]
    assert found["reason"] == "the input is wrong (exit code 2)"
    assert any("nowhere.h5" in line for line in found["last_lines"])
    assert "nowhere.h5" in user.does(*hpczero("status", "wrong"))


@pytest.mark.slow
def test_a_submission_whose_answer_was_lost_is_one_submission(user: User, tmp_path: Path) -> None:
    (tmp_path / "lossy").mkdir()
    program = tmp_path / "lossy" / "sbatch"
    broken = "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation"
    program.write_text(
        f'#!/bin/bash\n{shutil.which("sbatch")} "$@" >/dev/null || exit\n'
        f'echo "{broken}" >&2\nexit 1\n'
    )
    program.chmod(0o755)
    user.submits(
        "lost",
        "--set",
        "batch.begin=now+1hour",
        "--set",
        "batch.chain=2",
        first=str(tmp_path / "lossy"),
    )
    assert len(user.does("squeue", "--noheader").splitlines()) == 2
    assert states(user.status("lost")) == ["queued", "queued"]


@pytest.mark.slow
def test_a_probe_makes_five_steps_with_a_save_and_a_restore(user: User) -> None:
    user.does(
        *hpczero(
            "submit",
            "spec.toml",
            "--probe",
            "--set",
            "name=big",
            "--set",
            "train.steps=100000",
            *LAUNCHERS["mpirun"],
        )
    )
    (run,) = (user.folder / "runs").iterdir()
    found = user.waits(run.name, over, "the probe ends")
    assert (found["state"], found["step"], found["steps"]) == ("finished", 5, 5)
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    assert [
        (event["event"], event["step"]) for event in events if event["event"] in ("save", "resume")
    ] == [("save", 3), ("resume", 3), ("save", 5)]
    assert json.loads((run / "summary.json").read_text())["memory"]
    assert run.name.startswith("big.probe-")


def test_what_slurm_refuses_is_said(user: User) -> None:
    options = ["--set", "name=no", "--set", "batch.queue=nowhere", *LAUNCHERS["mpirun"]]
    said = user.does(*hpczero("submit", "spec.toml", *options), code=2)
    assert "invalid partition" in said.lower()
    assert not user.does("squeue", "--noheader")


def test_an_mpi_that_srun_cannot_start_is_refused_at_submission(user: User) -> None:
    said = user.does(*hpczero("submit", "spec.toml", "--set", "name=no"), code=2)
    assert 'batch.launch_options = ["--mpi=pmi2"], or batch.launcher = "mpirun"' in said
    assert not user.does("squeue", "--noheader")


@pytest.mark.slow
def test_an_mpi_that_srun_does_not_start_is_said_and_ends_the_chain(user: User) -> None:
    """srun kills the other ranks when the first has ended, and returns one of their exit codes."""
    options = ["--set", 'batch.launch_options=["--mpi=none"]', "--set", "batch.chain=3"]
    user.does(*hpczero("submit", "spec.toml", "--set", "name=alone", *options))
    found = user.waits("alone", over, "the chain ends")
    assert states(found) == ["failed", "passed", "passed"]
    assert (found["state"], found["reason"]) == ("failed", "the input is wrong (exit code 2)")
    (log,) = [
        path.read_text() for path in user.logs("alone") if "srun started 2" in path.read_text()
    ]
    assert 'batch.launch_options = ["--mpi=pmi2"]' in log
    assert 'or batch.launcher = "mpirun"' in log


def test_runs_are_listed_whoever_started_them(user: User) -> None:
    user.submits("waits", "--set", "batch.begin=now+1hour")
    said = user.does(*hpczero("runs"))
    assert "waits  queued  0/30" in said
    user.does(*hpczero("cancel", "waits"))
    user.status("waits")
    assert "waits  cancelled" in user.does(*hpczero("runs"))


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("how", ["kill -9", "scancel"])
def test_a_killed_job_costs_the_steps_since_the_last_checkpoint(user: User, how: str) -> None:
    user.submits("whole", *LONG, launcher="mpirun")
    user.waits("whole", over, "the run without interruption ends")
    user.submits("killed", *LONG, "--set", "batch.chain=4", launcher="srun")
    link = user.waits("killed", lambda found: found["last_save"], "a checkpoint is there")["links"][
        0
    ]["number"]
    events = (user.folder / "runs" / "killed" / "events.jsonl").read_text().splitlines()
    start = [entry for entry in map(json.loads, events) if entry["event"] == "start"][-1]
    if how == "scancel":
        user.does("scancel", link)
    else:
        os.kill(start["ranks"][1]["pid"], signal.SIGKILL)
    found = user.waits("killed", over, "the chain ends")
    assert found["state"] == "finished"
    assert states(found)[0] in {"kill -9": ["failed"], "scancel": ["cancelled", "interrupted"]}[how]
    assert user.losses("killed") == user.losses("whole"), "bitwise"


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_run_that_is_pushed_aside_goes_on_in_the_next_job(
    user: User, tmp_path: Path, launcher: str
) -> None:
    """Preemption: SIGTERM, and SIGKILL 10 s later."""
    user.submits("aside", *LONG, "--set", "batch.chain=4", launcher=launcher)
    user.waits("aside", lambda found: found["last_save"], "a checkpoint is there")
    (tmp_path / "urgent.sh").write_text("#!/bin/bash\nsleep 2\n")
    user.does(
        "sbatch",
        "--partition=urgent",
        "--nodes=2",
        "--exclusive",
        "--output=/dev/null",
        "urgent.sh",
    )
    found = user.waits("aside", over, "the chain ends")
    assert (found["state"], found["step"]) == ("finished", STEPS)
    assert states(found)[0] in ("interrupted", "gone", "failed")
    assert sorted(user.losses("aside")) == list(range(1, STEPS + 1))


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_a_requeue_by_the_site_is_survived(user: User) -> None:
    user.submits("again", *LONG, "--set", "batch.chain=2")
    found = user.waits("again", lambda found: found["last_save"], "a checkpoint is there")
    user.does("scontrol", "requeue", found["links"][0]["number"])
    user.does("scontrol", "update", f"JobId={found['links'][0]['number']}", "StartTime=now")
    found = user.waits("again", over, "the chain ends")
    assert (found["state"], found["step"]) == ("finished", STEPS)
    assert "resume" in user.logs("again")[0].read_text(), "the log lacks the part after the requeue"


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_a_minute_of_walltime_at_a_time_gives_the_run_without_interruption(user: User) -> None:
    """Each job stops in time for its last checkpoint, and all losses are bitwise those of the whole
    run.

    (On a very busy machine a minute may pass before the first step: such a job is lost, and the
    next one goes on.)
    """
    longer = ("--set", "train.steps=12000", "--set", "checkpoint.every=0")
    user.submits("whole", *longer, "--set", "batch.walltime=2h")
    found = user.waits("whole", over, "the run without interruption ends")
    assert found["state"] == "finished"
    user.submits(
        "parts",
        *longer,
        "--set",
        "batch.walltime=1m",
        "--set",
        "batch.chain=20",
        "--set",
        "train.log_every=100",
    )
    found = user.waits("parts", over, "the chain ends")
    assert found["state"] == "finished"
    assert states(found).count("interrupted") >= 1
    ended_in_time = ("interrupted", "finished", "passed")
    late = [link["number"] for link in found["links"] if link["state"] not in ended_in_time]
    texts = {
        number: next(
            path for path in user.logs("parts") if path.name == f"log-{number}"
        ).read_text()
        for number in late
    }
    assert not [text for text in texts.values() if " first step=" in text], (
        "a job that came to its first step did not stop in time"
    )
    assert any(
        "stopped by the end of the job's time" in path.read_text() for path in user.logs("parts")
    )
    assert user.losses("parts") == user.losses("whole")


@pytest.mark.slow
def test_a_token_file_is_built_in_a_job_that_a_second_one_finds_done(user: User) -> None:
    (user.folder / "runs").mkdir()
    for name in ("one", "two"):
        (user.folder / f"{name}.txt").write_text(f"text number {name}\n" * 400)
    build = ("data", "build", "-o", "runs/corpus.h5", "--workers", "2")
    job = ("--submit", "spec.toml", "--set", "batch.launcher=mpirun", "--set", "batch.chain=2")
    assert "submitted as job" in user.does(*hpczero(*build, *job, "*.txt"))
    found = user.waits("corpus.build", over, "the jobs end")
    assert states(found) == ["finished", "passed"]
    assert "corpus.h5: tokenizer byte" in user.does(*hpczero("data", "show", "runs/corpus.h5"))
    assert "is up to date" in user.does(*hpczero(*build, "*.txt"))
    assert "is up to date" in user.does(*hpczero(*build, *job, "*.txt"))


@pytest.mark.slow
def test_a_program_of_ones_own_goes_on_in_the_next_job(user: User) -> None:
    """The program of docs/your-loop.md, asked to stop by `scancel --signal`."""
    page = (CHECKOUT / "docs" / "your-loop.md").read_text()
    found = re.search(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert found
    slower = found[1].replace("        best = min", "        time.sleep(0.02)\n        best = min")
    program = slower.replace("import sys\n", "import sys\nimport time\n")
    (user.folder / "train.py").write_text(program)
    words = json.dumps([sys.executable, "train.py", "{spec}"])
    own = ("--set", f"batch.command={words}", "--set", "checkpoint.every=50")
    user.submits("own", "--set", "train.steps=600", "--set", "batch.chain=3", *own)
    seen = user.waits("own", lambda found: found["last_save"], "a checkpoint is there")
    job = seen["links"][0]["number"]
    user.does("scancel", "--batch", "--signal=USR2", job)
    found_state = user.waits("own", over, "the chain ends")
    assert (found_state["state"], found_state["step"]) == ("finished", 600)
    assert states(found_state) == ["interrupted", "finished", "passed"]
    steps = [
        int(line.split()[0])
        for log in sorted(user.logs("own"))
        for line in log.read_text().splitlines()
        if re.fullmatch(r"\d+ [0-9.e-]+ [0-9.e-]+", line)
    ]
    assert steps == list(range(1, 601)), "no step is done twice, and none left out"
