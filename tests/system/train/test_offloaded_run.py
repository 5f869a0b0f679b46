"""Runs whose states are in files: killed, continued, with and without."""

import json
import os
import random
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.launch import Finished, hpczero, launch, mpirun, started
from tests.support.runs import kill_ranks

pytest.importorskip("torch", reason="training needs torch")
pytest.importorskip("mpi4py", reason="training needs mpi4py")

STEPS = 30
SPEC = f"""
name = "away"
[model]
layers = 3
hidden = 96
heads = 4
vocab = 300
seq_len = 64
[data]
source = "synthetic"
[train]
steps = {STEPS}
global_batch = 4
micro_batch = 2
precision = "bf16"
eval_batches = 0
[schedule]
name = "constant"
[checkpoint]
every = 5
[zero]
stage = 2
offload = "nvme:states"
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "spec.toml").write_text(SPEC)
    return tmp_path


def command(ranks: int, *settings: str) -> list[str]:
    arguments = [word for setting in settings for word in ("--set", setting)]
    return [*mpirun(ranks), *hpczero("run", "spec.toml", *arguments)]


def run(folder: Path, ranks: int, *settings: str) -> Finished:
    done = launch(command(ranks, *settings), 120, folder)
    assert (done.code, done.left) == (0, []), done
    return done


def losses(folder: Path, name: str = "away") -> dict[int, Any]:
    """Step -> its loss and norm; steps that were done again count as they were then."""
    lines = (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()
    values = (json.loads(line) for line in lines if line.endswith("}"))
    return {one["step"]: (one["loss"], one["grad_norm"]) for one in values}


def ranks_of(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    children = psutil.Process(process.pid).children(recursive=True)
    return [child for child in children if "hpczero" in child.cmdline()[1:3]]


@pytest.mark.parametrize(
    "times", [1, pytest.param(30, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])]
)
@pytest.mark.few(1)
def test_killed_in_its_steps_it_goes_on_from_the_newest_checkpoint(
    folder: Path, times: int
) -> None:
    """There is nothing to clean, and what is computed again is the same; in the end without."""
    run(folder, 2, 'zero.offload="none"', "name=plain")
    expected = losses(folder, "plain")
    chance = random.Random(times)
    more = f"train.steps={STEPS * 1000}"
    for _ in range(times):
        before = len(losses(folder)) if (folder / "runs" / "away").exists() else 0
        with started(command(2, more), folder) as process:
            deadline = time.monotonic() + 60
            metrics = folder / "runs" / "away" / "metrics.jsonl"
            while not metrics.exists() or len(losses(folder)) < before + 2:
                assert process.poll() is None, process.communicate()
                assert time.monotonic() < deadline
                time.sleep(0.02)
            time.sleep(0.1 * chance.random())
            victims = ranks_of(process)
            kill_ranks(victim.pid for victim in chance.choice([victims, [chance.choice(victims)]]))
            process.communicate(timeout=60)
            assert process.returncode != 0
        assert os.listdir(folder / "states") == []
    steps = max(max(losses(folder)), STEPS) + 1
    run(folder, 2, f"train.steps={steps}", 'zero.offload="none"')
    found = losses(folder)
    assert {step: found[step] for step in expected} == expected


@pytest.mark.slow
def test_a_checkpoint_is_like_any_other(folder: Path) -> None:
    """Resumed with and without."""
    run(folder, 2, 'zero.offload="none"', "name=plain")
    expected = losses(folder, "plain")
    for number, (first, then) in enumerate((("nvme:states", "none"), ("none", "nvme:states"))):
        name = f"name=mixed-{number}"
        run(folder, 2, name, f'zero.offload="{first}"', "train.steps=20")
        run(folder, 2, name, f'zero.offload="{then}"')
        assert losses(folder, f"mixed-{number}") == expected


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MB."""
    place = tmp_path / "small"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(place)], capture_output=True
    )
    if mounted.returncode:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.decode().strip()}")
    yield place
    subprocess.run(["umount", str(place)], check=True)


@pytest.mark.parametrize("place", ["$HPCZERO_NOWHERE/states", "spec.toml/states", "spec.toml"])
@pytest.mark.few(1)
def test_a_folder_that_cannot_be_is_wrong_input(folder: Path, place: str) -> None:
    """Before anything is built: a variable that is not set is no folder of that name."""
    done = launch(command(1, f'zero.offload="nvme:{place}"'), 60, folder)
    assert (done.code, done.left) == (2, []), done
    why = "$HPCZERO_NOWHERE is not set" if place.startswith("$") else "spec.toml is no folder"
    assert f'zero.offload = "nvme:{place}": ' in done.err
    assert why in done.err
    assert done.err.count("hpczero: ") == 1
    assert os.listdir(folder) == ["spec.toml"]


@pytest.mark.slow
def test_memory_in_place_of_storage_is_said(folder: Path, small: Path) -> None:
    """By `check` where it runs, and by the run, which goes on."""
    there = f'zero.offload="nvme:{small}/states"'
    less = "model.vocab=100", "model.hidden=32", "train.steps=2"
    done = launch(command(1, there, *less), 60, folder)
    assert (done.code, done.left) == (0, []), done
    assert done.err.count(f"hpczero: WARN zero.offload: {small}/states is in memory on ") == 1
    checked = launch(hpczero("check", "spec.toml", "--set", there), 60, folder)
    assert f"note: zero.offload: {small}/states is in memory here (tmpfs)" in checked.out


@pytest.mark.slow
def test_a_folder_without_room_is_refused(folder: Path, small: Path) -> None:
    """Two ranks of 0.4 M parameters: 4.5 MB of states in files."""
    done = launch(command(2, f'zero.offload="nvme:{small}"'), 60, folder)
    assert (done.code, done.left) == (2, []), done
    assert "zero.offload needs 4." in done.err
    assert f"in {small} of " in done.err
    assert "(2 ranks), where 2.1 MB are available: name a folder with more room" in done.err
    assert not (folder / "runs").exists()
