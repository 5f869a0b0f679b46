"""The C library's malloc: what it has given out, and what it keeps when that is freed."""

import ctypes

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
_OLDER = 32 << 20  # older versions take no larger threshold


def keep_free_memory() -> dict[str, int]:
    """Keep freed memory for the next step, which needs as much; return the parameters accepted.

    If it went back to the kernel, the kernel would clear it again, page by page, every time.
    Nothing is changed if the environment configures malloc.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if not mallopt or env.tells_malloc():
        return {}
    accepted = {}
    for name, (parameter, value) in _KEEP.items():
        smaller = next((size for size in (value, _OLDER) if mallopt(parameter, size)), None)
        if smaller is not None:
            accepted[name] = smaller
    return accepted


def give_back_free_memory() -> None:
    """Return freed memory to the kernel."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim:
        trim(0)
