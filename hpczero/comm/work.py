"""Operations under way. Each is a generator that yields the MPI requests it waits for; blocking is starting and waiting.

Whoever waits for one operation moves all of them: a rank that waits here may be what another rank, waiting elsewhere, needs.
"""

import os
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any

from hpczero.comm.ledger import Entry
from hpczero.comm.status import Place, Status
from hpczero.comm.trace import Trace
from hpczero.errors import HpczeroError

What = tuple[str, str, int]  # axis, operation, the other rank of a message or -1
Steps = Generator[Sequence[Any], None, None]  # yields requests; an empty yield means "not yet: ask again"


class CommunicationError(HpczeroError):
    """The ranks of a group do not fit together."""


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

    def __init__(self, progress: "Progress", steps: Steps, entry: Entry, place: Place, what: What, size: int) -> None:
        self.done = False
        self.place = place
        self.what = what
        self.ticket = progress.trace.started(what, size, place.number)
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
            begun = self._progress.trace.now()
            self._progress.advance()
            self._progress.trace.advanced(*self.what[:2], begun)
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

    def __init__(self, mpi: Any, status: Status) -> None:
        self.status = status
        self.trace = Trace()
        self._request_class = mpi.Request
        self._failure = mpi.Exception
        self._library = mpi.get_vendor()[0]
        self._under_way: list[Work] = []

    def start(self, steps: Steps, entry: Entry, place: Place, what: What, size: int = 0) -> Work:
        work = Work(self, steps, entry, place, what, size)
        self._under_way.append(work)
        self._resume(work)
        return work

    def advance(self) -> bool:
        """Take every step whose requests are complete; say whether there was one."""
        moved = False
        for work in tuple(self._under_way):
            while not work.done and self._complete(work, self._request_class.Testall):
                self._resume(work)
                if not work.requests:
                    break
                moved = True
            moved |= work.done
        return moved

    def finish(self, work: Work) -> None:
        self.status.waits(work.place)
        self.trace.wait(*work.what[:2], work.place.number)
        try:
            while not work.done:
                if len(self._under_way) == 1 and work.requests:
                    self._complete(work, self._request_class.Waitall)
                    self._resume(work)
                elif not self.advance():
                    os.sched_yield()
        except CommunicationError as error:
            raise CommunicationError("\n".join(filter(None, [str(error), self.status.explain()]))) from error.__cause__
        finally:
            self.trace.end()
            self.status.goes_on()

    def _complete(self, work: Work, how: Callable[[Sequence[Any]], bool]) -> bool:
        """MPI itself notices some operations that do not fit together: it has been sent more than was asked for."""
        try:
            return how(work.requests)
        except self._failure as error:
            raise CommunicationError(f"{self.status.in_words(work.place)}: {self._library}: {error}") from error

    def _resume(self, work: Work) -> None:
        begun = self.trace.now()
        try:
            work.resume()
        finally:
            self.trace.advanced(*work.what[:2], begun)
            if work.done:
                self._under_way.remove(work)
                self.trace.finished(work.ticket)
