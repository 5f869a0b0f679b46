"""The terminal that `hpczero top` takes, and gives back."""

import io
import os
import pty
import signal
import sys

import pytest

from hpczero.commands import top


class Interrupted(io.RawIOBase):
    """A terminal at which Ctrl-Z is pressed amid each piece that is written."""

    def __init__(self, terminal: int) -> None:
        self._terminal = terminal

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._terminal

    def write(self, data: memoryview) -> int:  # type: ignore[override]
        signal.raise_signal(signal.SIGTSTP)
        return os.write(self._terminal, data)


def test_a_pause_amid_a_frame_gives_the_terminal_back_and_takes_it_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stops = []
    monkeypatch.setattr(os, "kill", lambda pid, number: stops.append((pid, number)))
    ours, theirs = pty.openpty()
    with os.fdopen(ours, "rb", 0) as shown, os.fdopen(theirs, "rb", 0) as keys:
        monkeypatch.setattr(sys, "stdin", keys)
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BufferedWriter(Interrupted(theirs))))
        with top._screen():
            sys.stdout.write("a frame")
            sys.stdout.flush()
        enter, leave = top._ENTER, top._LEAVE
        assert shown.read(1000).decode() == f"{enter}{leave}{enter}a frame{leave}"
    assert stops == [(os.getpid(), signal.SIGSTOP)]
