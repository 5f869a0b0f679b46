"""Import of numba.cuda from the package numba-cuda, which replaces numba's own deprecated one.

Python arranges that when it reads the package's .pth file. It reads none in folders that
PYTHONPATH names (`pip install --target`, wheels beside an environment); there this module does the
same, before any import of numba.cuda.
"""

import importlib
from contextlib import suppress

from hpczero_kernels.dispatch import SIMULATED

with suppress(ImportError):
    importlib.import_module("_numba_cuda_redirector")

from numba import cuda

__all__ = ["cuda"]

if not SIMULATED and getattr(cuda, "implementation", "") != "NVIDIA":
    raise ImportError(
        f"numba.cuda is numba's own ({cuda.__file__}):"
        " the package numba-cuda is missing, or shadowed on the path"
    )
