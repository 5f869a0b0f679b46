"""The terminal, if there is one, at which a person sees what this process prints.

A rank's own stdout says little: under MPICH it is a pipe, under Open MPI a pseudo-terminal even if
mpirun's output goes to a file. So the stream is followed through the launchers that started this
process: whichever holds the other end of the pipe or pseudo-terminal passes it on to its own
stdout, and so on, until no launcher takes it any further. If it ends at a terminal, it is seen.
Anything that cannot be found out counts as not seen.
"""

import fcntl
import os
import stat
import struct
import termios
from collections.abc import Callable
from typing import TextIO

import psutil

from hpczero import env

_LAUNCHERS = (
    "mpirun",
    "mpiexec",
    "hydra_",
    "pmi_proxy",
    "prterun",
    "prted",
    "orterun",
    "orted",
    "oshrun",
)
# Options that make a launcher write somewhere else, or put words before each line.
_REDIRECTING = (
    "-outfile",
    "-errfile",
    "-output",
    "-tag-output",
    "-timestamp-output",
    "-xterm",
    "-prepend",
)
_LABELLING = "-l"


def find(stream: TextIO) -> str | None:
    """Return the path of the terminal that shows `stream` (stdout or stderr), or None."""
    if env.variable("TERM") in (None, "dumb"):
        return None
    try:
        channel = stream.fileno()
        passed_on = 2 if channel == 2 else 1
        process, end = psutil.Process(), os.readlink(f"/proc/self/fd/{channel}")
        while (reader := _reader(process, end)) is not None:
            if _redirects(reader.cmdline()):
                return None
            process, end = reader, os.readlink(f"/proc/{reader.pid}/fd/{passed_on}")
        return end if _is_terminal(end) else None
    except (OSError, ValueError, psutil.Error):
        return None


def is_file(stream: TextIO) -> bool:
    try:
        return stat.S_ISREG(os.fstat(stream.fileno()).st_mode)
    except (OSError, ValueError):
        return False


def size(path: str) -> tuple[int, int] | None:
    """Return the columns and rows of the terminal `path`, or None."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOCTTY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            answer = fcntl.ioctl(descriptor, termios.TIOCGWINSZ, bytes(8))
            rows, columns, _, _ = struct.unpack("4H", answer)
        finally:
            os.close(descriptor)
    except OSError:
        return None
    return (columns, rows) if columns and rows else None


def _reader(process: psutil.Process, end: str) -> psutil.Process | None:
    """Return the launcher among the ancestors of `process` that reads what `end` is given."""
    for ancestor in process.parents():
        if ancestor.name().startswith(_LAUNCHERS) and _holds_other_side(ancestor.pid, end):
            return ancestor
    return None


def _holds_other_side(pid: int, end: str) -> bool:
    for descriptor in os.listdir(f"/proc/{pid}/fd"):
        try:
            link = os.readlink(f"/proc/{pid}/fd/{descriptor}")
            if end.startswith("/dev/pts/"):
                index = end.removeprefix("/dev/pts/")
                if link.endswith("ptmx") and _terminal_index(pid, descriptor) == index:
                    return True
            elif link == end and not end.startswith("/"):  # a pipe; a socket's sides have two names
                return True
        except FileNotFoundError:  # closed since
            continue
    return False


def _terminal_index(pid: int, descriptor: str) -> str | None:
    """Return the index in /dev/pts that a pseudo-terminal's master side belongs to (Linux 4.14)."""
    with open(f"/proc/{pid}/fdinfo/{descriptor}", encoding="ascii") as lines:
        return next((line.split()[1] for line in lines if line.startswith("tty-index:")), None)


def _redirects(command: list[str]) -> bool:
    return any(
        word == _LABELLING or word.replace("--", "-", 1).startswith(_REDIRECTING)
        for word in command
    )


def _is_terminal(path: str) -> bool:
    if not path.startswith("/dev/"):
        return False
    descriptor = os.open(path, os.O_WRONLY | os.O_NOCTTY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        return os.isatty(descriptor)
    finally:
        os.close(descriptor)


class Tolerant:
    """A text stream that escapes characters its encoding lacks, and drops what it cannot write.

    Only a closed pipe is an error.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.encoding = stream.encoding or "utf-8"

    def write(self, text: str) -> int:
        encoded = text.encode(self.encoding, "backslashreplace").decode(self.encoding)
        self._attempt(lambda: self._stream.write(encoded))
        return len(text)

    def flush(self) -> None:
        self._attempt(self._stream.flush)

    def isatty(self) -> bool:
        return self._stream.isatty()

    def fileno(self) -> int:
        return self._stream.fileno()

    def _attempt(self, action: Callable[[], object]) -> None:
        try:
            action()
        except BrokenPipeError:
            raise
        except OSError:
            pass
