"""The energy of a real run, whose counters a thread advances at known power."""

import json
import subprocess
from pathlib import Path

import pytest

from hpczero.runs import energy
from tests.support.launch import hpczero, launch, started
from tests.support.powercap import Powercap
from tests.support.runs import lines_of, wait_for
from tests.support.tiny_run import SPEC, command

pytest.importorskip("torch", reason="training needs torch")
pytest.importorskip("mpi4py", reason="training needs mpi4py")


@pytest.mark.slow
def test_joules_are_those_of_the_counters_also_of_a_job_that_was_killed(tmp_path: Path) -> None:
    """Two packages, one of which wraps every 4 s: in a killed job, and in one that is stopped.

    Counters stand still until the job reads them, and before it is ended: so the truth is known.
    """
    (tmp_path / "spec.toml").write_text(SPEC)
    run = tmp_path / "runs" / "tiny"
    powercap = Powercap(tmp_path / "powercap")
    powercap.zone("intel-rapl:0", "package-0", watts=100.0, most=400_000_000)
    powercap.zone("intel-rapl:1", "package-1", watts=60.0)
    here = {"HPCZERO_POWERCAP": str(powercap.root)}
    endless = command(2, "--set", "train.steps=1000000", "--set", "checkpoint.every=20")

    def lines() -> int:
        return len(lines_of(run / energy.FILE)) if (run / energy.FILE).exists() else 0

    for jobs in (1, 2):
        with started(endless, tmp_path, here, subprocess.DEVNULL) as job:
            many = lines()
            wait_for(lambda many=many: lines() > many, job, 180)  # the kernels are compiled first
            until = powercap.joules("intel-rapl:0") + 500
            with powercap.running():
                wait_for(lambda until=until: powercap.joules("intel-rapl:0") > until, job)
            many = lines()
            wait_for(lambda many=many: lines() > many, job)
            if jobs == 2:
                (run / "stop").touch()
                assert job.wait(60) == 75
        truth = powercap.joules("intel-rapl:0", "intel-rapl:1")
        assert energy.read(run).joules == pytest.approx(truth, rel=0.01)
    summary = json.loads((run / "summary.json").read_text())
    found = energy.read(run, summary["tokens"])
    assert summary["energy"] == found.as_data()
    assert (found.missing, found.gpus) == ("", 0)
    shown = launch(hpczero("status", str(run)), 60)
    assert f"energy      {found.words}" in shown.out, shown
