"""Device of the operators' tests: a GPU if there is one, else the CPU.

On the CPU the references run, or (NUMBA_ENABLE_CUDASIM=1) numba's simulator of the CUDA kernels,
which is slow: shapes are small there.
"""

import torch
from torch import Tensor

from hpczero_kernels.dispatch import SIMULATED

DEVICE = "cuda" if torch.cuda.is_available() and not SIMULATED else "cpu"
KERNELS = SIMULATED or DEVICE == "cuda"  # True where the CUDA kernels run


def drawn(shape: tuple[int, ...], seed: int, dtype: torch.dtype, offset: int = 0) -> Tensor:
    """Return normal values that begin `offset` elements after the start of an allocation."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    buffer = torch.full((values.numel() + offset,), float("nan"), dtype=dtype, device=DEVICE)
    return buffer[offset:].view(shape).copy_(values)


def distance(left: Tensor, right: Tensor) -> float:
    return float((left.double() - right.double()).norm())


def size(exact: Tensor) -> float:
    """Return a scale for errors of results of normal values.

    Sums that cancel to nearly nothing still have the rounding of their terms.
    """
    return max(float(exact.norm()), exact.numel() ** 0.5)
