"""The kernels for NVIDIA's GPUs, written for the package numba-cuda, which takes the place of numba's own numba.cuda.

Python arranges that when it reads the package's .pth file: not in folders that PYTHONPATH names (`pip install --target`, wheels beside an
environment). There it is done here, before numba.cuda is imported.
"""

import importlib
from contextlib import suppress

with suppress(ImportError):
    importlib.import_module("_numba_cuda_redirector")
