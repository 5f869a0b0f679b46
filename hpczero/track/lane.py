"""A tracker behind a queue: the training thread puts items, a thread of its own writes them.

The queue has a limit: while it is full, items are dropped and counted, and the run does not wait.
Whatever a tracker raises ends the tracker, never the run.
"""

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from hpczero.errors import HpczeroError
from hpczero.text import printable
from hpczero.track.item import Item

_MOST = 10_000  # items that wait
_EVERY = 1.0  # seconds between two looks into the queue: nobody is woken for each item
_BATCH = 500  # items that are written at a time


class Tracker(Protocol):
    """A place for a run's figures; its methods may raise anything, and take long."""

    def write(self, items: Sequence[Item]) -> None: ...

    def close(self) -> None: ...

    def give_up(self) -> None:
        """Leave nothing behind that goes on; another thread is in one of the other methods."""


class Lane:
    """All methods but `wait` are for the training thread: they do not wait for the tracker."""

    def __init__(self, name: str, make: Callable[[], Tracker], most: int = _MOST) -> None:
        """`make` imports and begins the tracker, in the lane's thread."""
        self.name = name
        self._make = make
        self._most = most
        self._queue = deque[Item]()
        self._dropped = 0
        self._failure = ""
        self._said = set[str]()
        self._tracker: Tracker | None = None
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"track {name}", daemon=True)
        self._thread.start()

    def put(self, item: Item) -> None:
        if self._failure:
            return
        if len(self._queue) < self._most:
            self._queue.append(item)
        else:
            self._dropped += 1

    def problems(self) -> list[str]:
        """Return what is to be said by now, each thing once."""
        said = []
        if self._failure and "failure" not in self._said:
            self._said.add("failure")
            said.append(f"{self.name} gets no more of this run: {self._failure}")
        elif self._dropped and not self._said:
            self._said.add("slow")
            most = f"{self._most:,}"
            said.append(f"{self.name} is slow: {most} lines wait for it, further ones are dropped")
        return said

    def end(self) -> None:
        """Let the thread write what waits, and end."""
        self._ending.set()

    def wait(self, until: float) -> list[str]:
        """Wait for the end until this moment (`time.monotonic`); return what is to be said."""
        self._thread.join(max(0.0, until - time.monotonic()))
        said = self.problems()
        if self._thread.is_alive():
            said.append(f"{self.name} was not done in time at the end of this run: given up")
            if self._tracker:
                self._tracker.give_up()
        if self._dropped:
            said.append(f"{self.name} was slow: {self._dropped:,} lines for it were dropped")
        return said

    def _run(self) -> None:
        try:
            self._tracker = self._make()
            self._carry(self._tracker)
            self._tracker.close()
        except BaseException as error:  # of a library, or of the user's function
            kind = "" if isinstance(error, HpczeroError) else f"{type(error).__name__}: "
            self._failure = printable(f"{kind}{error}")
            self._queue.clear()
            if self._tracker:
                with contextlib.suppress(BaseException):
                    self._tracker.give_up()

    def _carry(self, tracker: Tracker) -> None:
        ends = False
        while not ends:
            ends = self._ending.wait(_EVERY)
            while self._queue:
                count = min(len(self._queue), _BATCH)
                tracker.write([self._queue.popleft() for _ in range(count)])
