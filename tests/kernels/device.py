"""Where the tests of the operators run: on a GPU if there is one; else on the CPU, by the references, or (NUMBA_ENABLE_CUDASIM=1) by numba's
simulator of the CUDA kernels, which is slow: shapes are small there.
"""

import torch
from torch import Tensor

from hpczero_kernels.dispatch import SIMULATED

DEVICE = "cuda" if torch.cuda.is_available() and not SIMULATED else "cpu"
KERNELS = SIMULATED or DEVICE == "cuda"  # are what runs


def drawn(shape: tuple[int, ...], seed: int, dtype: torch.dtype, offset: int = 0) -> Tensor:
    """Normal values; the first of them lies `offset` elements behind where an allocation begins."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    buffer = torch.full((values.numel() + offset,), float("nan"), dtype=dtype, device=DEVICE)
    return buffer[offset:].view(shape).copy_(values)


def distance(left: Tensor, right: Tensor) -> float:
    return float((left.double() - right.double()).norm())


def size(exact: Tensor) -> float:
    """Of values that come from normal ones: what cancels to nearly nothing has their rounding all the same."""
    return max(float(exact.norm()), exact.numel() ** 0.5)
