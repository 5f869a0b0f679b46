"""`hpczero run` as a user starts it: what it leaves, how it ends, and how it goes on."""

import json
import os
import re
import signal
import sys
from pathlib import Path
from statistics import median

import psutil
import pytest

from hpczero import machine
from tests.support.launch import launch, mpirun, started
from tests.support.runs import lines_of, our_segments, steps_done, wait_for
from tests.support.tiny_run import command, train

pytest.importorskip("torch", reason="training needs torch")
pytest.importorskip("mpi4py", reason="training needs mpi4py")


ENDLESS = ["--set", "train.steps=100000", "--set", "train.log_every=1000"]


OF_A_STEP = {"loss", "grad_norm", "lr", "tokens", "tokens_per_second", "step_seconds"} | {
    "data_seconds",
    "comm_seconds",
    "compute_seconds",
}


@pytest.mark.parametrize("ranks", [2, 0, 3])
@pytest.mark.few(1)
def test_a_run_leaves_a_complete_directory(folder: Path, ranks: int) -> None:
    fp32 = ["--set", "train.precision=fp32"]  # many processors have a hint for bf16
    done = train(folder, ranks, "--set", "batch.cluster=epyc-7763", *fp32)
    assert done.code == 0, done
    directory = folder / "runs" / "tiny"
    assert {path.name for path in directory.iterdir()} == {
        "spec.toml",
        "metrics.jsonl",
        "memory.jsonl",
        "rank_times",
        "energy.jsonl",
        "events.jsonl",
        "summary.json",
        "checkpoints",
    }
    assert [path.name for path in (directory / "checkpoints").iterdir()] == ["step-00000005"]
    metrics = lines_of(directory / "metrics.jsonl")
    assert [line["step"] for line in metrics] == [1, 2, 3, 4, 5]
    assert set(metrics[0]) >= OF_A_STEP
    assert "validation_loss" in metrics[-1]
    events = lines_of(directory / "events.jsonl")
    begin, end = ["start", "layout", "predicted", "first"], ["eval", "save", "stop"]
    assert [event["event"] for event in events] == [*begin, *end]
    assert [place["rank"] for place in events[0]["ranks"]] == list(range(max(1, ranks)))
    summary = json.loads((directory / "summary.json").read_text())
    assert (summary["state"], summary["steps"], summary["final_loss"]) == (
        "finished",
        5,
        metrics[-1]["loss"],
    )
    assert len(summary["memory"]["ranks"]) == len(summary["comm"]) == max(1, ranks)
    held = [rank["held"] for rank in summary["memory"]["ranks"]]
    assert summary["fullest"]["held"] == max(held) > min(held) / 2 > 50_000_000
    assert summary["step"]["seconds"] == median(line["step_seconds"] for line in metrics)
    predicted = summary["step"]["predicted"]
    assert events[2]["cluster"] == predicted["cluster"] == "epyc-7763"
    assert events[2]["step_seconds"] == predicted["step_seconds"] > 0
    assert "\na step:     " in done.out
    words = [
        line.split()[1] for line in done.out.splitlines() if re.match(r"\d{4}-\d\d-\d\dT", line)
    ]
    assert words == ["load", *begin, *["step"] * 5, *end]
    assert "\x1b" not in done.out


@pytest.mark.slow
def test_the_same_losses_on_any_number_of_ranks(folder: Path) -> None:
    losses = []
    for ranks in (0, 2, 4):
        done = train(folder, ranks, "--set", f"name=on{ranks}", "--set", "train.precision=fp32")
        assert done.code == 0, done
        losses.append(
            [line["loss"] for line in lines_of(folder / "runs" / f"on{ranks}" / "metrics.jsonl")]
        )
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert losses[2] == pytest.approx(losses[0], rel=1e-5)


@pytest.mark.slow
def test_each_rank_uses_its_share_of_the_cores(folder: Path) -> None:
    cores = len(os.sched_getaffinity(0))
    if cores < 2:
        pytest.skip("one core cannot be shared out")
    done = train(
        folder,
        cores,
        "--set",
        "model.hidden=128",
        "--set",
        "train.global_batch=16",
        "--set",
        "train.steps=20",
    )
    assert done.code == 0, done
    summary = json.loads((folder / "runs" / "tiny" / "summary.json").read_text())
    assert summary["threads_per_rank"] == 1
    assert all(used < 1.3 for used in summary["cores_used"]), (
        "one thread computes; the background reader takes a moment"
    )


@pytest.mark.slow
def test_a_finished_run_is_not_run_again_unless_asked(finished: Path) -> None:
    again = train(finished, 2)
    assert (again.code, again.err) == (0, "")
    assert "all 5 steps are done" in again.out
    fresh = train(finished, 0, "--fresh")
    assert fresh.code == 0, fresh
    folders = sorted(path.name for path in (finished / "runs").iterdir())
    assert len(folders) == 2
    assert re.fullmatch(r"tiny\.\d{8}T\d{6}", folders[1])
    assert (finished / "runs" / folders[1] / "summary.json").exists()


