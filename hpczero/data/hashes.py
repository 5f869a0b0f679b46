"""Hashes of many 64-bit integers at once: those of `hpczero.hashing` (pure)."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from hpczero.hashing import GOLDEN, MASK, MIXERS, mix

Hashes = np.ndarray[Any, np.dtype[np.uint64]]

_SALT = {"train": 0x6D61736B, "validation": 0x76616C69}


def mix_all(values: Hashes) -> Hashes:
    """Map 64-bit values one to one to well-mixed ones: `hashing.mix` of each."""
    values = values + np.uint64(GOLDEN)
    for shift, factor in MIXERS:
        values = (values ^ values >> np.uint64(shift)) * np.uint64(factor)
    return values ^ values >> np.uint64(31)


def below(draws: Hashes, end: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return a number below `end` for each hash."""
    return ((draws >> np.uint64(32)) * np.uint64(end) >> np.uint64(32)).astype(np.int64)


def draws(seed: int, split: str, samples: Sequence[int], use: int, count: int) -> Hashes:
    """Return hashes [samples, count] for one use of these samples of a run."""
    key = mix(mix(seed & MASK) ^ _SALT[split] ^ use << 32)
    numbers = mix_all(np.array(samples, np.uint64) ^ np.uint64(key))
    return mix_all(numbers[:, None] ^ np.arange(count, dtype=np.uint64))
