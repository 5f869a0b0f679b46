"""Stacks of the threads of a node's processes, wherever they are stuck.

On a signal every process writes those of its threads into a file of its own in memory, which the
others of its node can read.
"""

import contextlib
import faulthandler
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path

from hpczero.comm.status import RankState, process_namespace

ASK = signal.SIGUSR1  # what a user sends to see them
DUMP = signal.SIGRTMIN + 5
_NAME = "hpczero-stacks"
# files of the thread that asks, which is left out
_WATCHING = [f'"{Path(__file__).with_name(name)}"' for name in ("watchdog.py", "stacks.py")]
_WRITING = 1.0  # seconds that a process gets to write its stacks


class StacksFile:
    """This process's file, into which signal `number` writes the stacks."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._file = os.fdopen(os.memfd_create(_NAME), "r+b", buffering=0)
        faulthandler.register(number, self._file, all_threads=True)

    def fileno(self) -> int:
        return self._file.fileno()

    def size(self) -> int:
        return os.fstat(self.fileno()).st_size

    def close(self) -> None:
        faulthandler.unregister(self._number)
        self._file.close()


def is_free(number: int) -> bool:
    """Return True if the program has no handler for this signal."""
    return signal.getsignal(number) == signal.SIG_DFL


def print_when_asked() -> None:
    """Print the stacks to stderr on the signal ASK, which would end the process."""
    if is_free(ASK):
        faulthandler.register(ASK, 2, all_threads=True)


def file_of(state: RankState) -> str:
    """Name the file for the stacks of a process of this node, if the id still is that process's."""
    path = f"/proc/{state.pid}/fd/{state.stacks}"
    if state.namespace != process_namespace() or _NAME not in os.readlink(path):
        raise FileNotFoundError(path)
    return path


def ask(states: Sequence[RankState]) -> list[str]:
    """Return the stacks of all threads of these processes.

    All have the same short time to write them; "" for one that does not, or cannot be asked.
    """
    with contextlib.ExitStack() as files:
        answers = [_ask_one(state, files) for state in states]
        deadline = time.monotonic() + _WRITING
        return [_read_once_written(*answer, deadline) if answer else "" for answer in answers]


def _ask_one(state: RankState, files: contextlib.ExitStack) -> tuple[int, int] | None:
    """Ask for stacks; return the descriptor to read them from, and where they begin."""
    try:
        descriptor = os.open(file_of(state), os.O_RDONLY | os.O_CLOEXEC)
        files.callback(os.close, descriptor)
        begin = os.lseek(descriptor, 0, os.SEEK_END)
        os.kill(state.pid, DUMP)
    except OSError:
        return None
    return descriptor, begin


def _read_once_written(descriptor: int, begin: int, deadline: float) -> str:
    size = begin
    while time.monotonic() < deadline:
        time.sleep(0.05)
        before = size
        size = os.fstat(descriptor).st_size
        if size == before > begin:
            break
    written = os.pread(descriptor, size - begin, begin).decode(errors="replace")
    threads = written.split("\n\n")
    return "\n\n".join(one for one in threads if not any(file in one for file in _WATCHING))
