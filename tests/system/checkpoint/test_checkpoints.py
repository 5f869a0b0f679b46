"""Checkpoints of real runs: killed at any moment, on full and vanished disks, continued on other
grids.
"""

import json
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from hpczero.checkpoint import directory as checkpoints
from hpczero.checkpoint.load import Checkpoint
from tests.support.launch import Finished, hpczero, launch, mpirun, started
from tests.support.runs import kill_ranks, wait_for

pytest.importorskip("torch", reason="training needs torch")
pytest.importorskip("mpi4py", reason="training needs mpi4py")

SPEC = """
name = "tiny"
[model]
layers = 4
hidden = 128
heads = 4
seq_len = 16
vocab = 2048
[data]
source = "synthetic"
[train]
steps = {steps}
global_batch = 4
micro_batch = 2
precision = "bf16"
eval_batches = 0
[checkpoint]
every = 1
keep = 3
"""
LAYOUTS = (
    (2, ()),
    (1, ()),
    (3, ("zero.stage=2",)),
    (4, ("parallel.tensor=2", "zero.stage=3")),
    (4, ("parallel.pipeline=2",)),
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "spec.toml").write_text(SPEC.format(steps=12))
    return tmp_path


def train(folder: Path, ranks: int, *settings: str) -> Finished:
    return launch(
        [*mpirun(ranks), *hpczero("run", "spec.toml"), *with_settings(settings)], 120, folder
    )


def with_settings(settings: tuple[str, ...]) -> list[str]:
    return [word for setting in settings for word in ("--set", setting)]


def metrics(folder: Path) -> dict[int, tuple[float, float]]:
    """Step -> loss and norm of the gradient, to the bit."""
    lines = (folder / "runs" / "tiny" / "metrics.jsonl").read_text().splitlines()
    found = [json.loads(line) for line in lines]
    assert [line["step"] for line in found] == list(range(1, len(found) + 1))
    return {line["step"]: (line["loss"], line["grad_norm"]) for line in found}


def events(folder: Path, name: str) -> list[dict[str, Any]]:
    lines = (folder / "runs" / "tiny" / "events.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == name]


def complete(folder: Path) -> dict[int, Path]:
    return checkpoints.steps(folder / "runs" / "tiny" / "checkpoints")


def read_all(path: Path) -> None:
    with Checkpoint.open(path) as checkpoint:
        for tensor in checkpoint.values():
            tensor.numpy()


def kill(
    folder: Path, ranks: int, chance: random.Random, *settings: str, has_saved: bool = False
) -> None:
    """A run, of which a random rank, or all of them, are killed at a random moment after it has
    begun to train, or to save.
    """
    path = folder / "runs" / "tiny" / "events.jsonl"
    before = len(path.read_text().splitlines()) if path.exists() else 0
    with started(
        [*mpirun(ranks), *hpczero("run", "spec.toml"), *with_settings(settings)], folder
    ) as process:
        deadline = time.monotonic() + 60
        while (
            not path.exists()
            or '"first"' not in "".join(path.read_text().splitlines(keepends=True)[before:])
            or (has_saved and not complete(folder))
        ):
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.01)
        time.sleep(chance.random())
        pids = [place["pid"] for place in events(folder, "start")[-1]["ranks"]]
        kill_ranks(chance.choice([pids, [chance.choice(pids)]]))
        process.communicate(timeout=60)
        assert process.returncode != 0


@pytest.mark.parametrize(
    "times", [1, pytest.param(100, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])]
)
def test_killed_at_any_moment_it_goes_on_from_the_newest_complete_checkpoint(
    folder: Path, times: int
) -> None:
    """Saves follow one another without a pause, so most kills meet one. What was lost are steps,
    and what is computed again is the same.
    """
    (folder / "spec.toml").write_text(SPEC.format(steps=100_000))
    chance, seen = random.Random(times), dict[int, tuple[float, float]]()
    for number in range(times):
        kill(
            folder,
            2,
            chance,
            f"checkpoint.asynchronous={'true' if number % 3 else 'false'}",
            f"checkpoint.writers={('node', 'rank')[number % 2]}",
            has_saved=number == times - 1,
        )
        for step, values in metrics_until_torn(folder).items():
            assert seen.setdefault(step, values) == values, step
        if complete(folder):
            read_all(next(iter(complete(folder).values())))
    newest = max(complete(folder))
    done = train(folder, 2, f"train.steps={newest + 2}", "schedule.name=constant")
    assert done.code == 0, done
    assert f"resume step={newest} " in done.out
    assert "WARN" not in done.out
    assert list(complete(folder)) == [newest + 2, newest + 1, newest]
    assert not checkpoints.incomplete(folder / "runs" / "tiny" / "checkpoints")


