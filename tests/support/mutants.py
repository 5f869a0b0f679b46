"""Files changed at random, and what becomes of a process that reads them: seeded, so that every
one can be made again.
"""

import faulthandler
import os
import resource
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tests.support.checkpoints import peak_of_memory

_TELLING = (0, 1, 2, 3, 4, 7, 8, 15, 16, 63, 127, 128, 255, 256, 511, 512, 4095, 4096, 65535)
_TELLING += (1 << 31, (1 << 32) - 1, 1 << 32, 1 << 40, 1 << 62, (1 << 63) - 1, 1 << 63)
_SECONDS = 10  # of processor time


def mutated(content: bytes, random: np.random.Generator) -> bytes:
    """One to four changes, at places where something else than zero is or near it."""
    changed = bytearray(content)
    places = np.flatnonzero(np.frombuffer(content, np.uint8))
    for _ in range(int(random.integers(1, 5))):
        place = int(random.choice(places)) + int(random.integers(-8, 9))
        place = min(max(place, 0), len(changed) - 9)
        _CHANGES[int(random.integers(len(_CHANGES)))](changed, place, random)
    return bytes(changed)


def _flip(changed: bytearray, place: int, random: np.random.Generator) -> None:
    changed[place] ^= 1 << int(random.integers(8))


def _noise(changed: bytearray, place: int, random: np.random.Generator) -> None:
    length = int(random.integers(1, 9))
    changed[place : place + length] = random.bytes(length)


def _telling(changed: bytearray, place: int, random: np.random.Generator) -> None:
    value, length = int(random.choice(np.array(_TELLING, np.uint64))), 1 << int(random.integers(4))
    changed[place : place + length] = (value % (1 << 8 * length)).to_bytes(length, "little")


def _near(changed: bytearray, place: int, random: np.random.Generator) -> None:
    """A number of four or eight bytes becomes a little more or less."""
    length = int(random.choice([4, 8]))
    value = int.from_bytes(changed[place : place + length], "little") + int(random.integers(-9, 10))
    changed[place : place + length] = (value % (1 << 8 * length)).to_bytes(length, "little")


def _copied(changed: bytearray, place: int, random: np.random.Generator) -> None:
    """Copy what is elsewhere in the file."""
    length, source = int(random.integers(4, 65)), int(random.integers(len(changed)))
    part = bytes(changed[source : source + length])[: len(changed) - place]
    changed[place : place + len(part)] = part


def _cut(changed: bytearray, place: int, random: np.random.Generator) -> None:
    if random.integers(8) == 0:
        del changed[max(place, 16) :]


_CHANGES = (_flip, _noise, _telling, _telling, _near, _copied, _cut)


@dataclass
class Ended:
    """How a process ended: what `action` returned, or what was wrong."""

    result: int
    wrong: str


def in_process(action: Callable[[], int], stored: int) -> Ended:
    """The action (0 to 99 is what it returns) in a forked process: no more than ten seconds of its
    processor time, no more than 200 MB of memory beyond what is stored, no exception.
    """
    with tempfile.TemporaryFile() as said:
        child = os.fork()
        if child == 0:
            faulthandler.disable()  # a crash is told by its signal
            os.dup2(said.fileno(), 2)
            sys.stderr = os.fdopen(2, "w")  # what pytest has put there writes elsewhere
            code = 120
            try:
                code = _limited(action, stored)
            except BaseException:  # whatever it is, it is said by the parent
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(code)
        _, status = os.waitpid(child, 0)
        said.seek(0)
        text = said.read().decode(errors="replace")[-2000:]
    if os.WIFSIGNALED(status):
        name = signal.Signals(os.WTERMSIG(status)).name
        return Ended(-1, f"ended by {name}\n{text}")
    code = os.WEXITSTATUS(status)
    return Ended(code, text if code >= 100 else "")


def _limited(action: Callable[[], int], stored: int) -> int:
    used = resource.getrusage(resource.RUSAGE_SELF)
    end = int(used.ru_utime + used.ru_stime) + _SECONDS
    resource.setrlimit(resource.RLIMIT_CPU, (end, end + 1))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    Path("/proc/self/clear_refs").write_text("5")  # the peak is what there is now
    before = peak_of_memory()
    code = action()
    taken = peak_of_memory() - before
    if taken > 200_000_000 + stored:
        print(f"{taken:,} bytes of memory for {stored:,} that are stored", file=sys.stderr)
        return 121
    return code
