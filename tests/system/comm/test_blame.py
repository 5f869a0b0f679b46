"""A hang and a living job, as `hpczero blame` tells of them from the run directory alone."""

import json
import os
import re
import signal
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.launch import hpczero, launch, mpirun, started
from tests.support.runs import lines_of, steps_done, wait_for

pytest.importorskip("torch", reason="training needs torch")
pytest.importorskip("mpi4py", reason="training needs mpi4py")

# The quiet time is half of comm.timeout_s; it is far from over when the test kills all.
LOOP = """
import sys, time
import torch
from torch import nn
import hpczero

net = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
spec = {"name": "loop", "output": "runs", "train": {"steps": 100_000}, "comm": {"timeout_s": 16}}
with hpczero.initialize(net, spec) as engine:
    generator = torch.Generator().manual_seed(engine.rank)
    for step in range(100_000):
        x = torch.randn(16, 8, generator=generator).to(engine.dtype)
        loss = (engine(x) - x.sum(1, keepdim=True)).float().square().mean()
        engine.backward(loss / engine.size)
        if step == 3:
            engine.save()
        if step == 5 and engine.rank == 1 and sys.argv[1] == "skip":
            time.sleep(1000)
        if step > 5:
            time.sleep(0.05)
        engine.step()
"""
HANGING = """
name = "hanging"
model = { family = "tests.support.hanging:build", hidden = 32, seq_len = 16 }
data = { source = "synthetic" }
checkpoint = { every = -1 }
[train]
precision = "fp32"
steps = 1_000_000
global_batch = 6
micro_batch = 2
eval_batches = 0
"""
ALONE = """
import time
from hpczero.comm.world import World
with World.start() as world:
    world.watch(600)
    print("ready", flush=True)
    time.sleep(3)
    print("done", flush=True)
"""


def blamed(folder: Path, name: str = "loop") -> tuple[str, dict[str, Any]]:
    """Return what the verb says of the run, in words and as data."""
    words, data = (
        launch(hpczero("blame", f"runs/{name}", *more), 60, folder) for more in ([], ["--json"])
    )
    assert (words.code, words.err, data.code) == (0, "", 0), (words, data)
    return words.out, json.loads(data.out)


@pytest.mark.slow
def test_a_rank_that_skips_a_collective_is_named_after_the_job_was_killed(tmp_path: Path) -> None:
    (tmp_path / "loop.py").write_text(LOOP)
    written = tmp_path / "runs" / "loop" / "watch" / "node-0000.json"
    with started([*mpirun(3), sys.executable, "loop.py", "skip"], tmp_path) as job:
        wait_for(written.exists, job, 200)
    # all of its processes were killed by SIGKILL: none could say anything more
    said, data = blamed(tmp_path)
    assert data["stuck"]["ranks"] == [1]
    assert data["slow"] == []
    place = r"\w+.* \(number \d+ along \w+\)"
    begin = r"Rank 1 on \S+ is behind in step 6: it has been in no operation for \d+ s\. "
    begin += "For it ranks 0, 2 "
    assert re.match(begin + rf"waited for \d+ s in {place}\. ", said), said
    assert "(nothing new for 8 s on" in said
    assert "stacks of rank 1:" in said
    assert "loop.py" in said
    assert not list(written.parent.glob("*.txt")), "the watchdog's own time was not up"


@pytest.mark.slow
def test_a_rank_that_is_stuck_is_named_though_the_job_is_killed_soon(tmp_path: Path) -> None:
    """A scheduler sends SIGTERM when the hang has just begun, and SIGKILL some seconds later."""
    (tmp_path / "spec.toml").write_text(HANGING)
    run = tmp_path / "runs" / "hanging"
    with started([*mpirun(3), *hpczero("run", "spec.toml")], tmp_path) as job:
        wait_for(lambda: steps_done(tmp_path, "hanging") > 5, job, 400)
        (tmp_path / "hang").touch()
        steps = 0
        while steps != (steps := steps_done(tmp_path, "hanging")):
            time.sleep(1)
        assert job.poll() is None
        for one in lines_of(run / "events.jsonl")[0]["ranks"]:
            os.kill(one["pid"], signal.SIGTERM)
        wait_for((run / "watch" / "node-0000.json").exists, job, 60)
    said, data = blamed(tmp_path, "hanging")
    assert data["stuck"]["ranks"] == [1]
    assert re.search(r"For it ranks 0, 2 waited for \d+ s in \w+.* \(number \d+ along \w+\)", said)
    assert "(nothing new for 5 s on" in said
    assert "hanging.py" in said


def test_a_living_job_records_all_its_ranks_when_one_is_asked(tmp_path: Path) -> None:
    (tmp_path / "loop.py").write_text(LOOP)
    run = tmp_path / "runs" / "loop"
    written = run / "watch" / "node-0000.json"
    with started([*mpirun(2), sys.executable, "loop.py", "go on"], tmp_path) as job:
        metrics = run / "metrics.jsonl"
        wait_for(lambda: metrics.exists() and metrics.stat().st_size > 0, job, 200)
        os.kill(max(_processes_of_ranks(job.pid)), signal.SIGUSR1)
        wait_for(written.exists, job, 30)
        steps = metrics.read_text().count("\n")
        wait_for(lambda: metrics.read_text().count("\n") > steps + 5, job, 30)
        said, data = blamed(tmp_path)
    file = json.loads(written.read_text())
    assert set(file["states"]) == {"0", "1"}
    assert {rank for rank, text in file["stacks"].items() if "loop.py" in text} == {"0", "1"}
    assert re.fullmatch(r"rank \d was asked \(SIGUSR1\)", file["reason"])
    assert file["reason"] in said
    assert file["reason"] in data["stuck"]["words"]


def _processes_of_ranks(launcher: int) -> list[int]:
    below = psutil.Process(launcher).children(recursive=True)
    return [one.pid for one in below if one.cmdline()[1:2] == ["loop.py"]]


@pytest.mark.slow
def test_a_rank_alone_prints_its_stacks_when_it_is_asked(tmp_path: Path) -> None:
    (tmp_path / "alone.py").write_text(ALONE)
    with started([sys.executable, "alone.py"], tmp_path) as job:
        assert job.stdout
        assert job.stdout.readline() == b"ready\n"
        job.send_signal(signal.SIGUSR1)
        out, err = job.communicate(timeout=60)
    assert (job.returncode, out) == (0, b"done\n")
    assert b"alone.py" in err
