"""The twins of `intrinsics` for numba's CUDA simulator: the same functions in plain Python, on the memory of this computer."""

import ctypes
import math

import numpy as np
import torch
from numba import float32, uint32

from hpczero_kernels.cuda.target import cuda

inner = cuda.jit(device=True)
_MOST = 1024  # threads of a block


def moved(address, distance):
    return (int(address) + int(distance)) % 2**64


def load16(address, offset):
    return tuple(
        uint32(word)
        for word in (ctypes.c_uint32 * 4).from_address(_multiple(int(address) + int(offset), 16))
    )


def store16(address, offset, words):
    (ctypes.c_uint32 * 4).from_address(_multiple(int(address) + int(offset), 16))[:] = [
        int(word) for word in words
    ]


def load4(address, offset):
    return uint32(ctypes.c_uint32.from_address(int(address) + int(offset)).value)


def load2(address, offset):
    return uint32(ctypes.c_uint16.from_address(int(address) + int(offset)).value)


def store4(address, offset, word):
    ctypes.c_uint32.from_address(int(address) + int(offset)).value = int(word)


def store2(address, offset, word):
    ctypes.c_uint16.from_address(int(address) + int(offset)).value = int(word) & 0xFFFF


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
    return _of_block(value, sum)


@inner
def block_sums(first, second):
    return _of_block(first, sum), _of_block(second, sum)


@inner
def block_max(value):
    return _of_block(value, max)


@inner
def _of_block(value, combine):
    of_threads = cuda.shared.array(_MOST, float32)
    cuda.syncthreads()
    of_threads[cuda.threadIdx.x] = value
    cuda.syncthreads()
    return float32(combine([float32(of_threads[thread]) for thread in range(cuda.blockDim.x)]))


def _packed(low, high, dtype):
    halves = (
        torch.tensor([float(low), float(high)], dtype=torch.float32).to(dtype).view(torch.int16)
    )
    return uint32(int(halves[0]) & 0xFFFF | (int(halves[1]) & 0xFFFF) << 16)


def _multiple(address, size):
    """As on a GPU, where another address is an error that ends the process's use of it."""
    assert address % size == 0, f"an access of {size} bytes at address {address}"
    return address
