"""Memory that the ranks of one node share: every rank sees the others' blocks in place, and counters tell when something is there.

The protocol: write into a block, `post` a counter of one's own; the others `wait` for the value, then read the block where it lies. Posting
makes what was written before it visible, and what is read after a wait is what was posted. Counters start at 0 and only grow.
"""

import os
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hpczero.comm.progress import Progress
from hpczero.comm.shared_memory import PAGE, SharedBlocks
from hpczero.comm.status import Place, Status

if TYPE_CHECKING:
    from hpczero.comm.world import World

_LINE = 64  # bytes: a counter has a cache line to itself, so that a rank that waits does not slow down one that posts another
_STRIDE = _LINE // 8
_EAGER = 0.002  # seconds of a wait in which the rank only lets others go first; then it sleeps between two looks
_NAP = 0.0001


class NodeWindow:
    """Build it with `NodeWindow.allocate`. `.ranks` share it; `.index` is this rank's place among them."""

    def __init__(self, name: str, world: "World", ranks: Sequence[int], shared: SharedBlocks, counters: int) -> None:
        self.name = name
        self.ranks = tuple(ranks)
        self.index = self.ranks.index(world.rank)
        head = counters * _LINE  # each rank's counters lie before its part
        self._counters = [block[:head].cast("q") for block in shared.blocks]
        self._parts = [_tensor(block[_up(head) :]) for block in shared.blocks]
        self._shared = shared
        self._world = world
        self._status: Status = world.status
        self._progress: Progress = world.progress

    @classmethod
    def allocate(cls, world: "World", ranks: Sequence[int], size: int, counters: int = 64, name: str = "shared") -> "NodeWindow":
        """Collective over `ranks`, which share a node: each contributes a part of `size` bytes, of its own choice. InputError on all of
        them if the node has not that much to share.
        """
        head = counters * _LINE
        return cls(name, world, ranks, world.share_memory(ranks, f"window {name}", _up(head) + size, head), counters)

    def part(self, index: int) -> Tensor:
        """The part of `ranks[index]` as bytes, beginning at a page. It takes up room only where it has been written to, by preference of
        its owner (the first to touch a page decides which memory of the node it lies in); nobody may rely on what is in it before.
        """
        return self._parts[index]

    def post(self, counter: int, value: int) -> None:
        """Set a counter of this rank."""
        self._shared.order()
        self._counters[self.index][counter * _STRIDE] = value

    def seen(self, index: int, counter: int) -> int:
        """What `ranks[index]` has posted last."""
        value = self._counters[index][counter * _STRIDE]
        self._shared.order()
        return value

    def reached(self, counter: int, value: int) -> bool:
        """Whether all ranks' counters are at `value` or beyond."""
        at = counter * _STRIDE
        for counters in self._counters:
            if counters[at] < value:
                return False
        self._shared.order()
        return True

    def wait(self, counter: int, value: int) -> None:
        """Until all have reached it. Messages under way go on meanwhile, and the core is left to others."""
        if self.reached(counter, value):
            return
        label = f"counter {counter} of window {self.name} to reach {value}"
        place = Place(label.encode()[:64], ranks=self._world.numbers(self.ranks))
        self._status.waits(place, lambda: self._world.numbers(self.missing(counter, value)))
        patience = time.monotonic() + _EAGER
        try:
            while not self.reached(counter, value):
                if not self._progress.advance():
                    os.sched_yield() if time.monotonic() < patience else time.sleep(_NAP)
        finally:
            self._status.goes_on()

    def missing(self, counter: int, value: int) -> list[int]:
        """The ranks that have not reached it."""
        return [rank for rank, counters in zip(self.ranks, self._counters, strict=True) if counters[counter * _STRIDE] < value]

    def close(self) -> None:
        """Collective. Tensors on the parts must not be used any more."""
        self._parts.clear()
        self._counters.clear()
        self._world.unshare_memory(self._shared, self.ranks)


def _up(size: int) -> int:
    return -(-size // PAGE) * PAGE


def _tensor(memory: memoryview) -> Tensor:
    return torch.frombuffer(memory, dtype=torch.uint8) if len(memory) else torch.empty(0, dtype=torch.uint8)
