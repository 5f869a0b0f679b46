"""The program of docs/your-loop.md as its users run it: stopped, killed, continued."""

import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from hpczero.checkpoint import directory
from hpczero.checkpoint.load import Checkpoint
from tests.support.launch import CHECKOUT, Finished, hpczero, launch, mpirun, started
from tests.support.runs import kill_ranks

pytest.importorskip("torch", reason="training needs torch")
pytest.importorskip("mpi4py", reason="training needs mpi4py")

PAGE = CHECKOUT / "docs" / "your-loop.md"


def block(kind: str) -> str:
    found = re.search(rf"^```{kind}\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert found
    return found[1]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(block("python"))
    write_spec(tmp_path, steps=24, every=10)
    return tmp_path


def write_spec(folder: Path, steps: int, every: int, **more: str) -> None:
    text = block("toml")
    text = re.sub(r"steps = \d+", f"steps = {steps}", text)
    text = re.sub(r"every = \d+", f"every = {every}", text)
    for key, value in more.items():
        text += f"{key} = {value}\n"
    (folder / "loop.toml").write_text(text)


BEST = "        best = min"
STEP_AND_BEST = f"        assert engine.rank == 0 or engine.steps < 3, 'mine'\n{BEST}"


def command(ranks: int) -> list[str]:
    return [*mpirun(ranks), sys.executable, "train.py", "loop.toml"]


def train(folder: Path, ranks: int = 2) -> Finished:
    return launch(command(ranks), 120, folder)


def lines(out: str) -> dict[int, str]:
    """Step -> what the program says of it; launchers print words of their own."""
    found = re.findall(r"^(\d+) ([0-9.e-]+ [0-9.e-]+)$", out, re.MULTILINE)
    return {int(step): rest for step, rest in found}


def complete(folder: Path) -> dict[int, Path]:
    return directory.steps(folder / "runs" / "sines" / "checkpoints")


@contextmanager
def endless(folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The program, from its first new checkpoint on."""
    write_spec(folder, steps=1_000_000, every=1)
    before = max(complete(folder), default=0)
    with started(command(2), folder) as process:
        deadline = time.monotonic() + 60
        while max(complete(folder), default=0) == before:
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        yield process


def ranks_of(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    children = psutil.Process(process.pid).children(recursive=True)
    return [child for child in children if "train.py" in child.cmdline()[1:2]]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.slow
def test_asked_to_stop_it_saves_and_goes_on(folder: Path, number: signal.Signals) -> None:
    with endless(folder) as process:
        ranks_of(process)[-1].send_signal(number)
        out, err = process.communicate(timeout=60)
        assert process.returncode == 75, (out, err)
    stopped = lines(out.decode())
    assert max(stopped) == max(complete(folder)), "the step at which it stopped is saved"
    assert b"Traceback" not in err
    write_spec(folder, steps=max(stopped) + 3, every=100)
    goes_on = train(folder)
    assert goes_on.code == 0, goes_on
    assert list(lines(goes_on.out)) == [max(stopped) + at for at in (1, 2, 3)]
    status = launch(hpczero("status", "runs/sines"), 60, folder)
    assert "sines: finished" in status.out


@pytest.mark.slow
def test_what_was_stopped_is_what_was_not(folder: Path) -> None:
    """To the bit, the generators of the ranks included."""
    write_spec(folder, steps=24, every=10, keep="0")
    whole = train(folder)
    (folder / "runs" / "sines" / "summary.json").unlink()
    for step in (24, 20):
        directory.remove(complete(folder)[step])
    again = train(folder)
    expected = lines(whole.out)
    assert list(expected) == list(range(1, 25))
    assert lines(again.out) == {step: expected[step] for step in range(11, 25)}
    assert "WARN" not in again.err
    done = train(folder, 3)
    assert done.code == 0, done
    assert not lines(done.out), "all steps are done"


@pytest.mark.parametrize(
    "times", [2, pytest.param(20, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])]
)
def test_killed_at_any_moment_it_goes_on_from_the_newest_checkpoint(
    folder: Path, times: int
) -> None:
    """It saves after every step: most kills meet a save. What is computed again is the same."""
    chance, seen = random.Random(times), dict[int, str]()
    last = 0
    for _ in range(times):
        with endless(folder) as process:
            time.sleep(chance.random())
            victims = ranks_of(process)
            kill_ranks(victim.pid for victim in chance.choice([victims, [chance.choice(victims)]]))
            out, _ = process.communicate(timeout=60)
            assert process.returncode != 0
        for step, rest in list(lines(out.decode()).items())[:-1]:  # the last may be cut short
            assert seen.setdefault(step, rest) == rest, step
        newest = max(complete(folder))
        with Checkpoint.open(complete(folder)[newest]) as checkpoint:
            assert all(tensor.numpy() is not None for tensor in checkpoint.values())
        assert newest >= max(last, max(seen) - 2), "lost are steps whose save was in flight"
        last = newest


def test_an_error_on_one_rank_ends_the_job(folder: Path) -> None:
    text = (folder / "train.py").read_text()
    (folder / "train.py").write_text(text.replace("        best = min", STEP_AND_BEST, 1))
    done = train(folder)
    assert done.code == 1, done
    assert "hpczero: rank 1 on" in done.err
    assert "AssertionError: mine" in done.err
    assert done.seconds < 60


def test_a_call_on_some_ranks_only_ends_the_job(folder: Path) -> None:
    text = (folder / "loop.toml").read_text()
    (folder / "loop.toml").write_text(text + "\n[comm]\ntimeout_s = 3\n")
    program = (folder / "train.py").read_text()
    line = "        if engine.rank == 0:\n            engine.save()\n"
    (folder / "train.py").write_text(program.replace("        best = min", line + BEST, 1))
    done = train(folder)
    assert done.code == 1, done
    assert re.search(r"rank [01] .*rank [01]", done.err.replace("\n", " ")), done.err
    assert done.seconds < 60


def test_the_lock_and_wrong_input(folder: Path, everything: bool) -> None:
    with endless(folder) as process:
        for rank in ranks_of(process):
            rank.suspend()  # a holder that stands still has the lock all the same
        other = train(folder, 1)
        assert other.code == 2, other
        assert "is in use by" in other.err
        assert "Traceback" not in other.err
        for rank in ranks_of(process):
            rank.send_signal(signal.SIGTERM)
            rank.resume()
        process.communicate(timeout=60)
    (folder / "loop.toml").write_text("[train]\nstpes = 3\n")
    for ranks in (2, 1) if everything else (2,):
        wrong = train(folder, ranks)
        assert wrong.code == 2, wrong
        assert "train.stpes: unknown key; did you mean train.steps?" in wrong.err
        assert wrong.err.count("unknown key") == 1
        assert "Traceback" not in wrong.err
        assert "train.py, line 11)" in wrong.err


TWO = """
import sys

import torch
from torch import nn

import hpczero

one, other = (
    hpczero.initialize(nn.Linear(4, 4), {"name": name, "train": {"precision": "fp32"}})
    for name in ("one", "other")
)
one.backward(one(torch.ones(2, 4)).sum())
one.step()
if sys.argv[1] == "stop":
    one.stop()
one.close()
other.backward(other(torch.ones(2, 4)).sum())
print("norm", other.step().grad_norm)
if sys.argv[1] == "left open":
    sys.exit()
other.close()
"""


@pytest.mark.parametrize(("how", "code"), [("stop", 75), ("closed", 0), ("left open", 1)])
@pytest.mark.slow
def test_two_engines_that_nobody_gave_a_world(tmp_path: Path, how: str, code: int) -> None:
    """MPI ends with the last of them."""
    (tmp_path / "two.py").write_text(TWO)
    done = launch([*mpirun(2), sys.executable, "two.py", how], 120, tmp_path)
    assert done.code == code, done
    assert ("norm" in done.out) == (how != "stop")
    assert ("ends without having closed its world" in done.err) == (how == "left open")
    assert "Traceback" not in done.err
