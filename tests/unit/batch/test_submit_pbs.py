"""`submit`, `status`, `cancel` and `logs` over a PBS whose programs are fakes (fakes.py)."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from hpczero import env
from hpczero.batch import pbs, scheduler, submission, submit
from hpczero.batch.command import Refused
from hpczero.cli import main
from hpczero.commands import logs
from hpczero.errors import HpczeroError
from tests.support import fakes
from tests.support.fakes import SPEC, record
from tests.support.launch import BLOCKER


def test_every_link_is_in_the_queue_before_the_first_may_begin(queue: Path, tmp_path: Path) -> None:
    assert main(["submit", "spec.toml"]) == 0
    own = record(tmp_path)
    assert (own.jobs, own.complete) == (("17.headnode", "18.headnode", "19.headnode"), True)
    made = [(queue / number / "words").read_text().split("\n") for number in own.jobs]
    assert made[0] == ["-o", f"{own.path}/", "-h", str(own.path / "job.sh")]
    assert made[1][2:4] == ["-W", "depend=afterany:17.headnode"]
    assert made[2][2:4] == ["-W", "depend=afterany:18.headnode"]
    assert [line.split()[0] for line in (queue / "calls").read_text().splitlines()] == [
        "qsub",
        "qsub",
        "qsub",
        "qrls",
    ]
    assert fakes.state(queue, "17.headnode") == "Q"


def test_no_value_of_a_variable_that_is_handed_over_is_kept(queue: Path, tmp_path: Path) -> None:
    assert main(["submit", "spec.toml"]) == 0
    files = [
        path for path in tmp_path.rglob("*") if path.is_file() and not path.is_relative_to(queue)
    ]
    assert any("SECRET_OF_MINE" in path.read_text() for path in files)
    assert not [path for path in files if "hunter2" in path.read_text()]


def test_a_variable_that_is_not_there_cannot_be_handed_over(
    queue: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("SECRET_OF_MINE")
    assert main(["submit", "spec.toml"]) == 2
    assert "SECRET_OF_MINE, which is not set here" in capsys.readouterr().err
    monkeypatch.setenv("PBS_OF_MINE", "x")
    assert main(["submit", "spec.toml", "--set", 'batch.env_pass=["PBS_OF_MINE"]']) == 2, (
        "it would be left out"
    )
    assert not fakes.calls(queue, "qsub")


def test_a_run_that_is_in_the_queue_is_not_submitted_again(
    queue: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["submit", "spec.toml"]) == 0
    assert main(["submit", "spec.toml"]) == 2
    assert (
        "submitted already: job 17.headnode (queued), 18.headnode (held) and 19.headnode (held)"
        in capsys.readouterr().err
    )
    for number in record(tmp_path).jobs:
        fakes.state(queue, number, "F")
    assert main(["submit", "spec.toml"]) == 0


def test_a_job_whose_number_was_never_heard_of_is_found(
    queue: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (queue / "lose").touch()
    assert main(["submit", "spec.toml"]) == 0
    assert record(tmp_path).jobs == ("17.headnode", "18.headnode", "19.headnode"), "not one more"
    assert len(fakes.calls(queue, "qsub")) == 3


def test_a_submission_that_broke_off_is_seen_by_the_next_one(
    queue: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The program was killed between qsub and its answer.

    The job is not in the record: only the queue has its tag.
    """
    assert main(["submit", "spec.toml", "--set", "batch.chain=1"]) == 0
    own = record(tmp_path)
    kept = json.loads((own.path / "submission.json").read_text())
    (own.path / "submission.json").write_text(json.dumps(kept | {"jobs": [], "complete": False}))
    assert main(["submit", "spec.toml"]) == 2
    assert "job 17.headnode (queued)" in capsys.readouterr().err
    assert len(fakes.calls(queue, "qsub")) == 1


