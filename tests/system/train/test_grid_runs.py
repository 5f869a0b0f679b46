"""`hpczero run` on 2 stages x 2 tensor ranks x 2 data ranks: what a user sees when it goes well,
and when it does not.
"""

import gzip
import json
import os
import random
import signal
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.launch import Finished, after_load, hpczero, launch, mpirun, started
from tests.support.runs import lines_of, our_segments, steps_done, wait_for

pytest.importorskip("torch", reason="training needs torch")
pytest.importorskip("mpi4py", reason="training needs mpi4py")

SPEC = """
name = "tiny"
[model]
layers = 3
hidden = 24
heads = 3
seq_len = 17
dropout = 0.1
[data]
source = "synthetic"
[train]
steps = 6
global_batch = 7
micro_batch = 2
precision = "fp32"
eval_batches = 2
log_every = 1
[optimizer]
eps = 1e-6
[parallel]
tensor = 2
pipeline = 2
"""
ALONE = ("--set", "parallel.tensor=1", "--set", "parallel.pipeline=1")
ENDLESS = ("--set", "train.steps=100000", "--set", "train.log_every=1000")
RANKS = 8


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "spec.toml").write_text(SPEC)
    return tmp_path


def command(*arguments: str, ranks: int = RANKS) -> list[str]:
    return [*(mpirun(ranks) if ranks else []), *hpczero("run", "spec.toml", *arguments)]


def run(folder: Path, *arguments: str, ranks: int = RANKS) -> Finished:
    done = launch(command(*arguments, ranks=ranks), 180, folder)
    assert done.left == []
    return done


def summary_of(folder: Path, name: str) -> dict[str, Any]:
    return json.loads((folder / "runs" / name / "summary.json").read_text())


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_a_traced_run_has_the_losses_of_one_rank(folder: Path, stage: int) -> None:
    assert run(folder, *ALONE, "--set", "name=alone", ranks=0).code == 0
    done = run(
        folder,
        "--set",
        "train.trace=true",
        "--set",
        f"zero.stage={stage}",
        "--set",
        "parallel.sequence_parallel=true",
    )
    assert done.code == 0, done
    assert "WARN" not in done.out
    assert "norm on cpu in float32" in summary_of(folder, "tiny")["kernels"]
    alone, grid = (lines_of(folder / "runs" / name / "metrics.jsonl") for name in ("alone", "tiny"))
    for key, tolerance in (("loss", 1e-5), ("grad_norm", 1e-4)):
        assert [line[key] for line in grid] == pytest.approx(
            [line[key] for line in alone], rel=tolerance
        )
    assert summary_of(folder, "tiny")["validation_loss"] == pytest.approx(
        summary_of(folder, "alone")["validation_loss"], rel=1e-5
    )
    trace = json.loads(gzip.decompress((folder / "runs" / "tiny" / "trace.json.gz").read_bytes()))
    for rank in range(RANKS):
        events = [
            event for event in trace["traceEvents"] if event["ph"] == "X" and event["pid"] == rank
        ]
        names = {event["name"] for event in events if event["cat"] == "span"}
        assert {"step 6", "forward", "backward", "optimizer step", "loss agreement"} <= names
        assert {event["args"]["axis"] for event in events if event["cat"] == "operation"} >= {
            "tensor",
            "data",
            "pipeline",
            "world",
        }
    seconds = summary_of(folder, "tiny")["trace"]["mean_step"]["seconds"]
    assert {"forward", "backward", "wait tensor", "wait pipeline"} <= set(seconds)


@pytest.mark.slow
def test_any_rank_that_is_killed_ends_the_job(folder: Path) -> None:
    segments, victim = our_segments(), random.randrange(RANKS)
    with started(command(*ENDLESS), folder) as process:
        wait_for(lambda: steps_done(folder) > 2, process, 120)
        places = lines_of(folder / "runs" / "tiny" / "events.jsonl")[0]["ranks"]
        os.kill(places[victim]["pid"], signal.SIGKILL)
        output, errors = process.communicate(timeout=20)
    assert process.returncode != 0
    assert "signal 9" in (output + errors).decode(), f"killed {victim}"
    assert not [place["pid"] for place in places if psutil.pid_exists(place["pid"])]
    assert our_segments() <= segments


@pytest.mark.slow
def test_a_request_to_stop_that_one_rank_gets_stops_all_after_the_same_step(folder: Path) -> None:
    """With a checkpoint, from where the run goes on, on fewer ranks."""
    with started(command(*ENDLESS), folder) as process:
        wait_for(lambda: steps_done(folder) > 2, process, 120)
        os.kill(
            lines_of(folder / "runs" / "tiny" / "events.jsonl")[0]["ranks"][5]["pid"],
            signal.SIGTERM,
        )
        output, errors = process.communicate(timeout=30)
    assert process.returncode == 75, (output, errors)
    assert "stopped by SIGTERM after step" in output.decode()
    done = steps_done(folder)
    assert summary_of(folder, "tiny")["steps"] == done
    again = run(folder, "--set", f"train.steps={done + 2}", "--set", "parallel.tensor=1", ranks=2)
    assert again.code == 0, again
    assert f"resume step={done} " in again.out
    assert [line["step"] for line in lines_of(folder / "runs" / "tiny" / "metrics.jsonl")] == list(
        range(1, done + 3)
    )


SLOW = """
import sys, time
from hpczero.parallel.step import PipelineStage
from hpczero.cli import main
forward = PipelineStage.forward
def slow(self, chunk, x, batch):
    if self.pipeline.group.rank == 1:
        time.sleep(4)
    return forward(self, chunk, x, batch)
PipelineStage.forward = slow
sys.exit(main())
"""


@pytest.mark.slow
def test_a_stage_that_is_slower_than_the_others_is_waited_for(folder: Path) -> None:
    """A step takes longer than comm.timeout_s, no single wait does."""
    (folder / "slow.py").write_text(SLOW)
    settings = [
        "--set",
        "comm.timeout_s=20",
        "--set",
        "train.global_batch=12",
        "--set",
        "train.micro_batch=1",
        "--set",
        "train.steps=2",
    ]
    done = launch(
        [*mpirun(RANKS), sys.executable, "slow.py", "run", "spec.toml", *settings], 180, folder
    )
    assert (done.code, done.err, done.left) == (0, "", [])
    assert all(
        line["step_seconds"] > 20 for line in lines_of(folder / "runs" / "tiny" / "metrics.jsonl")
    )


@pytest.mark.slow
def test_a_grid_that_does_not_fit_is_one_message(folder: Path) -> None:
    """Other misfits: tests/system/spec/test_check.py."""
    done = run(folder, "--set", "parallel.pipeline=3")
    assert (done.code, after_load(done.out), done.err.count("hpczero: ")) == (2, "", 1), done
    for text in (
        "tensor(2) x pipeline(3) = 6 does not divide the 8 ranks",
        "mpirun -n 12 or 6",
        "parallel.pipeline = 2 or 4",
    ):
        assert text in done.err
    assert not (folder / "runs").exists()
