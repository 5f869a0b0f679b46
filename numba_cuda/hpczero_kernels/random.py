"""Random numbers by address: Philox 4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011).

A number is a function of a 64-bit key (what it is for) and a 128-bit counter (which one it is), never of what was drawn before; so a rank can compute
just the ones that it holds. Every block of the counter gives four 32-bit words: word `i` of stream `s` is lane `i % 4` of block `(i // 4, s)`.
"""

from hashlib import blake2b

import numpy as np
import torch
from numba import njit, uint32, uint64

from hpczero_kernels.sources import named_by_sources

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_MASK = 0xFFFFFFFF


def key_of(*parts: int | str) -> int:
    """The 64-bit key for a purpose, e.g. key_of(seed, "initial", name)."""
    return int.from_bytes(blake2b(repr(parts).encode(), digest_size=8).digest(), "little")


def words_at(key: int, streams: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Word `position` of each stream, as int64 (torch has no arithmetic on uint32), on the device of the streams and positions (int64)."""
    streams, positions = torch.broadcast_tensors(streams, positions)
    block, lane = positions >> 2, positions & 3
    counter = [block & _MASK, block >> 32, streams & _MASK, (streams >> 32) & _MASK]
    low_key, high_key = key & _MASK, key >> 32
    for _ in range(10):
        # a product of two 32-bit numbers may wrap around in int64; its bits are right all the same
        product0, product1 = counter[0] * _MULTIPLIERS[0], counter[2] * _MULTIPLIERS[1]
        counter = [
            ((product1 >> 32) & _MASK) ^ counter[1] ^ low_key,
            product1 & _MASK,
            ((product0 >> 32) & _MASK) ^ counter[3] ^ high_key,
            product0 & _MASK,
        ]
        low_key, high_key = (low_key + _WEYL[0]) & _MASK, (high_key + _WEYL[1]) & _MASK
    return torch.stack(counter).gather(0, lane[None])[0]


def words_reference(key: int, stream: int, first: int, count: int) -> torch.Tensor:
    """Words first .. first + count - 1 of a stream, as int64 [count]."""
    return words_at(key, torch.tensor(stream, dtype=torch.int64), torch.arange(first, first + count, dtype=torch.int64))


@njit("UniTuple(uint32, 4)(uint64, uint64, uint64)", nogil=True, cache=True)
@named_by_sources
def block_of_words(key, stream, block):
    """The four words of one block: the twin of words_reference for numba kernels."""
    low_key, high_key = uint32(key), uint32(key >> uint64(32))
    word0, word1 = uint32(block), uint32(block >> uint64(32))
    word2, word3 = uint32(stream), uint32(stream >> uint64(32))
    for _ in range(10):
        product0, product1 = uint64(word0) * uint64(0xD2511F53), uint64(word2) * uint64(0xCD9E8D57)
        word0 = uint32(uint32(product1 >> uint64(32)) ^ word1 ^ low_key)
        word1 = uint32(product1)
        word2 = uint32(uint32(product0 >> uint64(32)) ^ word3 ^ high_key)
        word3 = uint32(product0)
        low_key = uint32(low_key + uint32(0x9E3779B9))
        high_key = uint32(high_key + uint32(0xBB67AE85))
    return word0, word1, word2, word3


@njit("void(uint64, uint64, uint64, uint32[::1])", nogil=True, cache=True)
@named_by_sources
def _fill_words(key, stream, first, out):
    for index in range(out.size):
        position = first + uint64(index)
        out[index] = block_of_words(key, stream, position >> uint64(2))[position & uint64(3)]


def words(key: int, stream: int, first: int, count: int) -> torch.Tensor:
    """As words_reference, by the numba kernel."""
    out = np.empty(count, np.uint32)
    _fill_words(np.uint64(key), np.uint64(stream), np.uint64(first), out)
    return torch.from_numpy(out.astype(np.int64))
