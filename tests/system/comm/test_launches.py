"""The end of a launch in which a rank fails: of the distributed tests, and of any program that
holds a World.
"""

import re
import sys
from pathlib import Path

import pytest

from tests.support.launch import Finished, launch, mpirun

PROGRAM = """
import os, signal, sys, time
from hpczero.comm.world import World
from hpczero.errors import InputError

with World.start() as world:
    world.broadcast_object(None)
    if sys.argv[1] == "raise" and world.rank == 1:
        raise ValueError("something broke")
    if sys.argv[1] == "input":
        raise InputError("this is wrong in the spec")
    if sys.argv[1] == "kill" and world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if sys.argv[1] != "end":
        world.broadcast_object(None)
        world.gather_objects(None)
        time.sleep(60)
"""

TESTS = """
import time
import pytest

pytestmark = pytest.mark.mpi


def test_of_one_rank(world):
    if world.rank == 1:
        print("said before")
        assert world.rank == 5


def test_of_the_size(world, request):
    assert world.size == 2


@pytest.fixture
def broken(whole):
    assert whole.rank != 1, "the fixture broke"


def test_broken(broken):
    raise RuntimeError("never run")


def test_left_alone(whole):
    if whole.rank == 1:
        raise RuntimeError("rank 1 gives up")
    whole.everyone.barrier()


def test_hangs(whole):
    if whole.rank == 1:
        time.sleep(1000)
    whole.everyone.barrier()
"""


def run_program(tmp_path: Path, how: str) -> Finished:
    (tmp_path / "program.py").write_text(PROGRAM)
    return launch([*mpirun(2), sys.executable, "program.py", how], seconds=40, folder=tmp_path)


def run_tests(tmp_path: Path, *names: str, limit: int = 90) -> Finished:
    """The tests above on 2 ranks, with the plugin of tests/mpi, which waits less long for ranks
    that do not come.
    """
    (tmp_path / "test_it.py").write_text(TESTS)
    limits = f"conftest.LIMIT, conftest.GRACE = {limit}, 2"
    (tmp_path / "conftest.py").write_text(
        f"from tests.mpi import conftest\n{limits}\nfrom tests.mpi.conftest import *\n"
        "def pytest_addoption(parser): parser.addoption('--slow', action='store_true')\n"
    )
    pytest_command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "--with-mpi",
        "--slow",
        "--color=no",
        "-p",
        "no:cacheprovider",
    ]
    return launch(
        [*mpirun(2), *pytest_command, *(f"test_it.py::{name}" for name in names)],
        seconds=60,
        folder=tmp_path,
    )


@pytest.mark.slow
def test_an_orderly_end(tmp_path: Path) -> None:
    finished = run_program(tmp_path, "end")
    assert (finished.code, finished.err, finished.left) == (0, "", [])


def test_a_rank_that_raises_ends_the_job(tmp_path: Path) -> None:
    finished = run_program(tmp_path, "raise")
    assert finished.code == 1
    assert (
        len(re.findall(r"hpczero: rank 1 on \S+: ValueError: something broke", finished.err)) == 1
    )
    assert finished.err.count("Traceback") == 1  # for whoever has to mend it
    assert finished.left == []


def test_a_mistake_that_all_ranks_find_is_said_once(tmp_path: Path) -> None:
    finished = run_program(tmp_path, "input")
    assert finished.code == 2
    assert finished.err.count("this is wrong in the spec") == 1
    assert "Traceback" not in finished.err


def test_a_killed_rank_ends_the_job(tmp_path: Path) -> None:
    finished = run_program(tmp_path, "kill")
    assert finished.code not in (0, None)
    assert finished.left == []


def test_a_test_fails_everywhere_if_it_fails_on_one_rank(tmp_path: Path) -> None:
    finished = run_tests(tmp_path, "test_of_one_rank", "test_of_the_size", "test_broken")
    assert finished.code == 1
    assert "2 failed, 2 passed, 1 error" in finished.out
    assert "---- rank 1: failed" in finished.out
    assert "assert 1 == 5" in finished.out
    assert "the fixture broke" in finished.out
    assert "never run" not in finished.out.replace('raise RuntimeError("never run")', "")
    assert finished.out.count(" passed") == 1  # rank 0 alone reports


@pytest.mark.parametrize(
    ("name", "said"),
    [("test_left_alone", "rank 1 failed in"), ("test_hangs", "rank 1 is still in")],
)
@pytest.mark.slow
def test_a_rank_that_leaves_the_others_waiting_ends_the_launch(
    tmp_path: Path, name: str, said: str
) -> None:
    finished = run_tests(tmp_path, name, limit=90 if name == "test_left_alone" else 3)
    assert finished.code not in (0, None)
    assert f"{said} test_it.py::{name}" in finished.err + finished.out
    assert finished.left == []
