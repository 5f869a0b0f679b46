"""PTX and registers of compiled CUDA kernels, without a GPU.

This needs numba-cuda and the compiler's libraries; registers need NVIDIA's assembler.
"""

import re
import shutil
import subprocess
import sysconfig
from functools import cache
from importlib import util
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from hpczero_kernels.dispatch import SIMULATED

CAPABILITY = (9, 0)


@cache
def missing() -> str:
    """Return the reason why kernels cannot be compiled here, "" if they can."""
    if SIMULATED:
        return "the simulator compiles nothing"
    for package in ("numba_cuda.numba", "cuda.bindings", "cuda.core"):
        if not util.find_spec(package.partition(".")[0]) or not util.find_spec(package):
            return f"the package of {package} is not installed: pip install '.[cuda]'"
    return ""


def compiled(kernel: Any) -> str:
    """Return the kernel's PTX.

    numba asks the current device for its capability where one function calls another; the mock
    answers, as there is no device.
    """
    from numba.cuda import dispatcher

    with mock.patch.object(
        dispatcher,
        "get_current_device",
        return_value=SimpleNamespace(compute_capability=CAPABILITY),
    ):
        return str(kernel.ptx(CAPABILITY))


@cache
def assembler() -> str | None:
    """Return the path of ptxas, from PyPI (nvidia-cuda-nvcc) or of a toolkit on this machine.

    Its release must be the compiler's or a later one.
    """
    installed = Path(sysconfig.get_path("purelib")) / "nvidia" / "cu13" / "bin" / "ptxas"
    return str(installed) if installed.is_file() else shutil.which("ptxas")


def assembled(text: str, folder: Path, registers: int | None) -> tuple[int, int]:
    """Return the registers of a thread, and the bytes that are spilled."""
    source = folder / "kernel.ptx"
    source.write_text(text)
    limit = [f"--maxrregcount={registers}"] if registers else []
    command = [
        str(assembler()),
        f"-arch=sm_{CAPABILITY[0]}{CAPABILITY[1]}",
        "-v",
        *limit,
        "-o",
        str(folder / "kernel.cubin"),
        str(source),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    (used,) = re.findall(r"Used (\d+) registers", done.stderr)
    ((frame, stores, loads),) = re.findall(
        r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", done.stderr
    )
    return int(used), int(frame) + int(stores) + int(loads)


def accesses(text: str, what: str) -> int:
    """Count the 128-bit accesses of global memory: what = "ld" or "st"."""
    return len(re.findall(rf"\b{what}\.global(?:\.\w+)*\.v4\.[usfb]32\b", text))
