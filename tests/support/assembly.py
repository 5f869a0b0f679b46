"""Assembly of a compiled numba kernel."""

from typing import Any

from numba import njit


def assembly_of(kernel: Any) -> str:
    """Return the kernel's assembly, compiled again: numba shows none of a kernel from its cache."""
    options = {name: value for name, value in kernel.targetoptions.items() if name != "nopython"}
    again = njit(kernel.nopython_signatures, **options)(kernel.py_func)
    return "".join(again.inspect_asm().values())


def is_vectorised(text: str, operation: str) -> bool:
    """Return True if an x86 operation ("addps") is done on whole vector registers.

    On other machines, where it has other names, return True as well.
    """
    lines = [line for line in text.splitlines() if operation in line]
    return "%rsp" not in text or any("%ymm" in line or "%zmm" in line for line in lines)
