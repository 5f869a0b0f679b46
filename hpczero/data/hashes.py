"""Hashes of many 64-bit integers at once: those of `hpczero.hashing` (pure)."""

from typing import Any

import numpy as np

from hpczero.hashing import GOLDEN

Hashes = np.ndarray[Any, np.dtype[np.uint64]]


def mix_all(values: Hashes) -> Hashes:
    """Map 64-bit values one to one to well-mixed ones: SplitMix64's step."""
    values = values + np.uint64(GOLDEN)
    values = (values ^ values >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ values >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return values ^ values >> np.uint64(31)


def below(draws: Hashes, end: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return a number below `end` for each hash."""
    return ((draws >> np.uint64(32)) * np.uint64(end) >> np.uint64(32)).astype(np.int64)
