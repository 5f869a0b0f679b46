"""Samples of a run: their order, and a thread that reads them ahead.

The order is a pure function of integers, so neither the layout nor a restart changes it. A *window*
is a run of seq_len + 1 tokens of a split. Samples are numbered through all global batches of a run:
position p of step s (counted from 0) is sample s * global_batch + p. `window` maps a sample to its
window, `micro_batches_of` maps a rank to its positions in the global batch.
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from hpczero.hashing import GOLDEN, MASK, mix

_ROUNDS = 8
_SMALLEST_HALF = 2  # bits; below it a Feistel network reaches too few permutations


def window(seed: int, windows: int, index: int) -> int:
    """Return the window that sample `index` of the run reads.

    Every epoch visits every window once, in its own order: random access to a pseudo-random
    permutation, keyed by (seed, epoch). It is a Feistel network (Luby and Rackoff 1988) over the
    smallest power of 4 that holds all windows. A result past the last window is sent through again
    until it falls inside (cycle walking, Black and Rogaway 2002), less than four times on average.
    """
    assert windows > 0, windows
    assert index >= 0, index
    epoch, position = divmod(index, windows)
    half = max(_SMALLEST_HALF, ((windows - 1).bit_length() + 1) // 2)
    keys = _round_keys(seed, epoch)
    position = _permute(position, half, keys)
    while position >= windows:
        position = _permute(position, half, keys)
    return position


def micro_batches_of(rank: int, global_batch: int, micro_batch: int, ranks: int) -> list[range]:
    """Return the positions in the global batch that `rank` takes, one range per micro-batch.

    Every rank has ceil(global_batch / (micro_batch * ranks)) micro-batches. Over all ranks their
    sizes differ by at most one sample, and so do the ranks' totals. With more ranks than samples
    some are empty.
    """
    assert min(global_batch, micro_batch) > 0, (global_batch, micro_batch)
    assert 0 <= rank < ranks, (rank, ranks)
    accumulation = _accumulation(global_batch, micro_batch, ranks)
    slots = accumulation * ranks
    first = rank * accumulation
    return [
        range(slot * global_batch // slots, (slot + 1) * global_batch // slots)
        for slot in range(first, first + accumulation)
    ]


def micro_batch_counts(
    rank: int, global_batch: int, micro_batch: int, ranks: int
) -> dict[int, int]:
    """Count the micro-batches of `rank`: size -> how many have it."""
    accumulation, smallest, largest = micro_batch_sizes(global_batch, micro_batch, ranks)
    slots = accumulation * ranks
    first = rank * accumulation
    samples = (first + accumulation) * global_batch // slots - first * global_batch // slots
    larger = samples - accumulation * smallest
    counts = {smallest: accumulation - larger}
    if largest > smallest:
        counts[largest] = larger
    return {size: count for size, count in counts.items() if count}


def micro_batch_sizes(global_batch: int, micro_batch: int, ranks: int) -> tuple[int, int, int]:
    """Return the number of micro-batches of a rank, and the smallest and largest size of all."""
    accumulation = _accumulation(global_batch, micro_batch, ranks)
    slots = accumulation * ranks
    return accumulation, global_batch // slots, -(-global_batch // slots)


def _accumulation(global_batch: int, micro_batch: int, ranks: int) -> int:
    return -(-global_batch // (micro_batch * ranks))


def _permute(position: int, half: int, keys: list[int]) -> int:
    low = (1 << half) - 1
    left, right = position >> half, position & low
    for key in keys:
        left, right = right, left ^ (mix(right ^ key) >> 64 - half)
    return left << half | right


def _round_keys(seed: int, epoch: int) -> list[int]:
    state = mix(mix(seed) + epoch & MASK)
    return [mix(state + turn * GOLDEN & MASK) for turn in range(1, _ROUNDS + 1)]


# Reading ahead: while a step computes, a thread reads the batches of the next ones.
Item = TypeVar("Item")


class Prefetcher(Generic[Item]):
    """Call `fetch(step)` for step = first, …, last (both included) in a thread.

    Up to `ahead` results wait; `next` returns them in order. An exception of `fetch` is raised by
    the `next` that would have returned its result.
    """

    def __init__(self, fetch: Callable[[int], Item], first: int, last: int, ahead: int) -> None:
        assert ahead >= 1, ahead
        self._fetch = fetch
        self._steps = range(first, last + 1)
        self._ahead = ahead
        self._ready: deque[Item] = deque()
        self._handed_out = 0
        self._failure: BaseException | None = None
        self._closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._read, name="hpczero-prefetch", daemon=True)
        self._thread.start()

    def next(self) -> tuple[Item, float]:
        """Return the next step's item, and the seconds that the caller waited for it."""
        began = time.perf_counter()
        with self._changed:
            assert not self._closed, "next() after close()"
            assert self._handed_out < len(self._steps), (
                f"all {len(self._steps)} items are handed out"
            )
            self._changed.wait_for(lambda: self._ready or self._failure is not None)
            if not self._ready:
                assert self._failure is not None
                raise self._failure
            item = self._ready.popleft()
            self._handed_out += 1
            self._changed.notify_all()
        return item, time.perf_counter() - began

    def close(self) -> None:
        """End the thread after its current `fetch`; may be called again."""
        with self._changed:
            self._closed = True
            self._ready.clear()
            self._changed.notify_all()
        self._thread.join()

    def _read(self) -> None:
        try:
            for step in self._steps:
                with self._changed:
                    self._changed.wait_for(lambda: self._closed or len(self._ready) < self._ahead)
                    if self._closed:
                        return
                item = self._fetch(step)  # outside the lock: `next` must get at what is ready
                with self._changed:
                    self._ready.append(item)
                    self._changed.notify_all()
        except BaseException as failure:
            with self._changed:
                self._failure = failure
                self._changed.notify_all()
