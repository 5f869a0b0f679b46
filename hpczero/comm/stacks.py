"""Stacks of the threads of a node's processes, wherever they are stuck.

Every process has a file in memory for them, which the others of its node can read, and a pipe into
which they write that they want them. A thread of the process writes them then: it holds the
interpreter's lock, so nothing runs that it looks at. Where that lock is held for long, by a call
that does not return, a signal has the stacks written all the same; stacks that change meanwhile
could crash the process, and so the signal comes second.
"""

import contextlib
import faulthandler
import io
import os
import re
import signal
import stat
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from hpczero.comm import rank_process
from hpczero.comm.status import RankState, process_namespace
from hpczero.comm.verdict import STOPPED

ASK = signal.SIGUSR1  # what a user sends to see them
DUMP = signal.SIGRTMIN + 5
_NAME = "hpczero-stacks"
# files of the thread that asks, which is left out
_WATCHING = [f'"{Path(__file__).with_name(name)}"' for name in ("watchdog.py", "stacks.py")]
_WRITING = 1.0  # seconds that a process gets to write its stacks; on the signal half as long
_WANTED, _NO_MORE = b"?", b"."
_PIPE = re.compile(f"/memfd:{_NAME}:([0-9]+):([0-9]+)")  # its descriptor, and its inode


class Stacks:
    """This process's file of stacks, whose name says at which pipe to ask for them."""

    def __init__(self) -> None:
        answering, self._asking = os.pipe()
        self._file = _file_in_memory(f":{self._asking}:{os.fstat(answering).st_ino}")
        with contextlib.suppress(ValueError):  # only the main thread may
            signal.signal(DUMP, signal.SIG_IGN)  # so that one that comes late ends nothing
        faulthandler.register(DUMP, self._file, all_threads=True)
        self._thread = threading.Thread(
            target=self._answer, args=[answering], name=_NAME, daemon=True
        )
        self._thread.start()

    def fileno(self) -> int:
        return self._file.fileno()

    def close(self) -> None:
        faulthandler.unregister(DUMP)
        with contextlib.suppress(BrokenPipeError):
            os.write(self._asking, _NO_MORE)
        self._thread.join()
        os.close(self._asking)
        self._file.close()

    def _answer(self, answering: int) -> None:
        with os.fdopen(answering, "rb", buffering=0) as questions, contextlib.suppress(OSError):
            while questions.read(1) == _WANTED:
                faulthandler.dump_traceback(self._file, all_threads=True)
                self._file.write(b"\n")  # as between two threads; may wait for the lock


class Asked:
    """Tells whether a user has sent the signal ASK, which would end the process.

    A handler in Python would wait for the main thread, which is the one that is stuck.
    """

    def __init__(self) -> None:
        self._file = _file_in_memory("")
        self._seen = 0
        faulthandler.register(ASK, self._file, all_threads=False)

    def again(self) -> bool:
        """Return True if a signal has come since the last call."""
        before = self._seen
        self._seen = os.fstat(self._file.fileno()).st_size
        return self._seen > before

    def close(self) -> None:
        faulthandler.unregister(ASK)
        self._file.close()


def _file_in_memory(ending: str) -> io.FileIO:
    return os.fdopen(os.memfd_create(_NAME + ending), "r+b", buffering=0)


def is_free(number: int) -> bool:
    """Return True if the program has no handler for this signal."""
    return signal.getsignal(number) == signal.SIG_DFL


def print_when_asked() -> None:
    """Print the main thread's stack to stderr on the signal ASK, which would end the process."""
    if is_free(ASK):
        faulthandler.register(ASK, 2, all_threads=False)


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
        opened = [(at, _open(state, files)) for at, state in enumerate(states)]
        answers = {at: _Answer(states[at], file) for at, file in opened if file}
        _ask([*answers.values()], _Answer.ask, _WRITING)
        silent = [answer for answer in answers.values() if answer.is_silent()]
        _ask(silent, _Answer.insist, _WRITING / 2)
        return [answers[at].text() if at in answers else "" for at in range(len(states))]


def _open(state: RankState, files: contextlib.ExitStack) -> io.FileIO | None:
    try:
        return files.enter_context(open(file_of(state), "rb", buffering=0))
    except OSError:
        return None


class _Answer:
    """The stacks that one process writes from now on."""

    def __init__(self, state: RankState, file: io.FileIO) -> None:
        self._state = state
        self._descriptor = file.fileno()
        self._begin = os.fstat(self._descriptor).st_size
        self._seen = b""

    def ask(self) -> None:
        named = _PIPE.match(os.readlink(f"/proc/self/fd/{self._descriptor}"))
        if not named:
            return
        with contextlib.suppress(OSError):
            path = f"/proc/{self._state.pid}/fd/{named[1]}"
            pipe = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            with os.fdopen(pipe, "wb", buffering=0) as asking:
                opened = os.fstat(pipe)
                if stat.S_ISFIFO(opened.st_mode) and opened.st_ino == int(named[2]):
                    asking.write(_WANTED)

    def insist(self) -> None:
        """Send the signal, unless it is another process by now, or would get it later only."""
        with contextlib.suppress(OSError):
            is_same = os.path.samestat(os.stat(file_of(self._state)), os.fstat(self._descriptor))
            if is_same and rank_process.trouble(self._state) != STOPPED:
                os.kill(self._state.pid, DUMP)

    def is_silent(self) -> bool:
        return not self._written()

    def is_whole(self) -> bool:
        """Return True if something is written, and no more than at the last look."""
        before = self._seen
        self._seen = self._written()
        return bool(before) and self._seen == before

    def text(self) -> str:
        threads = self._written().decode(errors="replace").split("\n\n")
        return "\n\n".join(one for one in threads if not any(file in one for file in _WATCHING))

    def _written(self) -> bytes:
        size = os.fstat(self._descriptor).st_size - self._begin
        return os.pread(self._descriptor, size, self._begin).strip(b"\n")


def _ask(answers: Sequence[_Answer], how: Callable[[_Answer], None], seconds: float) -> None:
    """Ask for all these answers, and wait until they are there."""
    for answer in answers:
        how(answer)
    deadline = time.monotonic() + seconds
    while answers and time.monotonic() < deadline:
        time.sleep(0.05)
        answers = [answer for answer in answers if not answer.is_whole()]
