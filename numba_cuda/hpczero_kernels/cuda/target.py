"""numba.cuda, as the package numba-cuda has it: it takes the place of numba's own, which is deprecated.

Python arranges that when it reads the package's .pth file: not in folders that PYTHONPATH names (`pip install --target`, wheels beside an
environment). There it is done here, before anybody imports numba.cuda.
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
        f"numba.cuda is numba's own ({cuda.__file__}): the package numba-cuda is missing, or shadowed on the path"
    )
