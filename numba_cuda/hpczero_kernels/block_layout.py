"""Blocks of keys that blocks of queries see: the layout of block-sparse attention, plain data."""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

KEPT = 4  # of what is made of a layout: each batch may have other documents


@dataclass(frozen=True, eq=False)
class BlockLayout:
    """Blocks of keys that blocks of queries see, for one number of positions.

    A layout equals itself alone: who makes one keeps it, and what is made of it for a call is kept
    with it for the next ones.
    """

    block: int  # positions in a block; the last block may be shorter
    causal: bool  # a query sees no later key, and no row has a block behind it
    patterns: tuple[tuple[tuple[int, ...], ...], ...]  # pattern -> queries' block -> keys' blocks
    of_head: tuple[int, ...]  # head of queries -> its pattern; keys' blocks are in ascending order
    _kept: dict[str, OrderedDict[Any, Any]] = field(init=False, default_factory=dict, repr=False)

    def kept(self, what: str, key: Hashable, make: Callable[[], Any]) -> Any:
        """Return what was made for this key, or is made now; the latest few are kept."""
        kept = self._kept.setdefault(what, OrderedDict())
        if key not in kept:
            kept[key] = make()
            while len(kept) > KEPT:
                kept.popitem(last=False)
        kept.move_to_end(key)
        return kept[key]
