"""Random numbers by address: Philox words, and normally distributed initial values made of them.

Philox 4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011): a number is
a function of a 64-bit key (its purpose) and a 128-bit counter (its index), never of what was drawn
before. A rank can therefore compute just the numbers that it holds. Every block of the counter
gives four 32-bit words: word `i` of stream `s` is lane `i % 4` of block `(i // 4, s)`.

Element i of a parameter's initial values depends on the parameter's key and i alone. Box-Muller
(Box and Muller, Annals of Mathematical Statistics 29, 1958) on pairs of Philox words: words 2j and
2j+1 give the elements 2j (cosine) and 2j+1 (sine).
"""

from hashlib import blake2b
from math import pi, sqrt

import numpy as np
import torch
from numba import float32, int32, int64, njit, uint32, uint64

from hpczero_kernels.cpu import INLINE, Pool, bits_as, inner, kernel

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_MASK = 0xFFFFFFFF


def key_of(*parts: int | str) -> int:
    """Return the 64-bit key for a purpose, e.g. key_of(seed, "initial", name)."""
    return int.from_bytes(blake2b(repr(parts).encode(), digest_size=8).digest(), "little")


def words_at(key: int, streams: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Return word `position` of each stream, on the device of the streams and positions (int64).

    The words are int64, as torch has no arithmetic on uint32.
    """
    streams, positions = torch.broadcast_tensors(streams, positions)
    block = positions >> 2
    lane = positions & 3
    counter = [block & _MASK, block >> 32, streams & _MASK, (streams >> 32) & _MASK]
    low_key = key & _MASK
    high_key = key >> 32
    for _ in range(10):
        # A product of two 32-bit numbers may wrap around in int64; its bits are right all the same.
        product0 = counter[0] * _MULTIPLIERS[0]
        product1 = counter[2] * _MULTIPLIERS[1]
        counter = [
            ((product1 >> 32) & _MASK) ^ counter[1] ^ low_key,
            product1 & _MASK,
            ((product0 >> 32) & _MASK) ^ counter[3] ^ high_key,
            product0 & _MASK,
        ]
        low_key = (low_key + _WEYL[0]) & _MASK
        high_key = (high_key + _WEYL[1]) & _MASK
    return torch.stack(counter).gather(0, lane[None])[0]


def words_reference(key: int, stream: int, first: int, count: int) -> torch.Tensor:
    """Return words first .. first + count - 1 of a stream, as int64 [count]."""
    streams = torch.tensor(stream, dtype=torch.int64)
    return words_at(key, streams, torch.arange(first, first + count, dtype=torch.int64))


@inner
def block_of_words(key, stream, block):
    """Return the four words of one block, as words_reference does, in numba kernels."""
    low_key, high_key = uint32(key), uint32(key >> uint64(32))
    word0, word1 = uint32(block), uint32(block >> uint64(32))
    word2, word3 = uint32(stream), uint32(stream >> uint64(32))
    for _ in range(10):
        product0 = uint64(word0) * uint64(0xD2511F53)
        product1 = uint64(word2) * uint64(0xCD9E8D57)
        word0 = uint32(uint32(product1 >> uint64(32)) ^ word1 ^ low_key)
        word1 = uint32(product1)
        word2 = uint32(uint32(product0 >> uint64(32)) ^ word3 ^ high_key)
        word3 = uint32(product0)
        low_key = uint32(low_key + uint32(0x9E3779B9))
        high_key = uint32(high_key + uint32(0xBB67AE85))
    return word0, word1, word2, word3


@kernel("void(uint64, uint64, uint64, uint32[::1])")
def _fill_words(key, stream, first, out):
    for index in range(out.size):
        position = first + uint64(index)
        out[index] = block_of_words(key, stream, position >> uint64(2))[position & uint64(3)]


def words(key: int, stream: int, first: int, count: int) -> torch.Tensor:
    """Compute words_reference by the numba kernel."""
    out = np.empty(count, np.uint32)
    _fill_words(np.uint64(key), np.uint64(stream), np.uint64(first), out)
    return torch.from_numpy(out.astype(np.int64))


# Normally distributed initial values
#
# The kernel computes logarithm, sine and cosine in fp32 by the polynomials of the Cephes library
# (Moshier, "Methods and Programs for Mathematical Functions", 1989), with additions, products and
# a square root only. These are rounded alike on every processor, and a loop over them becomes
# vector instructions.

# The rule from words to values. A change of it changes every initial value; checkpoints store the
# rule by which a run began. Rule 1 was in fp64, by the C library's functions.
RULE = 2

_BLOCKS = 128  # of four words, in a stretch that stays in the nearest cache
_SQRT_HALF = 0x3F3504F3  # bits of sqrt(1/2) in fp32
_LN_2 = (float32(0.693359375), float32(-2.12194440e-4))  # in two parts: the first has few bits
_LOG = tuple(
    float32(c) for c in (
        7.0376836292e-2, -1.1514610310e-1, 1.1676998740e-1, -1.2420140846e-1, 1.4249322787e-1,
        -1.6668057665e-1, 2.0000714765e-1, -2.4999993993e-1, 3.3333331174e-1,
    )
)  # fmt: skip
_SIN = tuple(float32(c) for c in (-1.9515295891e-4, 8.3321608736e-3, -1.6666654611e-1))
_COS = tuple(
    float32(c) for c in (2.443315711809948e-5, -1.388731625493765e-3, 4.166664568298827e-2)
)
_TURN = float32(2 * pi * 2.0**-32)  # the angle of one unit of a word
_HALF, _ONE, _TWO = float32(0.5), float32(1), float32(2)

# Inlined into the loop that calls it, which then becomes vector instructions.
_words = njit(inline="always")(block_of_words.py_func)


def normal_reference(key: int, first: int, count: int, std: float) -> torch.Tensor:
    """Return elements first .. first + count - 1, in fp64 from the same uniform numbers."""
    start = first // 2 * 2
    stop = (first + count + 1) // 2 * 2
    pairs = words_reference(key, 0, start, stop - start).view(-1, 2)
    uniform = ((pairs[:, 0] >> 1).float() + 1).double() * 2.0**-31  # in (0, 1], of 24 bits
    angle = 2.0 * pi * pairs[:, 1].double() * 2.0**-32
    radius = torch.sqrt(-2.0 * torch.log(uniform))
    values = torch.stack([radius * torch.cos(angle), radius * torch.sin(angle)], dim=1)
    return (values.flatten() * std)[first - start : first - start + count].float()


@inner
def _radius(word):
    """Return sqrt(-2 ln u) of the uniform number u = (word // 2 + 1) / 2^31."""
    bits = bits_as(float32(int32(word >> uint32(1))) + _ONE, uint32)
    shifted = uint32(bits + uint32(0x3F800000 - _SQRT_HALF))
    exponent = float32(int32(shifted >> uint32(23)) - int32(127 + 31))
    mantissa = uint32(uint32(shifted & uint32(0x7FFFFF)) + uint32(_SQRT_HALF))
    x = bits_as(mantissa, float32) - _ONE  # sqrt(1/2) - 1 .. sqrt(2) - 1
    square = x * x
    series = _LOG[0]
    for c in _LOG[1:]:
        series = series * x + c
    low = x * square * series + exponent * _LN_2[1] - _HALF * square
    return sqrt(-_TWO * (x + low + exponent * _LN_2[0]))


@inner
def _cosine_and_sine(word):
    """Return both for the angle word / 2^32 of a turn, by the angle to the nearest quarter."""
    quarter = uint32(uint32(word + uint32(1 << 29)) >> uint32(30))
    y = float32(int32(uint32(word - uint32(quarter << uint32(30))))) * _TURN
    square = y * y
    sine = ((_SIN[0] * square + _SIN[1]) * square + _SIN[2]) * square * y + y
    cosine = (
        ((_COS[0] * square + _COS[1]) * square + _COS[2]) * square * square - _HALF * square + _ONE
    )
    odd = uint32(quarter & uint32(1)) != uint32(0)
    minus_cosine = uint32(uint32(uint32(quarter + uint32(1)) & uint32(2)) << uint32(30))
    minus_sine = uint32(uint32(quarter & uint32(2)) << uint32(30))
    along, across = (sine, cosine) if odd else (cosine, sine)
    return (
        bits_as(uint32(bits_as(along, uint32) ^ minus_cosine), float32),
        bits_as(uint32(bits_as(across, uint32) ^ minus_sine), float32),
    )


@inner
def _pairs(words, angles, std, values, lane):
    """Set values[lane + 4i] and the next to the pair of words[i] and angles[i]."""
    for i in range(_BLOCKS):
        radius = std * _radius(words[i])
        cosine, sine = _cosine_and_sine(angles[i])
        values[lane + 4 * i] = radius * cosine
        values[lane + 4 * i + 1] = radius * sine


@kernel("void(uint64, uint64, float32, float32[::1])")
def _fill_normal(key, first, std, out):
    a = np.empty(_BLOCKS, np.uint32)
    b = np.empty(_BLOCKS, np.uint32)
    c = np.empty(_BLOCKS, np.uint32)
    d = np.empty(_BLOCKS, np.uint32)
    values = np.empty(4 * _BLOCKS, np.float32)
    skipped = int64(first & uint64(3))
    done = int64(0)
    block = first >> uint64(2)
    while done < out.size:
        for i in range(_BLOCKS):
            a[i], b[i], c[i], d[i] = _words(key, uint64(0), block + uint64(i))
        _pairs(a, b, std, values, 0)
        _pairs(c, d, std, values, 2)
        count = min(int64(4 * _BLOCKS) - skipped, out.size - done)
        for i in range(count):
            out[done + i] = values[skipped + i]
        done += count
        skipped = int64(0)
        block += uint64(_BLOCKS)


def fill_normal(out: torch.Tensor, key: int, first: int, std: float, pool: Pool = INLINE) -> None:
    """Fill out (fp32, contiguous) with elements first .. first + out.numel() - 1 of the key."""
    flat = out.view(-1).numpy()

    def run_slice(start: int, stop: int) -> None:
        _fill_normal(np.uint64(key), np.uint64(first + start), np.float32(std), flat[start:stop])

    pool.run(run_slice, flat.size)
