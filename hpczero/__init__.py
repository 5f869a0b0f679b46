"""hpczero trains large transformers over MPI, from one declarative TOML spec."""

import importlib
from typing import TYPE_CHECKING, Any

from hpczero import env, kernel_cache

if TYPE_CHECKING:
    from hpczero import data
    from hpczero.comm.world import World
    from hpczero.train.initialize import Column, initialize

__all__ = ["Column", "World", "__version__", "data", "initialize"]
__version__ = env.VERSION

env.make_kernels_importable()


def __getattr__(name: str) -> Any:
    """Import what needs torch or MPI when it is first used."""
    if name in ("initialize", "Column"):
        return getattr(kernel_cache.load("hpczero.train.initialize"), name)
    if name == "data":
        return importlib.import_module("hpczero.data")
    if name == "World":
        from hpczero.comm.world import World

        return World
    raise AttributeError(f"module hpczero has no attribute {name}")
