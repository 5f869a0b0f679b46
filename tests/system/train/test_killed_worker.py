"""A worker that is killed ends the job; the next one goes on from the newest checkpoint as if
nothing had happened, also where workers have weights and errors of their own.
"""

import json
import os
import signal
from pathlib import Path

import psutil
import pytest

from tests.support.launch import Finished, hpczero, launch, mpirun, started
from tests.support.runs import lines_of, our_segments, steps_done, wait_for

pytest.importorskip("torch", reason="training needs torch")
pytest.importorskip("mpi4py", reason="training needs mpi4py")

SPEC = """
name = "tiny"
[model]
layers = 2
hidden = 24
heads = 3
seq_len = 17
[data]
source = "synthetic"
[train]
steps = 100000
global_batch = 8
micro_batch = 2
precision = "bf16"
eval_batches = 2
log_every = 1000
[schedule]
name = "constant"
[zero]
shard_ranks = "node"
[checkpoint]
every = 6
keep = 2
[comm]
ranks_per_node = 2
"""
SIGNS = """
[optimizer]
name = "one_bit_adam"
freeze = 4
"""
LOCAL_STEPS = """
[optimizer.outer]
every = 3
begin = 2
fragments = 2
precision = "int4"
"""
RANKS = 4


def run(folder: Path, *settings: str) -> Finished:
    words = [word for setting in settings for word in ("--set", setting)]
    done = launch([*mpirun(RANKS), *hpczero("run", "spec.toml", *words)], 180, folder)
    assert done.left == []
    assert done.code == 0, done
    return done


def saved(folder: Path) -> list[int]:
    found = (folder / "runs" / "tiny" / "checkpoints").glob("step-*/MANIFEST.json")
    return sorted(int(path.parent.name.removeprefix("step-")) for path in found)


@pytest.mark.slow
@pytest.mark.parametrize("method", [SIGNS, LOCAL_STEPS], ids=["signs", "local steps"])
def test_a_killed_worker_is_not_seen_in_what_follows(tmp_path: Path, method: str) -> None:
    """To the bit."""
    (tmp_path / "spec.toml").write_text(SPEC + method)
    segments = our_segments()
    with started([*mpirun(RANKS), *hpczero("run", "spec.toml")], tmp_path) as process:
        wait_for(lambda: bool(saved(tmp_path)) and steps_done(tmp_path) > 8, process, 120)
        places = lines_of(tmp_path / "runs" / "tiny" / "events.jsonl")[0]["ranks"]
        os.kill(places[2]["pid"], signal.SIGKILL)
        output, errors = process.communicate(timeout=30)
    assert process.returncode != 0
    assert "signal 9" in (output + errors).decode()
    assert not [place["pid"] for place in places if psutil.pid_exists(place["pid"])]
    assert our_segments() <= segments
    step = saved(tmp_path)[-1]
    end = f"train.steps={step + 8}"
    assert f"resume step={step} " in run(tmp_path, end).out
    run(tmp_path, end, "name=whole", "checkpoint.every=0")
    tiny, whole = (
        {line["step"]: line["loss"] for line in lines_of(folder / "metrics.jsonl")}
        for folder in (tmp_path / "runs" / "tiny", tmp_path / "runs" / "whole")
    )
    assert tiny == whole
    assert list(whole) == list(range(1, step + 9))
    summaries = [
        json.loads((tmp_path / "runs" / name / "summary.json").read_text())
        for name in ("tiny", "whole")
    ]
    assert summaries[0]["validation_loss"] == summaries[1]["validation_loss"]