def metrics_until_torn(folder: Path) -> dict[int, tuple[float, float]]:
    found = {}
    for line in (folder / "runs" / "tiny" / "metrics.jsonl").read_text().splitlines():
        try:
            values = json.loads(line)
        except ValueError:
            break
        found[values["step"]] = values["loss"], values["grad_norm"]
    return found


def test_a_stopped_run_is_the_one_that_was_not_stopped(folder: Path, everything: bool) -> None:
    """To the bit on the same ranks; on others as close as any two grids are."""
    whole = train(folder, 2, "train.precision=fp32", "optimizer.eps=1e-6")
    assert whole.code == 0, whole
    expected = metrics(folder)
    for ranks, settings in LAYOUTS if everything else LAYOUTS[:1]:
        for step in [step for step in complete(folder) if step > 10]:
            checkpoints.remove(complete(folder)[step])
        (folder / "runs" / "tiny" / "summary.json").unlink()
        done = train(folder, ranks, "train.precision=fp32", "optimizer.eps=1e-6", *settings)
        assert done.code == 0, done
        assert "resume step=10 " in done.out
        again = metrics(folder)
        if not settings and ranks == 2:
            assert again == expected
        assert [again[step][0] for step in (11, 12)] == pytest.approx(
            [expected[step][0] for step in (11, 12)], rel=1e-5
        )


@pytest.fixture
def disk(folder: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """At runs/tiny/checkpoints, of 18 MB, which is room for one checkpoint, or as large as the
    test says.
    """
    place = folder / "runs" / "tiny" / "checkpoints"
    place.mkdir(parents=True)
    shutil.copy(folder / "spec.toml", place.parent / "spec.toml")
    options = f"size={getattr(request, 'param', '18m')}"
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(place)],
        capture_output=True,
        text=True,
        check=False,
    )
    if made.returncode:
        pytest.skip(f"cannot mount a disk: {made.stderr.strip()}")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


@pytest.mark.slow
@pytest.mark.parametrize("on_error", ["stop", "continue"])
@pytest.mark.parametrize("asynchronous", ["true", "false"])
def test_a_full_disk(folder: Path, disk: Path, on_error: str, asynchronous: str) -> None:
    """The save of step 8 fails. In the background that is known at step 12 at the latest."""
    mode = f"checkpoint.on_error={on_error}", f"checkpoint.asynchronous={asynchronous}"
    done = train(folder, 2, *mode, "checkpoint.every=4", "checkpoint.keep=1", "train.steps=16")
    assert done.code == 1, done  # the last step is not saved
    assert "Traceback" not in done.out + done.err
    warning = events(folder, "WARN")[0]["what"]
    assert "step-00000008/shard-00000.h5.new: No space left on device" in warning
    assert "bytes" in warning
    assert list(complete(folder)) == [4]
    read_all(complete(folder)[4])
    latest = 12 if asynchronous == "true" else 8
    assert (
        len(metrics(folder)) == 16
        if on_error == "continue"
        else 8 <= len(metrics(folder)) <= latest
    )


@contextmanager
def endless(folder: Path, *settings: str) -> Iterator[subprocess.Popen[bytes]]:
    """A run that saves after every step, until it is asked to stop; then it ends with a
    checkpoint from which it can go on.
    """
    command = [
        *mpirun(2),
        *hpczero("run", "spec.toml"),
        *with_settings(("train.steps=100000", *settings)),
    ]
    with started(command, folder) as process:
        wait_for(lambda: len(steps_saved(folder)) > 2, process, 60)
        yield process
        os.kill(events(folder, "start")[-1]["ranks"][1]["pid"], signal.SIGTERM)
        output, errors = process.communicate(timeout=60)
    assert process.returncode == 75, (output, errors)
    assert b"Traceback" not in output + errors
    read_all(next(iter(complete(folder).values())))
    assert (
        max(complete(folder))
        == json.loads((folder / "runs" / "tiny" / "summary.json").read_text())["steps"]
    )


