"""Table of each operation's implementations, the best first; plain data without torch or numba.

torch   PyTorch's own operations; every other implementation is tested against them
numba   kernels for CPUs, where they were measured faster (docs/kernels.md)
cuda    kernels for NVIDIA GPUs, by the package numba-cuda; it is imported when the first kernel is
        chosen, and nowhere else
flex    PyTorch's flex attention, which compiles a kernel for NVIDIA GPUs (Dong et al. 2024)
"""

from dataclasses import dataclass
from importlib import util

TORCH, NUMBA, CUDA, FLEX = "torch", "numba", "cuda", "flex"
FLOATS = frozenset({"float32", "bfloat16", "float16"})
MIN_CAPABILITY = 8, 0  # compute capability that a GPU needs: its conversions to bf16


@dataclass(frozen=True)
class Implementation:
    """One implementation of an operation; `device` "" means any device, no dtypes any dtype."""

    name: str
    device: str = ""
    dtypes: frozenset[str] = frozenset()

    def takes(self, device: str, dtype: str) -> bool:
        return self.device in ("", device) and (not self.dtypes or dtype in self.dtypes)

    def missing_reason(self) -> str:
        """Return the reason why this environment lacks it, "" if it is available."""
        needed = {
            NUMBA: ("numba", "numba"),
            CUDA: ("numba_cuda", "numba-cuda"),
            FLEX: ("triton", "triton"),
        }
        if self.name == TORCH:
            return ""
        module, package = needed[self.name]
        spec = util.find_spec(module)
        # A folder of this name, as in a checkout, has a spec without an origin.
        if spec is not None and spec.origin is not None:
            return ""
        return f"the package {package} is not installed"


_TORCH = Implementation(TORCH)
_NUMBA = Implementation(NUMBA, "cpu", FLOATS)
_CUDA = Implementation(CUDA, "cuda", FLOATS)
_FLEX = Implementation(FLEX, "cuda", FLOATS)

TABLE: dict[str, tuple[Implementation, ...]] = {
    "adamw": (_CUDA, _NUMBA, _TORCH),
    "frozen_adamw": (_CUDA, _NUMBA, _TORCH),
    "lamb": (_CUDA, _NUMBA, _TORCH),
    "lion": (_CUDA, _NUMBA, _TORCH),
    "sum": (_CUDA, _NUMBA, _TORCH),
    "signs": (_CUDA, _NUMBA, _TORCH),
    "quantised": (_CUDA, _NUMBA, _TORCH),
    "norm": (_CUDA, _TORCH),
    "rms_norm": (_CUDA, _NUMBA, _TORCH),
    "gelu": (_CUDA, _TORCH),
    "glu": (_CUDA, _NUMBA, _TORCH),
    "dropout": (_CUDA, _NUMBA, _TORCH),
    "cross_entropy": (_CUDA, _TORCH),
    "block_sparse": (_FLEX, _NUMBA, _TORCH),
    "rotary": (_CUDA, _NUMBA, _TORCH),
    "soft_cap": (_CUDA, _NUMBA, _TORCH),
}


def available(device: str, capability: tuple[int, int] = MIN_CAPABILITY) -> dict[str, str]:
    """Return the implementation of each operation on a device, if shapes fit and none is forced.

    `device` is "cpu" or "cuda"; the latter stands for a GPU of this compute capability.
    """

    def can(implementation: Implementation) -> bool:
        old = implementation.name == CUDA and capability < MIN_CAPABILITY
        return (
            implementation.takes(device, "float32")
            and not old
            and not implementation.missing_reason()
        )

    return {
        operation: next(filter(can, implementations)).name
        for operation, implementations in TABLE.items()
    }
