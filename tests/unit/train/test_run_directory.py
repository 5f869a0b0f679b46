"""The run directory in bad shape: what is damaged, missing or full is one clear error, and what
a run can do without does not stop it.
"""

import errno
import json
import math
import os
import resource
from datetime import UTC, datetime
from pathlib import Path

import pytest

from hpczero import lock
from hpczero.errors import HpczeroError, InputError
from hpczero.spec.load import to_toml
from hpczero.spec.schema import Spec
from hpczero.train import run_directory
from hpczero.train.run_directory import RunDirectory


@pytest.fixture
def spec(tmp_path: Path) -> Spec:
    return Spec(name="tiny", output=str(tmp_path / "runs"))


@pytest.fixture
def directory(spec: Spec) -> Path:
    """A run's directory that nobody holds any more."""
    claimed = RunDirectory.claim(spec, resume=False, fresh=False)
    claimed.close()
    return claimed.path


def full_disk(*arguments: object) -> int:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("call", ["pwrite", "fsync"])
def test_a_full_disk_at_the_start_leaves_nothing(
    spec: Spec, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    monkeypatch.setattr(os, call, full_disk)
    with pytest.raises(InputError, match="No space left on device"):
        RunDirectory.claim(spec, resume=False, fresh=False)
    assert not run_directory.path_of(spec).exists()


def test_a_full_disk_later_is_one_error_that_names_the_file(spec: Spec, directory: Path) -> None:
    claimed = RunDirectory.claim(spec, resume=False, fresh=False)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        with pytest.raises(HpczeroError, match=r"metrics\.jsonl: File too large"):
            claimed.metrics({"step": 1})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        claimed.close()
    assert not (directory / "lock").exists()


def test_a_path_that_the_system_refuses_is_the_users_mistake(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="too long"):
        RunDirectory.claim(Spec(output=str(tmp_path / ("x" * 300))), resume=False, fresh=False)


def test_metrics_that_are_no_text_are_dropped(spec: Spec, directory: Path) -> None:
    (directory / "metrics.jsonl").write_bytes(
        b'{"step": 1}\n\xff\xfe\x00\n{"step": 2}\n{"step": 3}\n{"ste'
    )
    claimed = RunDirectory.claim(spec, resume=False, fresh=False)
    claimed.keep_metrics_before(3)
    claimed.close()
    assert (directory / "metrics.jsonl").read_text() == '{"step": 1}\n{"step": 2}\n'


def test_lines_of_steps_that_are_computed_again_are_lost(spec: Spec, directory: Path) -> None:
    lines = [{"step": step, "step_seconds": 2.0, "time": f"day {step}"} for step in range(1, 6)]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    damaged = '{"step": NaN}\n{"step": ' + 400 * "9" + "}\n" + "[" * 100_000 + '\n{"step": 6, "ti'
    (directory / "metrics.jsonl").write_text(text + damaged)
    claimed = RunDirectory.claim(spec, resume=False, fresh=False)
    earlier = claimed.keep_metrics_before(4)
    claimed.close()
    assert (earlier.steps, earlier.seconds) == (3, 6.0)
    assert earlier.lost == {"lost_steps": 2, "lost_seconds": 4.0, "lost_until": "day 5"}
    assert (directory / "metrics.jsonl").read_text() == "".join(text.splitlines(True)[:3])


OF_MEMORY = {"rank": 0, "host": "n1", "predicted": {"weights": 4}}


def test_lines_of_memory_follow_those_of_the_steps(spec: Spec) -> None:
    claimed = RunDirectory.claim(spec, resume=False, fresh=False)
    for step, held in ((2, 5), (4, 8), (6, 9)):
        claimed.memory(OF_MEMORY | {"step": step, "held": held})
    assert claimed.fullest == OF_MEMORY | {"step": 6, "held": 9}
    claimed.close()
    claimed = RunDirectory.claim(spec, resume=False, fresh=False)
    assert claimed.fullest is None
    claimed.keep_metrics_before(5)
    assert claimed.fullest
    assert claimed.fullest["step"] == 4
    claimed.memory(OF_MEMORY | {"step": 5, "held": 7})
    assert claimed.fullest["step"] == 4
    claimed.close()
    lines = (claimed.path / "memory.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [2, 4, 5]


def test_the_seconds_of_this_job_s_steps_are_kept(spec: Spec, directory: Path) -> None:
    (directory / "metrics.jsonl").write_text('{"step": 1, "step_seconds": 9.0}\n')
    claimed = RunDirectory.claim(spec, resume=False, fresh=False)
    claimed.keep_metrics_before(2)
    assert list(claimed.step_seconds) == []
    for step, seconds in ((2, 0.5), (3, None), (4, 0.25)):
        claimed.metrics({"step": step} | ({"step_seconds": seconds} if seconds else {}))
    assert list(claimed.step_seconds) == [0.5, 0.25]
    claimed.close()


def test_lines_of_memory_that_lack_something_are_passed_over(spec: Spec) -> None:
    claimed = RunDirectory.claim(spec, resume=False, fresh=False)
    good = OF_MEMORY | {"step": 1, "held": 5}
    odd = ({"held": math.nan}, {"held": True}, {"predicted": {"weights": "9"}}, {"predicted": 9})
    lines = [*(good | {"held": 9} | change for change in odd), {"step": 1, "held": 9}, good]
    (claimed.path / "memory.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    claimed.keep_metrics_before(5)
    assert claimed.fullest == good
    claimed.close()


def test_figures_that_are_not_finite_are_null(spec: Spec) -> None:
    claimed = RunDirectory.claim(spec, resume=False, fresh=False)
    claimed.metrics({"step": 1, "loss": math.nan, "grad_norm": math.inf, "lr": 0.5})
    claimed.summary(
        {"state": "finished", "steps": 100, "final_loss": math.nan, "ranks": [{"x": -math.inf}]}
    )
    claimed.close()
    metrics = json.loads((claimed.path / "metrics.jsonl").read_text())
    assert datetime.fromisoformat(metrics.pop("time")).tzinfo == UTC
    assert metrics == {"step": 1, "loss": None, "grad_norm": None, "lr": 0.5}
    assert run_directory.finished(spec) == {
        "state": "finished",
        "steps": 100,
        "final_loss": None,
        "ranks": [{"x": None}],
    }


FINISHED = '{"state": "finished", "steps": 100, "final_loss": 1.5}'


def test_a_finished_run_is_known_by_its_summary(spec: Spec, directory: Path) -> None:
    (directory / "summary.json").write_text(FINISHED)
    assert run_directory.finished(spec) == {"state": "finished", "steps": 100, "final_loss": 1.5}


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("100", '"many"'),
        ("100", "null"),
        ("100", "99"),
        ("1.5", '"low"'),
        (', "final_loss": 1.5', ""),
        (FINISHED, "[]"),
    ],
)
def test_a_damaged_summary_is_no_finished_run(
    spec: Spec, directory: Path, old: str, new: str
) -> None:
    (directory / "summary.json").write_text(FINISHED.replace(old, new))
    assert run_directory.finished(spec) is None


def test_what_ended_the_last_job_ends_no_other(spec: Spec, directory: Path) -> None:
    for name in ("stop", "summary.json"):
        (directory / name).write_text("{}")
    RunDirectory.claim(spec, resume=False, fresh=False).close()
    assert not {"stop", "summary.json"} & {path.name for path in directory.iterdir()}


def test_a_directory_that_lost_its_spec_is_left_or_begun_anew(spec: Spec, directory: Path) -> None:
    (directory / "summary.json").write_text(FINISHED)
    (directory / "spec.toml").unlink()
    assert run_directory.finished(spec) is None
    with pytest.raises(InputError, match=r"has no spec\.toml and no complete checkpoint.* --fresh"):
        RunDirectory.claim(spec, resume=False, fresh=False)
    RunDirectory.claim(spec, resume=False, fresh=True).close()
    assert not (directory / "summary.json").exists()


def test_what_a_submission_keeps_there_is_no_other_run(spec: Spec) -> None:
    """`hpczero submit` makes the folder before the run begins."""
    books = run_directory.path_of(spec) / "batch" / "20260105T100000-0123456789ab"
    books.mkdir(parents=True)
    RunDirectory.claim(spec, resume=False, fresh=False).close()
    assert books.is_dir()
    (run_directory.path_of(spec) / "spec.toml").unlink()
    (run_directory.path_of(spec) / "thesis.tex").touch()
    with pytest.raises(InputError, match="is no run directory"):
        RunDirectory.claim(spec, resume=False, fresh=False)


def test_a_job_whose_run_is_held_has_failed_alone(
    spec: Spec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job may be requeued while its ranks live on: exit code 2 would end the chain."""
    monkeypatch.setattr(lock, "PATIENCE", 0.0)
    first = RunDirectory.claim(spec, resume=False, fresh=False)
    monkeypatch.setenv("PBS_JOBID", "17.headnode")
    with pytest.raises(HpczeroError, match="is in use by process") as failed:
        RunDirectory.claim(spec, resume=False, fresh=False)
    assert failed.value.exit_code == 1
    first.metrics({"step": 1})
    first.close()
    RunDirectory.claim(spec, resume=False, fresh=False).close()


def test_the_run_that_was_waited_for_must_be_the_same(
    spec: Spec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its spec was not there yet when the job began to wait."""
    path = run_directory.path_of(spec)
    other = spec.model_copy(update={"seed": spec.seed + 1})

    def wait(own: lock.RunLock) -> lock.RunLock:
        (path / "spec.toml").write_text(to_toml(other))
        return own.take()

    monkeypatch.setattr(lock.RunLock, "take_in_job", wait)
    with pytest.raises(InputError, match="holds another run"):
        RunDirectory.claim(spec, resume=False, fresh=False)
    assert (path / "spec.toml").read_text() == to_toml(other)
    assert not (path / "lock").exists()
