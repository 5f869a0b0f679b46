"""How operations on each column alone are laid out: a block of threads has a tile of columns, and takes every so many-th row of them.

A thread has eight neighbouring columns, so that what belongs to a column (a bias, the sum that is its gradient) stays in its registers.
"""

from numba import uint64

from hpczero_kernels.cuda.intrinsics import WARP, inner
from hpczero_kernels.cuda.launch import THREADS, Size, blocks
from hpczero_kernels.cuda.target import cuda
from hpczero_kernels.cuda.vectors import EIGHT

_ROWS = 4  # of a block, where nothing is summed over rows
_MOST = 65535  # blocks along y
_BLOCKS = 528  # where something is: four for each multiprocessor of the largest GPUs, the same everywhere


@inner
def own_column():
    """The first of a thread's eight columns."""
    return (uint64(cuda.blockIdx.x) * uint64(cuda.blockDim.x) + uint64(cuda.threadIdx.x)) * uint64(EIGHT)


def threads_for(columns: int) -> int:
    return min(THREADS, WARP * blocks(max(1, columns), WARP * EIGHT))


def grid_over(rows: int, columns: int) -> Size:
    return blocks(columns, threads_for(columns) * EIGHT), min(_MOST, blocks(rows, _ROWS))


def grid_with_sums(rows: int, columns: int) -> Size:
    across = blocks(columns, threads_for(columns) * EIGHT)
    return across, min(rows, blocks(_BLOCKS, max(1, across)))
