"""`hpczero top`: what a run does now, from its directory alone, drawn again every few seconds."""

import contextlib
import json
import os
import select
import signal
import sys
import termios
import time
import tty
from argparse import Namespace
from collections.abc import Iterator
from types import FrameType

from hpczero import env
from hpczero.commands.jobs import run_named
from hpczero.commands.top_facts import Facts, Viewer
from hpczero.commands.top_frame import frame
from hpczero.errors import InputError

_SHORTEST, _LONGEST = 0.2, 3600.0  # seconds between frames
_PATIENCE = 15.0  # seconds in which the ranks are to answer if a single frame is asked for
_POLL = 0.5  # seconds between looks at the terminal's size and at the ranks' answer
_WIDTH = 100  # columns where there is no terminal
_ENTER = "\x1b[?1049h\x1b[?25l"  # another screen, no cursor
_LEAVE = "\x1b[?25h\x1b[?1049l"


def top(options: Namespace) -> int:
    if not _SHORTEST <= options.every <= _LONGEST:
        limits = f"between {_SHORTEST:g} and {_LONGEST:,.0f} seconds"
        raise InputError(f"--every {options.every:g}: give a time {limits}")
    viewer = Viewer(run_named(options.run))
    if options.json:
        print(json.dumps(_answered(viewer).as_data(), indent=2))
    elif options.once or not _is_seen():
        facts = _answered(viewer)
        width = _size()[0] if sys.stdout.isatty() else _WIDTH
        print("\n".join(frame(facts, width, None, sys.stdout.encoding or "ascii")))
    else:
        _watch(viewer, options.every)
    return 0


def _answered(viewer: Viewer) -> Facts:
    """Return the facts as soon as the ranks have answered, if they do soon."""
    until = time.monotonic() + _PATIENCE
    while not (facts := viewer.facts()).complete and time.monotonic() < until:
        time.sleep(_POLL)
    return facts


def _watch(viewer: Viewer, every: float) -> None:
    """Draw frames until "q" is pressed; what ends it otherwise leaves the terminal as it was."""
    with contextlib.suppress(KeyboardInterrupt, BrokenPipeError), _screen():
        while True:
            facts = viewer.facts()
            until = time.monotonic() + every
            drawn = None
            while (left := until - time.monotonic()) > 0:
                if drawn != (drawn := _size()):
                    _draw(facts, *drawn)
                if _is_key(min(left, _POLL), "q"):
                    return


def _draw(facts: Facts, width: int, height: int) -> None:
    # the last column and line stay free: some terminals go on to the next one
    lines = frame(facts, width - 1, height - 1, sys.stdout.encoding or "ascii")
    text = "".join(f"{line}\x1b[K\n" for line in lines)
    sys.stdout.write(f"\x1b[H{text}\x1b[J")
    sys.stdout.flush()


def _is_seen() -> bool:
    """Return True if there is a terminal, with keys, that can draw."""
    able = env.variable("TERM") not in (None, "dumb")
    return able and sys.stdout.isatty() and sys.stdin.isatty()


def _size() -> tuple[int, int]:
    """Return columns and lines."""
    try:
        size = os.get_terminal_size(sys.stdout.fileno())
    except OSError:
        return _WIDTH, 30
    return size.columns or _WIDTH, size.lines or 30


def _is_key(seconds: float, wanted: str) -> bool:
    """Wait for a key, for so long; return True if it is this one."""
    keys = sys.stdin.fileno()
    if not select.select([keys], [], [], seconds)[0]:
        return False
    pressed = os.read(keys, 100)
    return not pressed or wanted.encode() in pressed.lower()  # nothing: the terminal has gone


@contextlib.contextmanager
def _screen() -> Iterator[None]:
    """Take the terminal, and give it back as it was, also for a while to a shell (Ctrl-Z)."""
    keys = sys.stdin.fileno()
    before = termios.tcgetattr(keys)

    def write(codes: str) -> None:
        """Write past Python's buffer, which refuses what a signal's handler writes amid a frame."""
        with contextlib.suppress(OSError):  # a terminal that has gone
            os.write(sys.stdout.fileno(), codes.encode())

    def take() -> None:
        tty.setcbreak(keys)
        write(_ENTER)

    def give() -> None:
        write(_LEAVE)
        with contextlib.suppress(termios.error):
            termios.tcsetattr(keys, termios.TCSADRAIN, before)

    def pause(number: int, stack: FrameType | None) -> None:
        give()
        os.kill(os.getpid(), signal.SIGSTOP)
        take()  # when it goes on

    def end(number: int, stack: FrameType | None) -> None:
        raise KeyboardInterrupt

    handlers = {signal.SIGTSTP: pause, signal.SIGTERM: end, signal.SIGHUP: end}
    kept = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    take()
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            sys.stdout.flush()  # the rest of a frame
        give()
        for number, handler in kept.items():
            signal.signal(number, handler)