@pytest.mark.slow
def test_more_steps_go_on_with_a_finished_run(finished: Path) -> None:
    assert train(finished, 0, "--set", "train.steps=7").code == 0
    assert [
        line["step"] for line in lines_of(finished / "runs" / "tiny" / "metrics.jsonl")
    ] == list(range(1, 8))


@pytest.mark.parametrize(
    "how", ["SIGTERM", pytest.param("SIGINT", marks=pytest.mark.slow), "SIGUSR2", "stop file"]
)
@pytest.mark.few(1)
def test_a_request_to_stop_ends_the_run_at_a_step_boundary(folder: Path, how: str) -> None:
    """One rank of two gets the request; both stop after the same step with a checkpoint, and the
    next run goes on from there.
    """
    directory = folder / "runs" / "tiny"
    with started(command(2, *ENDLESS), folder) as process:
        wait_for(lambda: steps_done(folder) > 3, process)
        if how == "stop file":
            (directory / "stop").touch()
        else:
            pid = lines_of(directory / "events.jsonl")[0]["ranks"][1]["pid"]
            os.kill(pid, getattr(signal, how))
        output, errors = process.communicate(timeout=30)
    assert process.returncode == 75, (output, errors)
    assert f"stopped by {how} after step" in output.decode()
    summary = json.loads((directory / "summary.json").read_text())
    done = steps_done(folder)
    assert (summary["state"], summary["reason"], summary["steps"]) == ("stopped", how, done)
    assert not (directory / "lock").exists()
    again = train(folder, 2, "--set", f"train.steps={done + 2}")
    assert again.code == 0, again
    assert [line["step"] for line in lines_of(directory / "metrics.jsonl")] == list(
        range(1, done + 3)
    )
    assert f"resume step={done} " in again.out


@pytest.mark.slow
def test_a_second_writer_is_refused(folder: Path) -> None:
    with started(command(0, *ENDLESS), folder) as process:
        wait_for(lambda: steps_done(folder) > 0, process)
        second = train(folder, 2, *ENDLESS)
        assert second.code == 2, second
        assert f"is in use by process {process.pid} on" in second.err
        before = steps_done(folder)
        wait_for(lambda: steps_done(folder) > before, process)


RAISES = """
import sys
from hpczero.train.trainer import Trainer
from hpczero.cli import main
step = Trainer._step
def broken(self, number, *rest):
    if number == 2 and self.world.rank == {rank}:
        raise ValueError("the disk of this node is on fire")
    return step(self, number, *rest)
Trainer._step = broken
sys.exit(main())
"""


@pytest.mark.parametrize("rank", [2, 1, 0])
@pytest.mark.few(1)
def test_a_rank_that_raises_says_so_and_ends_the_job(folder: Path, rank: int) -> None:
    (folder / "broken.py").write_text(RAISES.format(rank=rank))
    done = launch([*mpirun(3), sys.executable, "broken.py", "run", "spec.toml"], 40, folder)
    assert (done.code not in (0, None), done.left) == (True, [])
    said = [line for line in done.err.splitlines() if line.startswith("hpczero: ")]
    assert len(said) == 1, done.err
    assert re.search(rf"rank {rank} on \S+: ValueError: the disk of this node is on fire", said[0])


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_ends_the_job_and_leaves_nothing_in_the_way(
    folder: Path, victim: int
) -> None:
    segments = our_segments()
    with started(command(2, *ENDLESS), folder) as process:
        wait_for(lambda: steps_done(folder) > 2, process)
        places = lines_of(folder / "runs" / "tiny" / "events.jsonl")[0]["ranks"]
        assert [place["rank"] for place in places] == [0, 1]
        assert len({place["host"] for place in places}) == 1
        os.kill(places[victim]["pid"], signal.SIGKILL)
        process.communicate(timeout=10)
    assert process.returncode != 0
    gone = [place["pid"] for place in places if psutil.pid_exists(place["pid"])]
    assert not gone, f"still there: {gone}"
    assert our_segments() <= segments
    done = train(folder, 2, "--set", "train.steps=4")
    assert done.code == 0, done
    assert [line["step"] for line in lines_of(folder / "runs" / "tiny" / "metrics.jsonl")] == [
        1,
        2,
        3,
        4,
    ]


def test_a_run_removes_what_killed_mpich_jobs_left(folder: Path) -> None:
    if not machine.sees_all_users_of():
        pytest.skip("processes that use /dev/shm cannot all be seen from here")
    stale = Path(f"/dev/shm/mpich_shm_test{os.getpid()}")
    kept = Path(f"/dev/shm/mpich_shm_kept{os.getpid()}")
    stale.write_bytes(b"x" * 4096)
    with kept.open("wb"):
        try:
            done = train(folder, 0, "--set", "train.steps=1")
            assert not stale.exists()
            assert kept.exists()
            assert re.search(
                r"removed \d+ shared-memory files? that killed MPICH jobs left", done.removed
            )
        finally:
            stale.unlink(missing_ok=True)
            kept.unlink(missing_ok=True)
