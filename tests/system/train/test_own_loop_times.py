"""The time of a loop of one's own that was killed and resumed: booked as that of `hpczero run`."""

import json
import time
from pathlib import Path

import pytest

from hpczero.runs import energy, rank_times
from hpczero.runs.goodput import goodput_in
from hpczero.runs.record import read_run
from hpczero.runs.stragglers import stragglers
from tests.support.launch import hpczero, launch, mpirun, started
from tests.support.runs import lines_of, steps_done, wait_for

pytest.importorskip("torch", reason="training needs torch")
pytest.importorskip("mpi4py", reason="training needs mpi4py")

PROGRAM = """
import sys, time
import torch
import hpczero

torch.manual_seed(0)
module = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
spec = {
    "name": "loop",
    "train": {"precision": "fp32", "log_every": 2},
    "checkpoint": {"every": 10, "asynchronous": False},
}
with hpczero.initialize(module, spec) as engine:
    engine.resume()
    while engine.steps < int(sys.argv[1]):
        time.sleep(0.05 + 0.1 * engine.rank)
        engine.backward(engine(torch.randn(4, 8)).square().mean() / engine.size)
        engine.step()
        if engine.is_due():
            engine.save()
"""


@pytest.mark.slow
def test_every_second_of_a_loop_that_was_killed_is_booked(tmp_path: Path) -> None:
    (tmp_path / "loop.py").write_text(PROGRAM)
    run = tmp_path / "runs" / "loop"
    program = [*mpirun(2), *hpczero()[:1], "loop.py"]
    begun = time.monotonic()
    with started([*program, "100000"], tmp_path) as job:
        wait_for(lambda: steps_done(tmp_path, "loop") >= 35, job)
    wall = time.monotonic() - begun
    done = launch([*program, str(steps_done(tmp_path, "loop") + 30)], 120, tmp_path)
    assert (done.code, done.left) == (0, []), done
    wall += done.seconds
    booked = goodput_in(run)
    assert booked
    assert 0.8 * 2 * wall < booked.allocated < 2 * wall
    for kind in ("computing", "communication", "saving", "start", "restart", "lost", "ending"):
        assert booked.of_kind[kind] > 0, booked
    asleep = sum(line["step_seconds"] for line in lines_of(run / "metrics.jsonl"))
    assert booked.of_kind["computing"] > 0.5 * asleep
    resumed = [one for one in lines_of(run / "events.jsonl") if one["event"] == "resume"]
    assert [(one["step"] % 10, one["lost_steps"] > 0) for one in resumed] == [(0, True)]
    times = rank_times.read(run)
    assert [job.ranks for job in times] == [2, 2]
    waits = sum(job.of_field["wait"].sum(axis=0) for job in times)
    assert waits[0] > waits[1], "rank 1 sleeps longer, and rank 0 waits for it"
    summary = json.loads((run / "summary.json").read_text())
    assert summary["goodput"]["lost"] == pytest.approx(booked.of_kind["lost"])
    assert summary["energy"] == energy.read(run).as_data()
    (slow,) = stragglers(read_run(run), rank_times.read(run))
    assert (slow.rank, slow.cause) == (1, "stopped")
