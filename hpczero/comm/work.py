"""Operations under way. Each is a generator that yields the MPI requests it waits for; blocking is starting and waiting.

Whoever waits for one operation moves all of them: a rank that waits here may be what another rank, waiting elsewhere, needs.
"""

import os
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

from hpczero.comm.ledger import Entry

Steps = Generator[Sequence[Any], None, None]  # yields requests; an empty yield means "not yet: ask again"


@dataclass(frozen=True)
class Limits:
    """Sizes in bytes: of the buffers that arriving pieces are kept in until they are summed, and of the largest single message."""

    staging: int = 4 << 20
    message: int = 1 << 30


class Work:
    """An operation under way; its tensors belong to it until `wait()` has returned or `poll()` has said True.

    `wait()` orders: what follows it sees the result. On the CPU that means the host waits; a backend whose operations run on an
    accelerator's stream makes the stream wait, not the host.
    """

    def __init__(self, progress: "Progress", steps: Steps, entry: Entry) -> None:
        self.done = False
        self.requests: Sequence[Any] = ()
        self._progress = progress
        self._steps = steps
        self._entry = entry

    def wait(self) -> None:
        if self.done:
            return
        begun = time.perf_counter()
        self._progress.finish(self)
        self._entry.seconds += time.perf_counter() - begun

    def poll(self) -> bool:
        """Move everything that can move; say whether this operation is done."""
        if not self.done:
            self._progress.advance()
        return self.done

    def resume(self) -> None:
        """The requests are complete: take the next step."""
        self.requests = ()
        try:
            self.requests = next(self._steps)
        except StopIteration:
            self.done = True
        except BaseException:
            self.done = True
            raise


class Progress:
    """All operations under way in this process, oldest first."""

    def __init__(self, request_class: Any) -> None:
        self._request_class = request_class
        self._under_way: list[Work] = []

    def start(self, steps: Steps, entry: Entry) -> Work:
        work = Work(self, steps, entry)
        self._under_way.append(work)
        self._resume(work)
        return work

    def advance(self) -> bool:
        """Take every step whose requests are complete; say whether there was one."""
        moved = False
        for work in tuple(self._under_way):
            while not work.done and self._request_class.Testall(work.requests):
                self._resume(work)
                if not work.requests:
                    break
                moved = True
            moved |= work.done
        return moved

    def finish(self, work: Work) -> None:
        while not work.done:
            if len(self._under_way) == 1:
                self._request_class.Waitall(work.requests)
                self._resume(work)
            elif not self.advance():
                os.sched_yield()

    def _resume(self, work: Work) -> None:
        try:
            work.resume()
        finally:
            if work.done:
                self._under_way.remove(work)
