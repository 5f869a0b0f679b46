"""A batch job that finds its run's folder held, as by ranks on a node that was cut off."""

import time
from pathlib import Path

import pytest

from hpczero.lock import RunLock
from tests.support.launch import hpczero, launch, mpirun

SPEC = """
name = "run"
output = "runs"
data.source = "synthetic"
model = { layers = 1, hidden = 16, heads = 2, seq_len = 16 }
train = { steps = 2, global_batch = 2, device = "cpu", precision = "fp32" }
"""


@pytest.mark.parametrize("job", [{"PBS_JOBID": "17.headnode"}, {}])
@pytest.mark.few(1)
def test_the_job_waits_and_then_has_failed_alone(tmp_path: Path, job: dict[str, str]) -> None:
    """Exit code 2 would tell the chain that the input is wrong; it is right where nobody waits."""
    (tmp_path / "spec.toml").write_text(SPEC)
    (tmp_path / "runs" / "run").mkdir(parents=True)
    deadline = {"HPCZERO_DEADLINE": str(int(time.time()) + 31)} if job else {}
    with RunLock(tmp_path / "runs" / "run"):
        command = [*mpirun(2), *hpczero("run", "spec.toml")]
        ended = launch(command, seconds=300, folder=tmp_path, environment=job | deadline)
    assert ended.code == (1 if job else 2), ended.err
    assert f"the run directory {tmp_path}/runs/run is in use by process" in ended.err
    assert ("this job waited" in ended.err) == bool(job)
    assert ended.left == []
