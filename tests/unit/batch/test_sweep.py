"""A sweep over a fake PBS (fakes.py), and the scripts of its array under both schedulers."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from hpczero import env
from hpczero.batch import pbs, render, slurm, submission, sweep_runs
from hpczero.cli import main
from hpczero.spec.sweep import differing
from tests.support import fakes
from tests.support.launch import CHECKOUT

SWEEP = """
name = "lr"
output = "runs"
data.source = "synthetic"
train.steps = 40
[sweep]
at_once = 2
[sweep.grid]
"optimizer.lr" = [1e-3, 2e-3, 4e-3]
[batch]
site = "generic/pbs"
env_pass = ["SECRET_OF_MINE"]
"""
NAMES = ("lr-lr0.001", "lr-lr0.002", "lr-lr0.004")


@pytest.fixture
def sweep(queue: Path, tmp_path: Path) -> Path:
    """Return the folder of the sweep, which is described by sweep.toml."""
    (tmp_path / "sweep.toml").write_text(SWEEP)
    return tmp_path / "runs" / "lr"


def record(run: Path) -> submission.Submission:
    return submission.of_run(run)[-1]


def ends(run: Path, queue: Path, code: int, why: str = "") -> None:
    """End the newest job of a run as its script does."""
    its = record(run)
    (number,) = its.jobs
    with (its.path / "links").open("a") as links:
        links.write(f"2026-11-28T10:00:00Z {number} began none\n")
        links.write(f"2026-11-28T10:10:00Z {number} ended {code}\n")
    its.log(number).write_text(f"hpczero: {why}\n")
    (its.path / "over").write_text(f"{why or 'the run is finished'}\n")
    fakes.state(queue, number, "F")


def test_a_sweep_is_one_array_and_each_run_has_a_script_as_if_alone(
    sweep: Path, queue: Path, tmp_path: Path
) -> None:
    assert main(["submit", "sweep.toml"]) == 0
    assert len(fakes.calls(queue, "qsub")) == 1
    records = [record(sweep / name) for name in NAMES]
    assert [one.jobs for one in records] == [(f"17[{task}].headnode",) for task in range(3)]
    assert all(one.complete for one in records)
    assert len({one.path.name for one in records}) == 1
    array = (sweep / "batch" / records[0].path.name / "job.sh").read_text()
    assert ["-J", "0-2%2"] in render.directives(array, "pbs")
    for one, name in zip(records, NAMES, strict=True):
        script = (one.path / "job.sh").read_text()
        assert str(one.path / "spec.toml") in script
        assert not [words for words in render.directives(script, "pbs") if "-J" in words]
        assert f'name = "{name}"' in (one.path / "spec.toml").read_text()
    assert not sweep_runs.is_run(sweep, os.listdir(sweep))
    assert sweep_runs.runs_in(sweep) == [sweep / name for name in NAMES]


def test_one_that_failed_is_named_and_submitted_alone(
    sweep: Path, queue: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["submit", "sweep.toml"]) == 0
    for name in NAMES[:2]:
        (sweep / name / "summary.json").write_text('{"state": "finished", "steps": 40}')
        ends(sweep / name, queue, 0)
    ends(sweep / NAMES[2], queue, 2, "texts.h5 does not exist")
    capsys.readouterr()
    assert main(["status", "sweep.toml"]) == 0
    said = capsys.readouterr().out
    assert f"3 runs in {sweep}: 2 finished, 1 failed" in said
    assert "lr-lr0.004 failed: texts.h5 does not exist" in said
    again = "hpczero submit sweep.toml --set sweep.run=lr0.004"
    assert f"  again: {again}\n" in said
    assert main(again.split()[1:]) == 0
    assert record(sweep / NAMES[2]).jobs == ("18.headnode",)
    assert [record(sweep / name).jobs for name in NAMES[:2]] == [
        ("17[0].headnode",),
        ("17[1].headnode",),
    ]
    capsys.readouterr()
    assert main(["status", "lr", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["states"] == {"finished": 2, "queued": 1}


def test_submitted_again_a_sweep_submits_what_is_left(
    sweep: Path, queue: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["submit", "sweep.toml"]) == 0
    assert main(["submit", "sweep.toml"]) == 0
    assert "3 runs in the queue or running" in capsys.readouterr().err
    assert len(fakes.calls(queue, "qsub")) == 1
    ends(sweep / NAMES[0], queue, 1, "killed")
    (tmp_path / "sweep.toml").write_text(SWEEP.replace("4e-3", "4e-3, 8e-3"))
    assert main(["submit", "sweep.toml"]) == 0
    assert record(sweep / NAMES[0]).jobs == ("18[0].headnode",)
    assert record(sweep / "lr-lr0.008").jobs == ("18[1].headnode",)
    assert record(sweep / NAMES[1]).jobs == ("17[1].headnode",)


def test_one_run_is_cancelled_and_then_all(
    sweep: Path, queue: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["submit", "sweep.toml"]) == 0
    capsys.readouterr()
    assert main(["cancel", NAMES[1]]) == 0
    assert capsys.readouterr().out == "cancelled: 17[1].headnode\n"
    assert [fakes.state(queue, f"17[{task}].headnode") for task in range(3)] == ["Q", "F", "Q"]
    assert main(["cancel", str(sweep)]) == 0
    assert capsys.readouterr().out == "cancelled: 17[0].headnode and 17[2].headnode\n"
    assert main(["status", "sweep.toml"]) == 0
    assert "3 cancelled" in capsys.readouterr().out


def test_a_task_is_found_by_its_tag_and_others_are_not(
    sweep: Path, queue: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The answer of qsub is lost: the array is found in the queue, and is submitted once."""
    (queue / "lose").touch()
    assert main(["submit", "sweep.toml"]) == 0
    assert len(fakes.calls(queue, "qsub")) == 1
    assert record(sweep / NAMES[2]).jobs == ("17[2].headnode",)
    its = record(sweep / NAMES[2])
    (its.path / "submission.json").write_text(
        (its.path / "submission.json")
        .read_text()
        .replace('"17[2].headnode"', "")
        .replace('"complete": true', '"complete": false')
    )
    assert record(sweep / NAMES[2]).jobs == (), "it was interrupted before it was written"
    capsys.readouterr()
    assert main(["cancel", NAMES[2]]) == 0
    assert capsys.readouterr().out == "cancelled: 17[2].headnode\n"


