"""Stacks of processes that are asked for them by a signal."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest

from hpczero.comm import stacks
from hpczero.comm.stacks import DUMP, StacksFile
from hpczero.comm.status import RankState, process_namespace

OTHER = """
import sys, time
from hpczero.comm.stacks import DUMP, StacksFile
file = StacksFile(DUMP)
def stuck_there():
    print(file.fileno(), flush=True)
    time.sleep(600)
stuck_there()
"""
HERE = RankState(os.getpid(), process_namespace(), 0, 1, 0.0, None, "")


@pytest.fixture
def other() -> Iterator[RankState]:
    """Another process, that can be asked."""
    with subprocess.Popen([sys.executable, "-c", OTHER], stdout=subprocess.PIPE) as process:
        assert process.stdout
        yield replace(HERE, pid=process.pid, stacks=int(process.stdout.readline()))
        process.kill()


def test_stacks_of_this_and_another_process_at_once(other: RankState) -> None:
    file = StacksFile(DUMP)
    done = threading.Event()

    def waits_here() -> None:
        done.wait(60)

    waiting = threading.Thread(target=waits_here)
    waiting.start()
    try:
        for _ in range(2):  # later answers lie behind the first ones
            ours, theirs = stacks.ask([replace(HERE, stacks=file.fileno()), other])
            assert "stuck_there" in theirs
            assert "stuck_there" not in ours
            assert "waits_here" in ours
            assert theirs.count("Current thread") == 1
    finally:
        done.set()
        waiting.join()
        file.close()


def test_a_process_that_is_stopped_has_none(other: RankState) -> None:
    os.kill(other.pid, signal.SIGSTOP)
    assert stacks.ask([other]) == [""]


def test_a_process_that_is_another_one_by_now_is_not_asked() -> None:
    """The signal would end it."""
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as process:
        for state in (
            replace(HERE, pid=process.pid, stacks=0),
            replace(HERE, pid=process.pid, stacks=987),
            replace(HERE, pid=process.pid, stacks=0, namespace=5),
            replace(HERE, pid=2**22 + 1),
        ):
            assert stacks.ask([state]) == [""]
        assert process.poll() is None
        process.kill()


def test_a_rank_alone_prints_its_stacks(capfd: pytest.CaptureFixture[str]) -> None:
    assert stacks.is_free(stacks.ASK)
    stacks.print_when_asked()
    os.kill(os.getpid(), signal.SIGUSR1)
    assert "test_a_rank_alone_prints_its_stacks" in capfd.readouterr().err


def test_a_handler_of_the_program_is_left_alone() -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: seen.append(number))
    try:
        assert not stacks.is_free(stacks.ASK)
        stacks.print_when_asked()
        os.kill(os.getpid(), signal.SIGUSR1)
        assert seen == [signal.SIGUSR1]
    finally:
        signal.signal(signal.SIGUSR1, before)
