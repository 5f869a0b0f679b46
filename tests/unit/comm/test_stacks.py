"""Stacks of processes that are asked for them."""

import fcntl
import os
import re
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import pytest

from hpczero.comm import stacks
from hpczero.comm.stacks import Asked, Stacks
from hpczero.comm.status import RankState, process_namespace

OTHER = """
import contextlib, ctypes, sys, threading, time
from hpczero.comm.stacks import Stacks

def busy_there(depth):
    with contextlib.suppress(ValueError):
        return sum(one for one in [busy_there(depth - 1)]) if depth else 0

def stay_busy():
    while True:
        busy_there(50)

def stuck_there(case):
    if case == "busy":
        for _ in range(2):
            threading.Thread(target=stay_busy, daemon=True).start()
    print(stacks.fileno(), flush=True)
    if case == "alone":
        ctypes.PyDLL(None).sleep(600)  # no other thread of the interpreter runs meanwhile
    time.sleep(600)

stacks = Stacks()
stuck_there(sys.argv[1])
"""
HERE = RankState(os.getpid(), process_namespace(), 0, 1, 0.0, None, "")
ENOUGH = 5_000  # questions: had signals had the stacks written, some 1,000 ended a busy process


@contextmanager
def another(case: str) -> Iterator[tuple[RankState, subprocess.Popen[bytes]]]:
    """Another process, that can be asked."""
    with subprocess.Popen([sys.executable, "-c", OTHER, case], stdout=subprocess.PIPE) as process:
        assert process.stdout
        file = int(process.stdout.readline())
        try:
            yield replace(HERE, pid=process.pid, stacks=file), process
        finally:
            process.kill()


def test_stacks_of_this_and_another_process_at_once() -> None:
    here = Stacks()
    done = threading.Event()

    def waits_here() -> None:
        done.wait(60)

    waiting = threading.Thread(target=waits_here)
    waiting.start()
    try:
        with another("sleeps") as (other, _):
            for _ in range(2):  # later answers lie behind the first ones
                ours, theirs = stacks.ask([replace(HERE, stacks=here.fileno()), other])
                assert "stuck_there" in theirs
                assert "stuck_there" not in ours
                assert "waits_here" in ours
                assert theirs.count("hread") == 1  # without the one that writes
    finally:
        done.set()
        waiting.join()
        here.close()


def pipe_of(state: RankState) -> str:
    """Return the path of the pipe that the name of the process's file says."""
    _, _, descriptor, _ = os.readlink(stacks.file_of(state)).split(":")
    return f"/proc/{state.pid}/fd/{descriptor}"


def unread(pipe: IO[bytes] | int) -> int:
    (size,) = struct.unpack("i", fcntl.ioctl(pipe, termios.FIONREAD, bytes(4)))
    return int(size)


@pytest.mark.slow
def test_a_process_that_runs_survives_being_asked() -> None:
    with another("busy") as (other, process):
        pipe = os.open(pipe_of(other), os.O_WRONLY)
        try:
            for _ in range(ENOUGH):
                os.write(pipe, b"?")
                time.sleep(0.0003)
            while unread(pipe):
                assert process.poll() is None
                time.sleep(0.01)
        finally:
            os.close(pipe)
        assert "busy_there" in stacks.ask([other])[0]
        assert process.poll() is None


def test_only_the_pipe_that_is_named_is_written_to() -> None:
    """The process is another one of ours by now, and has something else at that number."""
    program = OTHER.replace("stacks = Stacks()", "stacks = Stacks(); os.dup2(0, stacks._asking)")
    program = program.replace("import contextlib,", "import contextlib, os,")
    command = [sys.executable, "-c", program, "sleeps"]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, **pipes) as process:
        assert process.stdin
        assert process.stdout
        state = replace(HERE, pid=process.pid, stacks=int(process.stdout.readline()))
        try:
            assert "stuck_there" in stacks.ask([state])[0]  # by the signal
            assert unread(process.stdin) == 0
        finally:
            process.kill()


def test_a_process_whose_interpreter_is_held_by_a_call_is_asked_by_a_signal() -> None:
    with another("alone") as (other, _):
        (text,) = stacks.ask([other])
    assert "stuck_there" in text


def test_the_end_of_an_earlier_answer_is_none() -> None:
    """It comes late, where a call holds the interpreter."""
    with another("alone") as (other, _), open(stacks.file_of(other), "ab", buffering=0) as file:
        late = threading.Timer(0.3, file.write, [b"\n"])
        late.start()
        (text,) = stacks.ask([other])
        late.join()
    assert "stuck_there" in text


def test_a_process_that_is_stopped_has_none() -> None:
    with another("sleeps") as (other, _):
        os.kill(other.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, other.pid, os.WSTOPPED)
        assert stacks.ask([other]) == [""]
        pending = Path(f"/proc/{other.pid}/status").read_text()
        (mask,) = re.findall(r"^ShdPnd:\s+([0-9a-f]+)$", pending, re.MULTILINE)
        assert not int(mask, 16) >> stacks.DUMP - 1 & 1  # it would come when it goes on


def test_a_process_that_is_another_one_by_now_is_not_asked() -> None:
    """The signal would end it, and the pipe may be its input."""
    program = [sys.executable, "-c", "input()"]
    with subprocess.Popen(program, stdin=subprocess.PIPE) as process:
        for state in (
            replace(HERE, pid=process.pid, stacks=0),
            replace(HERE, pid=process.pid, stacks=987),
            replace(HERE, pid=process.pid, stacks=0, namespace=5),
            replace(HERE, pid=2**22 + 1),
        ):
            assert stacks.ask([state]) == [""]
        assert process.stdin
        assert unread(process.stdin) == 0
        assert process.poll() is None
        process.kill()


def test_a_question_that_comes_late_ends_nothing() -> None:
    Stacks().close()
    os.kill(os.getpid(), stacks.DUMP)


def open_here() -> set[str]:
    """Return the pipes and files in memory that this process has open."""
    links = set()
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the one for the list
            links.add(os.readlink(f"/proc/self/fd/{descriptor}"))
    return {link for link in links if link.startswith(("pipe:", f"/memfd:{stacks._NAME}"))}


def test_nothing_is_left_open() -> None:
    before, threads = open_here(), set(threading.enumerate())
    here, asked = Stacks(), Asked()
    ours = open_here() - before
    (thread,) = set(threading.enumerate()) - threads
    assert len(ours) == 3
    here.close()
    asked.close()
    assert not ours & open_here()
    assert not thread.is_alive()


def test_a_user_asks_again_and_again() -> None:
    asked = Asked()
    try:
        for _ in range(2):
            assert not asked.again()
            os.kill(os.getpid(), signal.SIGUSR1)
            assert asked.again()
    finally:
        asked.close()


def test_a_rank_alone_prints_its_stack(capfd: pytest.CaptureFixture[str]) -> None:
    assert stacks.is_free(stacks.ASK)
    stacks.print_when_asked()
    os.kill(os.getpid(), signal.SIGUSR1)
    assert "test_a_rank_alone_prints_its_stack" in capfd.readouterr().err


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
