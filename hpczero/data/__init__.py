"""Corpora, tokens and samples; `hpczero.data.batches` gives them to a loop of one's own."""

from typing import Any

from hpczero import kernel_cache


def __getattr__(name: str) -> Any:
    """Import what needs torch when it is first used."""
    if name == "batches":
        return kernel_cache.load("hpczero.train.own_batches").batches
    raise AttributeError(f"module hpczero.data has no attribute {name}")
