"""A background reader: while a step computes, the batches of the next ones are read."""

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

Item = TypeVar("Item")


class Prefetcher(Generic[Item]):
    """Calls `fetch(step)` for step = first, …, last (both included) in a thread that keeps up to `ahead` results waiting.

    `next` hands them out in order. What `fetch` raises is raised by the `next` that would have handed out its result.
    """

    def __init__(self, fetch: Callable[[int], Item], first: int, last: int, ahead: int) -> None:
        assert ahead >= 1, ahead
        self._fetch, self._steps, self._ahead = fetch, range(first, last + 1), ahead
        self._ready: deque[Item] = deque()
        self._handed_out = 0
        self._failure: BaseException | None = None
        self._closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._read, name="hpczero-prefetch", daemon=True)
        self._thread.start()

    def next(self) -> tuple[Item, float]:
        """The next step's item, and the seconds that the caller had to wait for it."""
        began = time.perf_counter()
        with self._changed:
            assert not self._closed, "next() after close()"
            assert self._handed_out < len(self._steps), f"all {len(self._steps)} items are handed out"
            self._changed.wait_for(lambda: self._ready or self._failure is not None)
            if not self._ready:
                assert self._failure is not None
                raise self._failure
            item = self._ready.popleft()
            self._handed_out += 1
            self._changed.notify_all()
        return item, time.perf_counter() - began

    def close(self) -> None:
        """Ends the thread, after the `fetch` that it is in; harmless when repeated."""
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
