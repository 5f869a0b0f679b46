"""Starts commands as a user would, under this environment's mpirun or alone, with a hard
time-out, and sees what they leave behind.
"""

import contextlib
import fcntl
import os
import pty
import re
import shutil
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]
_MARK = "HPCZERO_TEST_LAUNCH"
_LEAVE = 5  # seconds that processes get to go away after the command itself has ended


_LOAD = re.compile(r'^\S+Z load spec=\S+ what="torch, MPI and kernels"\n', re.MULTILINE)
REMOVED = re.compile(r"^hpczero: .* killed MPICH jobs left in /dev/shm.*\n", re.MULTILINE)


@dataclass(frozen=True)
class Finished:
    """How a command ended. `code` is None if it had to be killed after its time; `left` are
    processes that outlived it.

    `removed` is what a run says of files that jobs killed before it left on this machine: it is no
    part of `err`.
    """

    code: int | None
    out: str
    err: str
    seconds: float
    left: list[str]
    removed: str = ""


def after_load(out: str) -> str:
    """Return what a run has printed behind its first line."""
    return _LOAD.sub("", out)


def hpczero(*arguments: str) -> list[str]:
    """The program of this checkout, in this environment."""
    return [sys.executable, "-m", "hpczero", *arguments]


def mpirun(ranks: int) -> list[str]:
    """The launcher that belongs to this environment's MPI library, and the options that it needs
    here.
    """
    beside = Path(sys.executable).parent / "mpirun"
    found = str(beside) if beside.exists() else shutil.which("mpirun")
    if not found:
        pytest.skip("there is no mpirun")
    version = subprocess.run(
        [found, "--version"], capture_output=True, text=True, timeout=60
    ).stdout
    options = ["--oversubscribe"] if "Open MPI" in version else []
    return [found, *options, "-n", str(ranks)]


def launch(
    command: Sequence[str],
    seconds: float,
    folder: Path = CHECKOUT,
    environment: Mapping[str, str] | None = None,
) -> Finished:
    """Run to the end, or until `seconds` have passed; nothing outlives this call."""
    mark = uuid.uuid4().hex
    started = time.monotonic()
    process = start(command, folder, {**(environment or {}), _MARK: mark})
    try:
        out, err = process.communicate(timeout=seconds)
        code: int | None = process.returncode
    except subprocess.TimeoutExpired:
        _kill(mark)
        out, err = process.communicate()
        code = None
    taken = time.monotonic() - started
    said = err.decode(errors="replace")
    removed = "".join(REMOVED.findall(said))
    return Finished(
        code,
        out.decode(errors="replace"),
        REMOVED.sub("", said),
        taken,
        _await_the_end(mark),
        removed,
    )


def start(
    command: Sequence[str],
    folder: Path = CHECKOUT,
    environment: Mapping[str, str] | None = None,
    stdout: int = subprocess.PIPE,
) -> subprocess.Popen[bytes]:
    """Only started, for tests that do something to it while it runs."""
    path = os.pathsep.join(filter(None, [str(CHECKOUT), os.environ.get("PYTHONPATH")]))
    allowed = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    calm = {
        "OMP_WAIT_POLICY": "PASSIVE"
    }  # torch's threads sleep when idle: on a busy machine, spinning ones hold up each other and us
    surroundings = {
        **os.environ,
        **allowed,
        **calm,
        "PYTHONPATH": path,
        **(environment or {}),
    }
    pipe, nothing = subprocess.PIPE, subprocess.DEVNULL
    return subprocess.Popen(
        list(command),
        cwd=folder,
        env=surroundings,
        stdin=nothing,
        stdout=stdout,
        stderr=pipe,
        start_new_session=True,
    )


@contextlib.contextmanager
def started(
    command: Sequence[str],
    folder: Path = CHECKOUT,
    environment: Mapping[str, str] | None = None,
    stdout: int = subprocess.PIPE,
) -> Iterator[subprocess.Popen[bytes]]:
    """`start`, and an end to it and everything that it started when the block ends.

    What prints more than 64 KB stands still: nobody reads from the pipe before the end.
    """
    mark = uuid.uuid4().hex
    process = start(command, folder, {**(environment or {}), _MARK: mark}, stdout)
    try:
        yield process
    finally:
        _kill(mark)
        process.communicate()


def on_a_terminal(
    command: Sequence[str], environment: Mapping[str, str], folder: Path = CHECKOUT
) -> str:
    """Return the output of a command that succeeds when its stdout is a terminal of 100 columns."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", 30, 100, 0, 0))
    mark = uuid.uuid4().hex
    process = start(command, folder, {**environment, _MARK: mark}, theirs)
    os.close(theirs)
    too_late = threading.Timer(60, _kill, [mark])
    too_late.start()
    written = b""
    with contextlib.suppress(OSError):  # nobody holds the other side any more
        while block := os.read(ours, 65536):
            written += block
    _, errors = process.communicate()
    too_late.cancel()
    os.close(ours)
    assert (process.returncode, _await_the_end(mark)) == (0, []), (written, errors)
    return written.decode()


def _await_the_end(mark: str) -> list[str]:
    deadline = time.monotonic() + _LEAVE
    while (left := _marked(mark)) and time.monotonic() < deadline:
        time.sleep(0.1)
    _kill(mark)
    return [f"{pid}: {command}" for pid, command in left.items()]


def _kill(mark: str) -> None:
    for pid in _marked(mark):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def _marked(mark: str) -> dict[int, str]:
    """Processes that carry the mark in their environment, wherever they have gone: pid ->
    command line.
    """
    entry, found = f"{_MARK}={mark}".encode(), {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if entry in (folder / "environ").read_bytes().split(b"\0"):
                found[int(folder.name)] = (
                    (folder / "cmdline")
                    .read_bytes()
                    .replace(b"\0", b" ")
                    .decode(errors="replace")
                    .strip()
                )
        except OSError:  # gone, or another user's
            continue
    return found


BLOCKER = """
import importlib.abc, sys

class Blocker(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {blocked}:
            raise ImportError("imported " + name)

sys.meta_path.insert(0, Blocker())
from hpczero.cli import main
sys.exit(main())
"""


HEAVY = ("torch", "mpi4py", "numba", "h5py", "numpy", "psutil", "rich")
