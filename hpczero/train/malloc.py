"""The C library's malloc: what it has given out, and what it keeps when that is freed."""

import ctypes
import os
from collections.abc import Mapping
from pathlib import Path
from threading import Event, Thread

from hpczero import env

# The fields of glibc's struct mallinfo2, each a size_t.
_FIELDS = (
    *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
    *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
)


class _Mallinfo2(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in _FIELDS]


def given_out() -> int | None:
    """Return the bytes of all blocks in use; None if the process's malloc is not glibc's."""
    mallinfo2 = getattr(ctypes.CDLL(None), "mallinfo2", None)  # since glibc 2.33
    if mallinfo2 is None:
        return None
    mallinfo2.restype = _Mallinfo2
    now = mallinfo2()
    return now.uordblks + now.hblkhd or None  # 0: another malloc was preloaded


_LARGEST = (1 << 31) - 1
_KEEP = {  # glibc's parameter -> its number, the value to set
    "M_MMAP_THRESHOLD": (-3, 1 << 30),
    "M_TRIM_THRESHOLD": (-1, _LARGEST),
    "M_TOP_PAD": (-2, 64 << 20),
}
_KEEP_NONE = {name: (number, 128 << 10) for name, (number, _) in _KEEP.items()}  # glibc's own
_OLDER = 32 << 20  # older versions take no larger threshold
_PAGES = Path("/proc/self/statm")
_PAGE = os.sysconf("SC_PAGESIZE")
_LOOK_EVERY = 0.002  # seconds
_GROWTH = 0.01  # of what a process holds


def keep_free_memory() -> dict[str, int]:
    """Keep freed memory for the next step, which needs as much; return the parameters accepted.

    If it went back to the kernel, the kernel would clear it again, page by page, every time.
    Nothing is changed if the environment configures malloc.
    """
    return _tell(_KEEP)


def keep_no_free_memory() -> dict[str, int]:
    """Return each large block that is freed to the kernel; return the parameters accepted.

    It has to come before blocks that are kept. What is kept lies in pieces: with many micro-batches
    in flight, a process held twice what its tensors needed.
    """
    return _tell(_KEEP_NONE)


def _tell(parameters: Mapping[str, tuple[int, int]]) -> dict[str, int]:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if not mallopt or env.tells_malloc():
        return {}
    accepted = {}
    for name, (parameter, value) in parameters.items():
        smaller = next((size for size in (value, _OLDER) if mallopt(parameter, size)), None)
        if smaller is not None:
            accepted[name] = smaller
    return accepted


def give_back_free_memory() -> None:
    """Return the memory that is free now to the kernel."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim:
        trim(0)


class GivingBack:
    """A thread that gives back free memory whenever the process holds 1 % more, until `end`.

    What it holds then is what its tensors need, and little more. Blocks are as slow as where malloc
    keeps none.
    """

    def __init__(self) -> None:
        give_back_free_memory()
        self._ends = Event()
        self._thread = Thread(target=self._run, name="gives memory back", daemon=True)
        self._thread.start()

    def end(self) -> None:
        self._ends.set()
        self._thread.join()

    def _run(self) -> None:
        after_the_last = resident()
        while not self._ends.wait(_LOOK_EVERY):
            if resident() > after_the_last * (1 + _GROWTH):
                give_back_free_memory()
                after_the_last = resident()


def resident() -> int:
    """Return the bytes of this process that are resident; 0 if unknown."""
    try:
        return int(_PAGES.read_text().split()[1]) * _PAGE
    except OSError:
        return 0
