"""`train.trace = true` as a user sets it: the file, what is said about it, and what is left when
a run fails.
"""

import gzip
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.launch import Finished, hpczero, launch, mpirun

pytest.importorskip("torch", reason="training needs torch")
pytest.importorskip("mpi4py", reason="training needs mpi4py")

SPEC = """
name = "tiny"
[model]
layers = 2
hidden = 32
heads = 4
seq_len = 16
[data]
source = "synthetic"
[train]
steps = 25
global_batch = 5
micro_batch = 2
eval_batches = 1
log_every = 100
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "spec.toml").write_text(SPEC)
    return tmp_path


def run(folder: Path, ranks: int, *settings: str) -> Finished:
    """`ranks` = 0: without mpirun."""
    options = [part for setting in settings for part in ("--set", setting)]
    done = launch(
        [*(mpirun(ranks) if ranks else []), *hpczero("run", "spec.toml", *options)], 120, folder
    )
    assert (done.code, done.left) == (0, []), done
    return done


def losses(folder: Path, name: str) -> list[float]:
    return [
        json.loads(line)["loss"]
        for line in (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()
    ]


def read(path: Path) -> dict[str, Any]:
    return json.loads(gzip.decompress(path.read_bytes()))


def spans_of(trace: dict[str, Any], rank: int) -> list[str]:
    return [
        event["name"]
        for event in trace["traceEvents"]
        if event["ph"] == "X" and event["cat"] == "span" and event["pid"] == rank
    ]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [0, 2])
def test_a_traced_run(folder: Path, ranks: int) -> None:
    run(folder, ranks, "name=plain")
    done = run(folder, ranks, "name=traced", "train.trace=true")
    assert losses(folder, "traced") == losses(folder, "plain")
    assert not (folder / "runs" / "plain" / "trace.json.gz").exists()
    path = folder / "runs" / "traced" / "trace.json.gz"
    trace = read(path)
    for rank in range(max(1, ranks)):
        spans = spans_of(trace, rank)
        assert [name for name in spans if name.startswith("step ")] == [
            f"step {number}" for number in range(6, 26)
        ]
        assert {
            "data",
            "forward",
            "backward",
            "optimizer step",
            "loss agreement",
            "evaluation",
        } <= set(spans)
    assert {event["pid"] for event in trace["traceEvents"]} == set(range(max(1, ranks)))
    summary = json.loads((folder / "runs" / "traced" / "summary.json").read_text())["trace"]
    assert (summary["steps"], summary["steps_left_out"], trace["otherData"]["steps_left_out"]) == (
        "6-25",
        "1-5",
        "1-5",
    )
    assert 0 < summary["mean_step"]["seconds"]["forward"] < 10
    (said,) = [line for line in done.out.splitlines() if " trace " in line]
    assert f"file={path}" in said
    assert "steps=6-25" in said
    assert "steps_left_out=1-5" in said


@pytest.mark.slow
def test_the_folder_of_a_finished_run_keeps_its_trace_until_there_is_another(folder: Path) -> None:
    run(folder, 0, "train.trace=true", "train.steps=2")
    path = folder / "runs" / "tiny" / "trace.json.gz"
    run(folder, 0, "train.steps=3")
    assert read(path)["otherData"]["steps"] == "1-2"
    run(folder, 0, "train.trace=true", "train.steps=5")
    assert read(path)["otherData"]["steps"] == "4-5"


GOES_WRONG = """
import sys, time
from hpczero.train.trainer import Trainer
from hpczero.cli import main
agree = Trainer._agree
seen = []
def broken(self, *rest):
    seen.append(1)
    if len(seen) == 4 and self.world.rank == 1:
        {what}
    return agree(self, *rest)
Trainer._agree = broken
sys.exit(main())
"""


def fail(folder: Path, what: str) -> Path:
    """The run's folder after rank 1 of two has come to the end of step 4, and there done that."""
    (folder / "broken.py").write_text(GOES_WRONG.format(what=what))
    command = [
        sys.executable,
        "broken.py",
        "run",
        "spec.toml",
        "--set",
        "train.trace=true",
        "--set",
        "comm.timeout_s=3",
    ]
    done = launch([*mpirun(2), *command], 60, folder)
    assert (done.code not in (0, None), done.left) == (True, []), done
    return folder / "runs" / "tiny"


@pytest.mark.slow
def test_a_rank_that_fails_leaves_its_own_trace(folder: Path) -> None:
    directory = fail(folder, "raise ValueError('the disk of this node is on fire')")
    trace = read(directory / "trace-rank-1.json.gz")
    assert [name for name in spans_of(trace, 1) if name.startswith("step ")] == [
        "step 1",
        "step 2",
        "step 3",
        "step 4",
    ]
    assert spans_of(trace, 1).count("loss agreement") == 4
    assert (trace["otherData"]["rank"], trace["otherData"]["steps"]) == (1, "1-4")
    assert not (directory / "trace.json.gz").exists()
    run(folder, 2, "train.trace=true")
    assert [path.name for path in directory.glob("trace*")] == ["trace.json.gz"]


@pytest.mark.slow
def test_a_rank_that_waits_in_vain_leaves_its_own_trace(folder: Path) -> None:
    directory = fail(folder, "time.sleep(1000)")
    trace = read(directory / "trace-rank-0.json.gz")
    unfinished = [
        (event["cat"], event["name"])
        for event in trace["traceEvents"]
        if event["ph"] == "X" and "unfinished" in event["args"]
    ]
    assert set(unfinished) == {
        ("span", "step 4"),
        ("span", "loss agreement"),
        ("wait", "wait all_reduce"),
        ("operation", "all_reduce"),
    }
