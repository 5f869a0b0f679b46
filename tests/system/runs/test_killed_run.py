"""A run that is killed before its first checkpoint, and once behind one: where its time went."""

import json
import subprocess
import time
from pathlib import Path

import pytest

from hpczero.runs import rank_times
from hpczero.runs.columns import seconds_of
from hpczero.runs.goodput import goodput, goodput_in
from hpczero.runs.record import read_run
from tests.support.launch import started
from tests.support.runs import lines_of, steps_done, wait_for
from tests.support.tiny_run import SPEC, command, train

pytest.importorskip("torch", reason="training needs torch")
pytest.importorskip("mpi4py", reason="training needs mpi4py")

ENDLESS = "--set", "train.steps=100000", "--set", "train.eval_every=2"


@pytest.mark.slow
def test_the_time_of_a_killed_run_is_booked(tmp_path: Path) -> None:
    (tmp_path / "spec.toml").write_text(SPEC)
    run = tmp_path / "runs" / "tiny"
    saves = "--set", "checkpoint.every=4"
    with started(command(2, *ENDLESS, "--set", "checkpoint.every=0"), tmp_path) as job:
        wait_for(lambda: steps_done(tmp_path) >= 3, job)
    first = steps_done(tmp_path)
    with started(command(2, *ENDLESS, *saves), tmp_path) as job:
        wait_for(lambda: (run / "checkpoints/step-00000004/MANIFEST.json").exists(), job)
        wait_for(lambda: steps_done(tmp_path) >= 6, job)
    last = steps_done(tmp_path)
    done = train(tmp_path, 1, *saves, "--set", f"train.steps={last + 3}")
    assert done.code == 0, done
    lost = [one for one in lines_of(run / "events.jsonl") if one["event"] == "resume"]
    assert (lost[0]["step"], lost[0]["path"], lost[0]["lost_steps"]) == (0, "", first)
    assert lost[1]["step"] >= 4
    found = read_run(run)
    assert found.problems == ()
    assert [len(job.ranks) for job in found.jobs] == [2, 2, 1]
    booked = goodput(found, rank_times.read(run))
    whole = sum(len(job.ranks) * (job.ended - seconds_of(job.start["began"])) for job in found.jobs)
    assert booked.allocated == pytest.approx(whole)
    for kind in ("computing", "communication", "evaluation", "saving", "start", "restart", "lost"):
        assert booked.of_kind[kind] > 0, booked
    assert booked.of_kind["idle"] < 0.25 * whole, booked


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_parts_add_up_to_the_time_from_the_launchers_start_to_its_end(tmp_path: Path) -> None:
    """Killed with its launcher in the middle, resumed, ended: within 1 % of what a clock outside
    of it saw, though nobody knows how long a rank lived after its last line.
    """
    (tmp_path / "spec.toml").write_text(SPEC)
    run = tmp_path / "runs" / "tiny"
    options = "--set", "checkpoint.every=25", "--set", "train.precision='fp32'"
    endless = command(4, *options, "--set", "train.steps=100000")
    begun = time.monotonic()
    with started(endless, tmp_path, stdout=subprocess.DEVNULL) as job:  # it prints for minutes
        wait_for(lambda: time.monotonic() - begun > 180 and steps_done(tmp_path) > 60, job, 300)
    killed = time.monotonic() - begun
    last = steps_done(tmp_path)
    done = train(tmp_path, 4, *options, "--set", f"train.steps={last + last // 4}")
    assert done.code == 0, done
    booked = goodput_in(run)
    assert booked
    wall = 4 * (killed + done.seconds)
    assert booked.allocated == pytest.approx(wall, rel=0.01), booked
    for kind in ("computing", "communication", "saving", "start", "restart", "ending"):
        assert booked.of_kind[kind] > 0, booked
    assert booked.queued is None
    summary = json.loads((run / "summary.json").read_text())["goodput"]
    assert summary["allocated"] <= booked.allocated
    assert summary["restart"] == pytest.approx(booked.of_kind["restart"])
