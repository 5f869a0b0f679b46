"""What a numba kernel was compiled to."""

from typing import Any

from numba import njit


def assembly_of(kernel: Any) -> str:
    """numba shows no assembly of a kernel that came from its cache: compiled again, with the same options."""
    options = {name: value for name, value in kernel.targetoptions.items() if name != "nopython"}
    again = njit(kernel.nopython_signatures, **options)(kernel.py_func)
    return "".join(again.inspect_asm().values())


def is_vectorised(text: str, operation: str) -> bool:
    """Whether an x86 operation ("addps") is done on whole vector registers; true on other machines, where it has other names."""
    lines = [line for line in text.splitlines() if operation in line]
    return "%rsp" not in text or any("%ymm" in line or "%zmm" in line for line in lines)
