"""What the C library does with memory that was freed; where it cannot be told, it does what it likes."""

import ctypes

from hpczero import env

_LARGEST = (1 << 31) - 1
_KEEP = {"M_MMAP_THRESHOLD": (-3, 1 << 30), "M_TRIM_THRESHOLD": (-1, _LARGEST), "M_TOP_PAD": (-2, 64 << 20)}  # names and numbers of glibc
_OLDER = 32 << 20  # older versions take no larger threshold


def keep_free_memory() -> dict[str, int]:
    """It stays for the next step, which needs as much: the kernel would clear it, page by page, every time. With what was accepted; nothing is
    changed where the environment says what malloc is to do.
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
    """To the kernel: it belongs to nothing."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim:
        trim(0)
