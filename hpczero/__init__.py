"""hpczero trains large transformers over MPI, from one declarative TOML spec."""

from hpczero import locations

__version__ = "0.1.0.dev0"

locations.make_kernels_importable()
