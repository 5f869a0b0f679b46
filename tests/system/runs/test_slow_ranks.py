"""Ranks that are really slow are named with the cause, by every verb, and no others are.

The run goes on until it is named: on a busy machine that takes longer.
"""

import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from hpczero.runs import rank_times
from hpczero.runs.record import read_run
from hpczero.runs.stragglers import CAUSES, Straggler, stragglers
from tests.support import slow_disk
from tests.support.launch import hpczero, mpirun, started
from tests.support.named import named_by, slow_as_data
from tests.support.runs import lines_of, steps_done

pytest.importorskip("torch", reason="training needs torch")
pytest.importorskip("mpi4py", reason="training needs mpi4py")

SLOW = 1  # the rank
RUN = hpczero("run", "spec.toml")
SPEC = """
name = "slow"
model = { layers = 2, hidden = 64, heads = 2, seq_len = 128, vocab = 256 }
data = { source = "data/tokens.npy" }
[train]
precision = "fp32"
steps = 1_000_000
global_batch = 6
micro_batch = 2
eval_batches = 0
log_every = 3
[checkpoint]
every = -1
"""
NAMED = 300  # seconds within which the rank is named
STOPPED, RUNNING = 0.04, 0.06  # seconds of a pulse


def write(folder: Path, spec: str = SPEC) -> Path:
    """Write the spec, and tokens that are never all in memory; return the run's folder."""
    (folder / "spec.toml").write_text(spec)
    (folder / "data").mkdir()
    tokens = np.lib.format.open_memmap(folder / "data" / "tokens.npy", "w+", "u1", (1 << 28,))
    tokens[:: 1 << 20] = 1
    return folder / "runs" / "slow"


@contextmanager
def running(folder: Path, of_ranks: Sequence[Sequence[str]]) -> Iterator[None]:
    """Run what each rank is started with until the block ends; it begins after some steps."""
    launcher = mpirun(1)
    words = [[*launcher[1:], *of_rank] for of_rank in of_ranks]
    whole = [word for of_rank in words for word in (":", *of_rank)][1:]
    with started([launcher[0], *whole], folder) as job:
        begun = time.monotonic()
        while steps_done(folder, "slow") < 10:
            assert job.poll() is None, job.communicate()
            assert time.monotonic() < begun + 200, "it makes no steps"
            time.sleep(0.2)
        yield


def is_named(run: Path, cause: str) -> None:
    """Wait until the rank is named; of what the run had left then the verbs all say the same."""
    found: list[Straggler] = []
    seen = run.parents[1] / "seen" / run.name
    deadline = time.monotonic() + NAMED
    while [(one.rank, one.cause) for one in found] != [(SLOW, cause)]:
        assert time.monotonic() < deadline, found
        time.sleep(1)
        shutil.rmtree(seen, ignore_errors=True)
        shutil.copytree(run, seen, ignore=shutil.ignore_patterns("checkpoints", "watch"))
        found = stragglers(read_run(seen), rank_times.read(seen))
    assert slow_as_data(seen) == [(SLOW, cause)]
    for verb, named in named_by(seen).items():
        assert named == [(SLOW, CAUSES[cause])], verb


@contextmanager
def pulses(pid: int) -> Iterator[None]:
    """Stop the process for a part of the time."""
    over = threading.Event()

    def stop_and_go() -> None:
        while not over.wait(RUNNING):
            os.kill(pid, signal.SIGSTOP)
            time.sleep(STOPPED)
            os.kill(pid, signal.SIGCONT)

    thread = threading.Thread(target=stop_and_go)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@pytest.mark.slow
def test_a_rank_that_is_stopped_again_and_again(tmp_path: Path) -> None:
    run = write(tmp_path)
    with running(tmp_path, [RUN] * 3):
        ranks = lines_of(run / "events.jsonl")[0]["ranks"]
        with pulses(next(one["pid"] for one in ranks if one["rank"] == SLOW)):
            is_named(run, "stopped")


FIRST = ["nice", "-n", "-15"]  # as root: what else the machine does takes no core from either


@contextmanager
def busy_loops(core: int, count: int) -> Iterator[None]:
    loop = [*FIRST, "taskset", "-c", str(core), "sh", "-c", "while :; do :; done"]
    loops = [subprocess.Popen(loop) for _ in range(count)]
    try:
        yield
    finally:
        for one in loops:
            one.kill()
            one.wait()


@pytest.mark.slow
def test_a_rank_whose_core_is_taken(tmp_path: Path) -> None:
    """Each rank has a core; three loops leave a quarter of one to its rank."""
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        pytest.skip("there is one core: ranks cannot have one each")
    run = write(tmp_path)
    pinned = [[*FIRST, "taskset", "-c", str(core), *RUN] for core in cores]
    with running(tmp_path, pinned), busy_loops(cores[SLOW], 3):
        is_named(run, "taken")


@pytest.mark.slow
def test_a_rank_that_reads_its_data_from_a_slow_disk(tmp_path: Path) -> None:
    run = write(tmp_path)
    slow = tmp_path / "slow"
    of_slow = slow_disk.command(tmp_path / "data", slow, RUN, read=0.2)
    with running(tmp_path, [RUN, of_slow, RUN]):
        slow.touch()
        is_named(run, "data")


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.slow
def test_a_rank_that_writes_its_checkpoints_to_a_slow_disk(
    tmp_path: Path, asynchronous: bool
) -> None:
    saves = f"every = 4\nwriters = 'rank'\nasynchronous = {str(asynchronous).lower()}"
    run = write(tmp_path, SPEC.replace("every = -1", saves))
    run.parent.mkdir()
    slow = tmp_path / "slow"
    of_slow = slow_disk.command(run.parent, slow, RUN, write=0.3)
    with running(tmp_path, [RUN, of_slow, RUN]):
        slow.touch()
        is_named(run, "save")
