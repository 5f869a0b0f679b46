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
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from hpczero.comm.status import RankState, process_namespace

ASK = signal.SIGUSR1  # what a user sends to see them
DUMP = signal.SIGRTMIN + 5
_NAME = "hpczero-stacks"
# files of the thread that asks, which is left out
_WATCHING = [f'"{Path(__file__).with_name(name)}"' for name in ("watchdog.py", "stacks.py")]
_WRITING = 1.0  # seconds that a process gets to write its stacks, and half of them on the signal
_WANTED, _NO_MORE = b"?", b"."


class Stacks:
    """This process's file of stacks, and its pipe."""

    def __init__(self) -> None:
        self._file = _file_in_memory()
        answering, self._asking = os.pipe()
        faulthandler.register(DUMP, self._file, all_threads=True)
        self._thread = threading.Thread(
            target=self._answer, args=[answering], name=_NAME, daemon=True
        )
        self._thread.start()

    def descriptors(self) -> tuple[int, int]:
        """Return those of the file and of the pipe's end to ask at."""
        return self._file.fileno(), self._asking

    def close(self) -> None:
        faulthandler.unregister(DUMP)
        os.write(self._asking, _NO_MORE)
        self._thread.join()
        os.close(self._asking)
        self._file.close()

    def _answer(self, answering: int) -> None:
        with os.fdopen(answering, "rb", buffering=0) as questions:
            while questions.read(1) == _WANTED:
                faulthandler.dump_traceback(self._file, all_threads=True)
                self._file.write(b"\n")  # as between two threads


class Asked:
    """Tells whether a user has sent the signal ASK, which would end the process.

    A handler in Python would wait for the main thread, which is the one that is stuck.
    """

    def __init__(self) -> None:
        self._file = _file_in_memory()
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


def _file_in_memory() -> io.FileIO:
    return os.fdopen(os.memfd_create(_NAME), "r+b", buffering=0)


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
        answers = [_Answer(state, files) for state in states]
        _wait_for([answer for answer in answers if answer.file], _Answer.ask, _WRITING)
        _wait_for([one for one in answers if one.is_silent()], _Answer.insist, _WRITING / 2)
        return [answer.text() for answer in answers]


class _Answer:
    """The stacks that one process writes from now on; none if it cannot be asked."""

    def __init__(self, state: RankState, files: contextlib.ExitStack) -> None:
        self._state = state
        self.file: io.FileIO | None = None
        with contextlib.suppress(OSError):
            file = open(file_of(state), "rb", buffering=0)  # noqa: SIM115  `files` closes it
            self.file = files.enter_context(file)
        self._begin = self._end = self._size()

    def ask(self) -> None:
        with contextlib.suppress(OSError):
            path = f"/proc/{self._state.pid}/fd/{self._state.asking}"
            pipe = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            with os.fdopen(pipe, "wb", buffering=0) as asking:
                asking.write(_WANTED)

    def insist(self) -> None:
        with contextlib.suppress(OSError):
            os.kill(self._state.pid, DUMP)

    def is_silent(self) -> bool:
        return self.file is not None and self._size() == self._begin

    def is_whole(self) -> bool:
        """Return True if something is written, and no more than at the last look."""
        before = self._end
        self._end = self._size()
        return self._begin < self._end == before

    def text(self) -> str:
        if not self.file:
            return ""
        written = os.pread(self.file.fileno(), self._end - self._begin, self._begin)
        threads = written.decode(errors="replace").split("\n\n")
        return "\n\n".join(one for one in threads if not any(file in one for file in _WATCHING))

    def _size(self) -> int:
        return os.fstat(self.file.fileno()).st_size if self.file else 0


def _wait_for(answers: Sequence[_Answer], way: Callable[[_Answer], None], seconds: float) -> None:
    for answer in answers:
        way(answer)
    deadline = time.monotonic() + seconds
    while answers and time.monotonic() < deadline:
        time.sleep(0.05)
        answers = [answer for answer in answers if not answer.is_whole()]