def steps_saved(folder: Path) -> list[int]:
    path = folder / "runs" / "tiny" / "events.jsonl"
    return [event["step"] for event in events(folder, "save")] if path.exists() else []


def saves_again(folder: Path, process: subprocess.Popen[bytes]) -> None:
    before = max(steps_saved(folder))
    wait_for(lambda: max(steps_saved(folder)) > before + 2, process, 60)


def warned_of(folder: Path, what: str) -> bool:
    return any(what in event["what"] for event in events(folder, "WARN"))


@pytest.mark.parametrize("disk", ["100m"], indirect=True)
@pytest.mark.slow
def test_a_disk_that_is_read_only_for_a_while(folder: Path, disk: Path) -> None:
    with endless(folder, "checkpoint.on_error=continue") as process:
        wait_for(lambda: remounted(disk, "ro"), process, 60)  # refused while a file is open
        kept = complete(folder)
        wait_for(lambda: warned_of(folder, "Read-only file system"), process, 60)
        assert complete(folder) == kept
        for path in kept.values():
            read_all(path)
        assert remounted(disk, "rw")
        saves_again(folder, process)


def remounted(disk: Path, how: str) -> bool:
    return (
        subprocess.run(
            ["mount", "-o", f"remount,{how}", str(disk)], capture_output=True, check=False
        ).returncode
        == 0
    )


@pytest.mark.slow
def test_a_folder_that_vanishes_while_it_is_written(folder: Path) -> None:
    with endless(folder, "checkpoint.on_error=continue") as process:
        for _ in range(3):
            (folder / "runs" / "tiny" / "checkpoints").rename(folder / "elsewhere")
            saves_again(folder, process)
            shutil.rmtree(folder / "elsewhere")


@pytest.mark.slow
def test_a_folder_that_cannot_be_written(folder: Path) -> None:
    run = folder / "runs" / "tiny"
    run.mkdir(parents=True)
    shutil.copy(folder / "spec.toml", run / "spec.toml")
    (run / "checkpoints").write_text("in the way")
    done = train(folder, 2)
    assert done.code == 1, done
    assert "checkpoints" in events(folder, "WARN")[0]["what"]
    assert "Traceback" not in done.out + done.err
    done = train(folder, 2, "checkpoint.on_error=continue")
    assert done.code == 1, done
    assert "the last one is not saved: started again" in done.out
    assert (run / "checkpoints").read_text() == "in the way"
    (run / "checkpoints").unlink()
    done = train(folder, 2, "checkpoint.on_error=continue")
    assert done.code == 0, done
    assert max(complete(folder)) == 12


@pytest.mark.slow
def test_a_start_after_the_last_step_is_no_failure(folder: Path) -> None:
    """The run was killed before it could say that it is finished; or it is to do fewer steps
    than it has done.
    """
    for steps in (2, 2, 1):
        done = train(folder, 2, f"train.steps={steps}", "train.trace=true")
        assert done.code == 0, done
        summary = folder / "runs" / "tiny" / "summary.json"
        assert json.loads(summary.read_text())["steps"] == 2
        summary.unlink()
    assert "nothing was left to do: 2 steps are done, and train.steps = 1" in done.out
    assert list(complete(folder)) == [2, 1]


@pytest.mark.slow
def test_another_run_is_refused_and_what_changed_is_said(folder: Path) -> None:
    assert train(folder, 2, "train.steps=2").code == 0
    path = complete(folder)[2]
    done = train(folder, 2, "name=other", f"checkpoint.resume={path}", "seed=5", "model.hidden=64")
    assert done.code == 2, done
    assert "seed: 1 there, 5 now" in done.err
    assert "model.hidden: 128 there, 64 now" in done.err
    done = train(
        folder, 2, "name=other", f"checkpoint.resume={path}", "optimizer.lr=1e-4", "train.steps=4"
    )
    assert done.code == 0, done
    assert "optimizer.lr: 0.0003 there, 0.0001 now" in done.out
    done = train(folder, 2, "name=third", "checkpoint.resume=/nowhere")
    assert done.code == 2, done
    assert "/nowhere" in done.err
