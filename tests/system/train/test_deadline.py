"""A run in a job that is about to end."""

import json
import time
from pathlib import Path

import pytest

from tests.support.launch import hpczero, launch, mpirun

SPEC = """
name = "short-of-time"
data.source = "synthetic"
model = { layers = 1, hidden = 16, heads = 2, seq_len = 16 }
[train]
steps = 1000000
global_batch = 4
micro_batch = 2
device = "cpu"
precision = "fp32"
log_every = 100000
"""


@pytest.mark.parametrize(
    "name", [pytest.param("HPCZERO_DEADLINE", marks=pytest.mark.slow), "SLURM_JOB_END_TIME"]
)
@pytest.mark.slow
def test_it_stops_in_time_with_a_checkpoint(name: str, tmp_path: Path) -> None:
    (tmp_path / "spec.toml").write_text(SPEC)
    ended = launch(
        [*mpirun(2), *hpczero("run", "spec.toml")],
        240,
        tmp_path,
        {name: str(int(time.time()) + 30)},
    )
    assert (ended.code, ended.left) == (75, []), ended.err
    assert "stopped by the end of the job's time after step " in ended.out
    run = tmp_path / "runs" / "short-of-time"
    summary = json.loads((run / "summary.json").read_text())
    assert summary["state"] == "stopped"
    assert (run / "checkpoints" / f"step-{summary['steps']:08d}" / "MANIFEST.json").exists()


@pytest.mark.slow
def test_a_job_that_is_too_short_for_anything_still_makes_a_step(tmp_path: Path) -> None:
    """Or a chain of such jobs would never end."""
    (tmp_path / "spec.toml").write_text(SPEC)
    ended = launch(
        [*mpirun(2), *hpczero("run", "spec.toml")], 240, tmp_path, {"HPCZERO_DEADLINE": "1"}
    )
    assert (ended.code, ended.left) == (75, []), ended.err
    assert "after step 1 of" in ended.out
