"""numba.cuda, of the package numba-cuda, and stand-ins for device functions in its simulator.

The package replaces numba's own deprecated one. Python arranges that when it reads the package's
.pth file. It reads none in folders that PYTHONPATH names (`pip install --target`, wheels beside an
environment); there this module does the same, before any import of numba.cuda.

The stand-ins are functions of `intrinsics` in plain Python on the CPU's memory.
"""

import ctypes
import importlib
import math
from contextlib import suppress

import numpy as np
import torch

from hpczero_kernels.dispatch import SIMULATED

with suppress(ImportError):
    importlib.import_module("_numba_cuda_redirector")

from numba import cuda, float32, uint32

if not SIMULATED and getattr(cuda, "implementation", "") != "NVIDIA":
    raise ImportError(
        f"numba.cuda is numba's own ({cuda.__file__}):"
        " the package numba-cuda is missing, or shadowed on the path"
    )

inner = cuda.jit(device=True)
_MOST_THREADS = 1024  # of a block


def moved(address, distance):
    return (int(address) + int(distance)) % 2**64


def load16(address, offset):
    return tuple(uint32(word) for word in _four_words(address, offset))


def store16(address, offset, words):
    _four_words(address, offset)[:] = [int(word) for word in words]


def load4(address, offset):
    return uint32(ctypes.c_uint32.from_address(int(address) + int(offset)).value)


def load2(address, offset):
    return uint32(ctypes.c_uint16.from_address(int(address) + int(offset)).value)


def load1(address, offset):
    return uint32(ctypes.c_uint8.from_address(int(address) + int(offset)).value)


def store4(address, offset, word):
    ctypes.c_uint32.from_address(int(address) + int(offset)).value = int(word)


def store2(address, offset, word):
    ctypes.c_uint16.from_address(int(address) + int(offset)).value = int(word) & 0xFFFF


def store1(address, offset, word):
    ctypes.c_uint8.from_address(int(address) + int(offset)).value = int(word) & 0xFF


def number_of(bits):
    return np.uint32(bits).view(np.float32)


def bits_of(number):
    return np.float32(number).view(np.uint32)


def from_fp16x2(word):
    return tuple(float32(half) for half in np.array([word], np.uint32).view(np.float16))


def to_fp16x2(low, high):
    return _packed(low, high, torch.float16)


def to_bf16x2(low, high):
    return _packed(low, high, torch.bfloat16)


def product(left, right):
    return float32(left) * float32(right)


def exp(value):
    with np.errstate(over="ignore"):
        return np.exp(float32(value))


def erf(value):
    return float32(math.erf(value))


def sqrt(value):
    with np.errstate(invalid="ignore"):
        return np.sqrt(float32(value))


@inner
def block_sum(value):
    return _combine(value, sum)


@inner
def block_sums(first, second):
    return _combine(first, sum), _combine(second, sum)


@inner
def block_max(value):
    return _combine(value, max)


@inner
def warp_max(word):
    words = cuda.shared.array(_MOST_THREADS, uint32)
    cuda.syncthreads()
    words[cuda.threadIdx.x] = word
    cuda.syncthreads()
    first = cuda.threadIdx.x // 32 * 32
    return uint32(max(words[first : first + 32]))


@inner
def _combine(value, combine):
    values = cuda.shared.array(_MOST_THREADS, float32)
    cuda.syncthreads()
    values[cuda.threadIdx.x] = value
    cuda.syncthreads()
    return float32(combine([float32(values[thread]) for thread in range(cuda.blockDim.x)]))


def _packed(low, high, dtype):
    pair = torch.tensor([float(low), float(high)], dtype=torch.float32)
    halves = pair.to(dtype).view(torch.int16)
    return uint32(int(halves[0]) & 0xFFFF | (int(halves[1]) & 0xFFFF) << 16)


def _four_words(address, offset):
    """Return 16 bytes of memory; an unaligned access, which makes a GPU unusable, is refused."""
    start = int(address) + int(offset)
    assert start % 16 == 0, f"an access of 16 bytes at address {start}"
    return (ctypes.c_uint32 * 4).from_address(start)