def test_what_pbs_refuses_is_said_and_nothing_is_left(
    queue: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (queue / "refuse").write_text("qsub: Unknown queue")
    assert main(["submit", "spec.toml"]) == 2
    assert "qsub refused the job: qsub: Unknown queue" in capsys.readouterr().err
    assert len(fakes.calls(queue, "qsub")) == 1


def test_a_chain_that_cannot_be_completed_is_taken_back(queue: Path, tmp_path: Path) -> None:
    """The second job is refused."""
    own = submission.Submission.new(tmp_path / "runs" / "x", "pbs", "generic/pbs", 1, 1, 60, 3)
    own.path.mkdir(parents=True)
    (own.path / "job.sh").write_text("#!/bin/bash\n")

    class Refusing(submit.Chain):
        def _submit_one(self, link: int, after: str, held: bool) -> str:
            if link == 1:
                raise Refused("no")
            return super()._submit_one(link, after, held)

    with pytest.raises(Refused):
        Refusing(own).submit()
    assert fakes.state(queue, "17.headnode") == "F"


def test_nobody_answers(queue: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["submit", "spec.toml", "--set", "batch.chain=1"]) == 0
    (queue / "deaf").touch()
    capsys.readouterr()
    scheduler.forget("pbs")
    assert main(["status", "a-run"]) == 0
    said = capsys.readouterr()
    assert "cannot connect to server" in said.err
    assert "what the runs themselves have written is shown" in said.err
    assert "a-run: unknown (the scheduler does not answer)" in said.out
    assert main(["cancel", "a-run"]) == 1
    assert "server headnode (errno=15010)" in capsys.readouterr().err
    own = submission.Submission.new(tmp_path / "runs" / "y", "pbs", "generic/pbs", 1, 1, 60, 1)
    own.path.mkdir(parents=True)
    (own.path / "job.sh").write_text("#!/bin/bash\n")
    with pytest.raises(HpczeroError, match="nobody knows whether the job is in it"):
        submit.Chain(own).submit()


def test_status_cancel_and_logs(
    queue: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["submit", "spec.toml"]) == 0
    own = record(tmp_path)
    capsys.readouterr()
    assert main(["logs", "a-run"]) == 2
    assert "no job has printed anything yet" in capsys.readouterr().err
    assert main(["status"]) == 0
    assert "a-run  queued  0/40" in capsys.readouterr().out
    assert main(["status", "spec.toml"]) == 0
    assert (
        "job 17.headnode  queued: "
        "Not Running: Insufficient amount of resource: ncpus (R: 8 A: 0 T: 16)"
        in capsys.readouterr().out
    )
    asked = len(fakes.calls(queue, "qstat"))
    assert main(["status", "runs/a-run", "--json"]) == 0
    assert [link["state"] for link in json.loads(capsys.readouterr().out)["links"]] == [
        "queued",
        "held",
        "held",
    ]
    assert len(fakes.calls(queue, "qstat")) == asked, "asked a moment ago"
    own.log("17.headnode").write_text("first words\n")
    assert main(["logs", "a-run"]) == 0
    assert capsys.readouterr().out == "first words\n"
    own.log("18.headnode").write_text("hpczero job: nothing is left to do\n")
    (own.path / "links").write_text("2026-01-05T10:00:00Z 18.headnode passed 0\n")
    assert main(["logs", "a-run"]) == 0
    assert capsys.readouterr().out == "first words\n", "of the job that did something"
    (own.path / "links").unlink()
    assert main(["cancel", "a-run"]) == 0
    assert [fakes.state(queue, number) for number in own.jobs] == ["F", "F", "F"]
    assert main(["status", "a-run"]) == 0
    assert "job 18.headnode  cancelled" in capsys.readouterr().out
    assert main(["status", "nobody"]) == 2


def test_nothing_is_submitted_where_there_is_no_scheduler(
    queue: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    assert main(["submit", "spec.toml", "--dry-run"]) == 0
    assert capsys.readouterr().out.startswith("#!/bin/bash -l\n#PBS -S /bin/bash\n")
    assert not Path("runs").exists()
    assert main(["submit", "spec.toml"]) == 1
    assert "the command qsub is not on this computer" in capsys.readouterr().err
    assert not Path("runs").exists()


def test_leftovers_of_a_job_do_not_reach_the_scheduler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SBATCH_PARTITION", "other")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_CONF", "/etc/slurm.conf")
    handed = env.scheduler_environment()
    assert not {"SBATCH_PARTITION", "SLURM_JOB_ID"} & handed.keys()
    assert handed["SLURM_CONF"] == "/etc/slurm.conf"


QSTAT = """Job Id: 5.s-pbs
    Job_Name = a-run
    resources_used.walltime = 00:05:16
    job_state = R
    exec_vnode = (node-0100:ncpus=12:mem=94371840kb:jobfs=104857600kb:
\tngpus=1)
    Resource_List.walltime = 01:00:00
    stime = Mon Jan  5 10:00:00 2026
    Variable_List = PBS_O_SYSTEM=Linux,A=1,HPCZERO_TAG=hpczero:ab:
\t0,B=2
    comment = Job run at Mon Jan 05 at 10:00 on (node-0100:ncpus=12)

Job Id: 6.s-pbs
    job_state = U
    Variable_List = NOT_HPCZERO_TAG=hpczero:ab:0
"""


def test_the_words_of_qstat() -> None:
    """Long values go on behind a tab, wherever they happen to be cut."""
    job, other = pbs.parse(QSTAT)
    assert (job.number, job.state, job.tag, job.start) == (
        "5.s-pbs",
        "running",
        "hpczero:ab:0",
        "Mon Jan  5 10:00:00 2026",
    )
    assert (other.number, other.state, other.tag) == ("6.s-pbs", "running", ""), (
        "pushed aside, and not ended"
    )


@pytest.mark.parametrize(
    ("over", "code"), [("the run is finished", 0), ("no progress", 1), ("", 1)]
)
def test_waiting_for_the_end(
    queue: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    over: str,
    code: int,
) -> None:
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        """End one more job, and forget the last answer of the scheduler."""
        own = record(tmp_path)
        fakes.state(queue, own.jobs[len(slept)], "F")
        slept.append(seconds)
        if over:
            own.close(over)
        scheduler.forget("pbs")

    monkeypatch.setattr(submit, "time", SimpleNamespace(sleep=sleep, time=time.time))
    assert main(["submit", "spec.toml", "--wait"]) == code
    assert slept == [scheduler.ASK_EVERY] * 3
    assert (
        capsys.readouterr()
        .out.splitlines()[-1]
        .endswith(over or "the jobs ended before the run was finished")
    )


def test_the_log_is_followed_from_job_to_job(
    queue: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["submit", "spec.toml"]) == 0
    own = record(tmp_path)
    capsys.readouterr()
    happens = iter(
        [
            lambda: own.log("17.headnode").write_text("one\n"),
            lambda: own.log("17.headnode").write_text("one\ntwo\n"),
            lambda: own.log("18.headnode").write_text("three\n"),
            lambda: [fakes.state(queue, number, "F") for number in own.jobs],
        ]
    )

    def sleep(seconds: float) -> None:
        next(happens)()
        scheduler.forget("pbs")

    monkeypatch.setattr(logs, "time", SimpleNamespace(sleep=sleep))
    assert main(["logs", "-f", "a-run"]) == 0
    assert capsys.readouterr().out == "one\ntwo\nthree\n"


def test_on_a_login_node(queue: Path, tmp_path: Path) -> None:
    """The verbs work without the packages of training."""
    program = BLOCKER.format(blocked=["torch", "mpi4py", "numba"])
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    for words in (
        ["submit", "spec.toml"],
        ["status"],
        ["status", "a-run"],
        ["runs"],
        ["cancel", "a-run"],
    ):
        done = subprocess.run(
            [sys.executable, "-c", program, *words],
            env=variables,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        notes = ("PBS shows SECRET_OF_MINE", "data.source =")
        lines = done.stderr.splitlines()
        said = [line for line in lines if not any(note in line for note in notes)]
        assert (done.returncode, said) == (0, []), words


def test_a_probe_goes_where_short_jobs_begin_soon(
    queue: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "spec.toml").write_text(
        'name = "big"\noutput = "runs"\n'
        "train = { steps = 100000, global_batch = 64 }\nschedule.warmup_steps = 900\n"
        'batch = { site = "polaris", account = "a", nodes = 4, walltime = "3h", chain = 9, '
        'after = "4711", begin = "1200" }\n'
    )
    assert main(["submit", "spec.toml", "--probe", "--dry-run"]) == 0
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert {
        "#PBS -q debug-scaling",
        "#PBS -l walltime=00:15:00",
        "#PBS -l select=4:system=polaris",
    } <= set(lines)
    assert [line for line in lines if line.startswith("#PBS -N big.probe-")]
    assert not [line for line in lines if "4711" in line or line.startswith("#PBS -a")], (
        "it waits for nothing"
    )
    first, second = [line for line in lines if line.startswith("mpiexec")]
    assert first.endswith("/spec.toml --set train.steps=3 </dev/null || exit")
    assert second.endswith("/spec.toml </dev/null")
    assert main(["submit", "spec.toml", "--probe", "--dry-run", "--set", "batch.nodes=16"]) == 0
    assert "#PBS -q prod" in capsys.readouterr().out.splitlines(), "so many are not allowed there"


def test_another_run_is_not_submitted_over_one(
    queue: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Or the job would find out, after its days in the queue."""
    run = tmp_path / "runs" / "a-run"
    run.mkdir(parents=True)
    (run / "spec.toml").write_text(SPEC + "model.layers = 9\n")
    assert main(["submit", "spec.toml"]) == 2
    assert "holds another run:\n  model.layers" in capsys.readouterr().err
    (run / "spec.toml").rename(run / "thesis.toml")
    assert main(["submit", "spec.toml"]) == 2
    assert "is no run directory" in capsys.readouterr().err
    assert not fakes.calls(queue, "qsub")


def test_waiting_outlives_a_scheduler_that_is_silent_for_a_while(
    queue: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["submit", "spec.toml", "--set", "batch.chain=1"]) == 0
    (queue / "deaf").touch()
    scheduler.forget("pbs")
    assert submit.still_living([record(tmp_path).run])
    (queue / "deaf").unlink()
    fakes.state(queue, "17.headnode", "F")
    assert not submit.still_living([record(tmp_path).run])