def test_a_submission_that_fails_leaves_nothing_in_the_queue(sweep: Path, queue: Path) -> None:
    (queue / "refuse").write_text("qsub: too many subjobs")
    assert main(["submit", "sweep.toml"]) == 2
    (queue / "refuse").unlink()
    assert main(["submit", "sweep.toml"]) == 0
    assert record(sweep / NAMES[0]).jobs == ("17[0].headnode",)


@pytest.mark.parametrize("different", ["batch.chain=2", 'sweep.grid={"batch.nodes"=[1, 2]}'])
def test_runs_that_are_no_array_are_jobs_of_their_own(
    sweep: Path, queue: Path, tmp_path: Path, different: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = SWEEP
    if "batch.nodes" in different:
        text = SWEEP.replace('"optimizer.lr" = [1e-3, 2e-3, 4e-3]', '"batch.nodes" = [1, 2]')
        different = "train.steps=40"
    (tmp_path / "sweep.toml").write_text(text)
    assert main(["submit", "sweep.toml", "--set", different]) == 2
    assert "sweep.at_once = 2 is for an array" in capsys.readouterr().err
    (tmp_path / "sweep.toml").write_text(text.replace("at_once = 2\n", ""))
    assert main(["submit", "sweep.toml", "--set", different]) == 0
    jobs = [record(run).jobs for run in sweep_runs.runs_in(sweep)]
    numbers = iter(range(17, 99))
    chain = 2 if "chain" in different else 1
    assert jobs == [tuple(f"{next(numbers)}.headnode" for _ in range(chain)) for _ in jobs]
    assert len(jobs) == (3 if chain == 2 else 2)


def test_a_chain_that_fails_midway_leaves_those_before_it(
    sweep: Path, queue: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    submit, tries = pbs.submit, iter(range(99))

    def refuses_the_fourth(words: list[str]) -> str:
        if next(tries) == 3:
            (queue / "refuse").write_text("qsub: enough")
        return submit(words)

    monkeypatch.setattr(pbs, "submit", refuses_the_fourth)
    options = ["--set", "batch.chain=2"]
    text = SWEEP.replace("at_once = 2\n", "")
    Path("sweep.toml").write_text(text)
    assert main(["submit", "sweep.toml", *options]) == 2
    assert "1 of 3 runs are in the queue" in capsys.readouterr().err
    (queue / "refuse").unlink()
    assert main(["submit", "sweep.toml", *options]) == 0
    assert all(len(record(sweep / name).jobs) == 2 for name in NAMES)
    assert record(sweep / NAMES[0]).jobs == ("17.headnode", "18.headnode")


def test_nothing_is_submitted_if_one_run_is_wrong(
    sweep: Path, queue: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("sweep.toml").write_text(
        SWEEP.replace('"optimizer.lr"', '"data.source" = ["synthetic", "gone.h5"]\n"optimizer.lr"')
    )
    assert main(["submit", "sweep.toml"]) == 2
    told = capsys.readouterr().err
    assert "nothing was submitted" in told
    assert "lr-source_gone.h5-lr0.001, lr-source_gone.h5-lr0.002, " in told
    assert "lr-source_synthetic" not in told
    assert not fakes.calls(queue, "qsub")
    assert not sweep.exists()


def test_a_run_of_the_sweeps_name_is_not_mixed_up_with_it(
    sweep: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep.mkdir(parents=True)
    (sweep / "spec.toml").touch()
    assert main(["submit", "sweep.toml"]) == 2
    assert "is a run itself" in capsys.readouterr().err


def test_logs_of_a_sweep_are_told_apart(
    sweep: Path, queue: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["submit", "sweep.toml"]) == 0
    for name in NAMES[:2]:
        ends(sweep / name, queue, 1, f"the words of {name}")
    its = record(sweep / NAMES[1])
    its.message_file(its.jobs[0]).write_text("PBS: job killed: walltime\n")
    capsys.readouterr()
    assert main(["logs", "sweep.toml"]) == 0
    assert capsys.readouterr().out == (
        "==> lr0.001 <==\nhpczero: the words of lr-lr0.001\n"
        "==> lr0.002 <==\nhpczero: the words of lr-lr0.002\nPBS: job killed: walltime\n"
    )
    assert main(["logs", str(sweep / NAMES[0])]) == 0
    assert capsys.readouterr().out == "hpczero: the words of lr-lr0.001\n"


def test_a_folder_of_runs_is_no_sweep(sweep: Path, queue: Path) -> None:
    """`cancel runs` must not end all that lies there."""
    assert main(["submit", "sweep.toml"]) == 0
    (sweep.parent / "runs").mkdir()
    assert main(["cancel", str(sweep.parent)]) == 2
    assert fakes.state(queue, "17[0].headnode") == "Q"


def test_what_differs_is_found_by_the_folders_alone(sweep: Path, queue: Path) -> None:
    assert main(["submit", "sweep.toml"]) == 0
    assert differing(sweep_runs.specs_of(sweep_runs.runs_in(sweep))) == {
        name: {"optimizer.lr": rate} for name, rate in zip(NAMES, (1e-3, 2e-3, 4e-3), strict=True)
    }


def test_a_probe_tries_one_run(
    sweep: Path, queue: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["submit", "sweep.toml", "--probe"]) == 2
    assert "--set sweep.run=NAME" in capsys.readouterr().err
    assert main(["submit", "sweep.toml", "--probe", "--set", "sweep.run=lr0.002"]) == 0
    (run,) = sweep.iterdir()
    assert run.name.startswith("lr-lr0.002.probe-")
    assert "lr = 0.002" in (record(run).path / "spec.toml").read_text()
    assert sweep_runs.runs_in(sweep) == []


@pytest.mark.parametrize(("site", "mark"), [("slurm", "#SBATCH --array="), ("pbs", "#PBS -J ")])
def test_a_rendered_array_lets_each_task_take_its_run(
    sweep: Path, site: str, mark: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--set", f"batch.site=generic/{site}", "--set", "batch.env_pass=[]"]
    assert main(["render", "sweep.toml", *options, "-o", "job.sh"]) == 0
    script = Path("job.sh").read_text()
    assert f"\n{mark}0-2%2\n" in script
    assert f"run {tmp_path / 'sweep.toml'} " in script
    assert "--set sweep.run=task" in script
    subprocess.run(["bash", "-n", "job.sh"], check=True)
    capsys.readouterr()
    assert main(["render", "sweep.toml", *options, "--set", "batch.command=['x', '{spec}']"]) == 2
    assert "hpczero submit gives each run a spec of its own" in capsys.readouterr().err


def test_a_program_that_reads_no_spec_sees_no_sweep(
    sweep: Path, queue: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["submit", "sweep.toml", "--set", "batch.command=['own']"]) == 2
    assert "reads the spec's file" in capsys.readouterr().err
    assert main(["submit", "sweep.toml", "--set", "batch.command=['own', '{spec}']"]) == 0
    its = record(sweep / NAMES[0])
    assert f"own {its.path / 'spec.toml'}" in (its.path / "job.sh").read_text()


@pytest.mark.parametrize("site", ["slurm", "pbs"])
def test_a_task_starts_the_script_of_its_run_and_writes_its_log(
    sweep: Path, site: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    options = ["--set", f"batch.site=generic/{site}", "--set", "batch.env_pass=[]"]
    assert main(["submit", "sweep.toml", *options, "--dry-run"]) == 0
    text = capsys.readouterr().out.partition("\n# /")[0]
    books = text.partition("/batch/")[2].splitlines()[0]
    for name in NAMES:
        (sweep / name / "batch" / books).mkdir(parents=True)
        (sweep / name / "batch" / books / "job.sh").write_text(f'echo "this is {name}"\n')
    (tmp_path / "array.sh").write_text(text)
    for task, name in enumerate(NAMES):
        number = f"7_{task}" if site == "slurm" else f"7[{task}].headnode"
        variables = {
            "SLURM_ARRAY_JOB_ID": "7",
            "SLURM_ARRAY_TASK_ID": str(task),
            "PBS_ARRAY_INDEX": str(task),
            "PBS_JOBID": number,
        }
        subprocess.run(["bash", "array.sh"], env={**os.environ, **variables}, check=True)
        log = sweep / name / "batch" / books / f"log-{number}"
        assert log.read_text().endswith(f"this is {name}\n")


@pytest.mark.parametrize(
    ("kind", "array", "task"), [(slurm, "123", "123_4"), (pbs, "123[].head.x", "123[4].head.x")]
)
def test_numbers_of_tasks(kind: object, array: str, task: str) -> None:
    module = slurm if kind is slurm else pbs
    assert module.task_number(array, 4) == task
    assert module.task_of(task) == (array, 4)
    assert module.task_of(array) == (array, None)
    assert module.task_of("123") == ("123", None)


def test_a_job_knows_its_number_in_an_array(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID", "PBS_ARRAY_INDEX", "PBS_JOBID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SLURM_JOB_ID", "130")
    assert (env.batch_job(), env.array_task()) == ("130", None)
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "123")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "4")
    assert (env.batch_job(), env.array_task()) == ("123_4", 4)


def test_hostile_names_in_a_sweeps_folder_reach_no_terminal(
    sweep: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["submit", "sweep.toml"]) == 0
    evil = sweep / "lr-\x1b[2J"
    evil.mkdir()
    (evil / "spec.toml").write_text("x = [")
    (evil / "events.jsonl").touch()
    (sweep / "lr-link").symlink_to(CHECKOUT)
    capsys.readouterr()
    assert main(["status", str(sweep)]) == 0
    said = capsys.readouterr()
    assert all(one.isprintable() or one == "\n" for one in said.out + said.err)
    assert "4 runs" in said.out
