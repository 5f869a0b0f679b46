"""Operations under way. Each is a generator that yields the requests it waits for, MPI's or others with a Test(); blocking is starting and waiting.

Whoever waits for one operation moves all of them: a rank that waits here may be what another rank, waiting elsewhere, needs.

What an operation asks of a device that does things later goes into a queue of its own (`hpczero.device`). The generator may come to its end long
before the device does: then whoever waited goes on, and what it asks of the device comes after the operation.
"""

import os
import threading
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hpczero.comm.status import Status, WaitPoint
from hpczero.comm.trace import Entry, Trace
from hpczero.device import moved
from hpczero.errors import HpczeroError

if TYPE_CHECKING:
    from hpczero.device import Mark, Queue

What = tuple[str, str, int]  # axis, operation, the other rank of a message or -1
Steps = Generator[
    Sequence[Any], None, None
]  # yields requests; an empty yield means "not yet: ask again"


class CommunicationError(HpczeroError):
    """The ranks of a group do not fit together."""


class RequestFailed(Exception):
    """Of a request that is not MPI's, said by its library."""


@dataclass(frozen=True)
class Limits:
    """Sizes in bytes: of the buffers that arriving pieces are kept in until they are summed, and of the largest single message."""

    staging: int = 4 << 20
    message: int = 1 << 30


class Work:
    """An operation under way; its tensors belong to it until `wait()` has returned or `poll()` has said True.

    `wait()` orders: what follows it sees the result. On the CPU that means the host waits; an operation on a device's tensors makes
    the device's stream wait, and the host only until all of it has been asked for. `done`: the device has done it, too.
    """

    def __init__(
        self,
        progress: "Progress",
        steps: Steps,
        entry: Entry,
        place: WaitPoint,
        what: What,
        size: int,
        queue: "Queue | None" = None,
    ) -> None:
        """`queue`: what the steps ask of the device goes there."""
        self.done = False
        self.queue = queue
        self.tensors: Sequence[object] = ()  # kept for the device until it is done with them
        self._mark: Mark | None = None  # where the steps have ended
        self.place = place
        self.what = what
        self.ticket = progress.trace.started(what, size, place.number)
        self.requests: Sequence[Any] = ()
        self._progress = progress
        self._steps = steps
        self._entry = entry

    @property
    def ended(self) -> bool:
        """Whether all of it has been asked for: then whoever waits may go on."""
        return self.done or self._mark is not None

    def wait(self) -> None:
        self._progress.check()
        if self.done:
            return
        begun = time.perf_counter()
        if not self.ended:
            self._progress.finish(self)
        if self._mark:
            self._mark.order()
        self._entry.seconds += time.perf_counter() - begun

    def host_sync(self) -> None:
        """The host waits until it is done."""
        if not self.done:
            self._progress.finish(self, until_done=True)

    def poll(self) -> bool:
        """Move everything that can move; say whether this operation is done."""
        self._progress.check()
        if not self.done:
            begun = self._progress.trace.now()
            self._progress.advance()
            self._progress.trace.advanced(*self.what[:2], begun)
        return self.done

    def resume(self) -> None:
        """The requests are complete: take the next step."""
        self.requests = ()
        try:
            if self.queue is None:
                self.requests = next(self._steps)
            else:
                with self.queue.running():
                    self.requests = next(self._steps)
        except StopIteration:
            if self.queue is None or self._mark:
                self.done, self.tensors = True, ()
            else:
                self._mark = self.queue.mark()
                self.requests = (self._mark,)
        except BaseException:
            self.done = True
            raise


class Progress:
    """All operations under way in this process, oldest first."""

    def __init__(self, mpi: Any, status: Status, lock: "threading.RLock | None" = None) -> None:
        """`lock`: held in every call of MPI; one for the process."""
        self.status = status
        self.lock = lock or threading.RLock()
        self.trace = Trace()
        self._request_class = mpi.Request
        self._failure = mpi.Exception
        self._library = mpi.get_vendor()[0]
        self._under_way: list[Work] = []
        self._far: set[Work] = set()  # those that send to other nodes
        self._background = Background(self._advance_behind)
        self._waits = False
        self._behind = False  # whether it is the background that moves operations now
        self._failed: BaseException | None = None  # in the background

    def start(
        self,
        steps: Steps,
        entry: Entry,
        place: WaitPoint,
        what: What,
        size: int = 0,
        far: bool = False,
        queue: "Queue | None" = None,
    ) -> Work:
        """`far`: it sends to other nodes, and goes on while the rank computes. `queue`: of the device whose tensors it is about."""
        with self.lock:
            if queue:
                queue.begins()
            work = Work(self, steps, entry, place, what, size, queue)
            self._under_way.append(work)
            if far:
                self._far.add(work)
            try:
                self._resume(work)
            except CommunicationError as error:
                raise self._explained(work, error) from error.__cause__
        if far and not work.done:
            self._background.wake()
        return work

    def close(self) -> None:
        self._background.close()
        self.check()

    def check(self) -> None:
        """What failed in the background fails here."""
        if self._failed:
            raise self._failed

    def _advance_behind(self) -> bool:
        """In the background."""
        with self.lock:
            if not self._waits and self._failed is None:  # else the rank itself moves them
                self._behind = True
                try:
                    self.advance()
                except BaseException as error:
                    self._failed = error
                finally:
                    self._behind = False
            return bool(self._far) and self._failed is None

    def advance(self) -> bool:
        """Take every step whose requests are complete; say whether there was one."""
        with self.lock:
            self.check()
            return self._advance()

    def _advance(self) -> bool:
        moved = False
        for work in tuple(self._under_way):
            while not work.done and self._complete(work, self._request_class.Testall):
                self._resume(work)
                if not work.requests:
                    break
                moved = True
            moved |= work.done
        return moved

    def snapshot(self) -> Callable[[], None]:
        """The host waits until the device has done all operations started before now. To be called before a value is read that they are for:
        that would wait, too, but unseen by the watchdog.
        """
        with self.lock:
            started = [work for work in self._under_way if work.queue]

        def settle() -> None:
            for work in started:
                work.host_sync()

        return settle

    def finish(self, work: Work, until_done: bool = False) -> None:
        """Until all of it has been asked for, or until it is done."""
        self.status.waits(work.place)
        self.trace.wait(*work.what[:2], work.place.number)
        self._waits = True
        try:
            while not (work.done if until_done else work.ended):
                if not self._move_on(work):
                    os.sched_yield()
        except CommunicationError as error:
            raise self._explained(work, error) from error.__cause__
        finally:
            self._waits = False
            self.trace.end()
            self.status.goes_on()

    def _explained(self, work: Work, error: CommunicationError) -> CommunicationError:
        """Return the error with what the other ranks are doing."""
        if self.status.wait is None:
            self.status.waits(work.place)
        return CommunicationError("\n".join(filter(None, [str(error), self.status.explain()])))

    def _move_on(self, work: Work) -> bool:
        with self.lock:
            if len(self._under_way) == 1 and work.requests and not work.queue and not self._failed:
                self._complete(work, self._request_class.Waitall)
                self._resume(work)
                return True
            return self.advance()

    def _complete(self, work: Work, how: Callable[[Sequence[Any]], bool]) -> bool:
        """MPI itself notices some operations that do not fit together: it has been sent more than was asked for."""
        try:
            if work.queue is None:
                return how(work.requests)
            with work.queue.running():
                return moved(work.requests)
        except (self._failure, RequestFailed) as error:
            library = "" if isinstance(error, RequestFailed) else f"{self._library}: "
            raise CommunicationError(
                f"{self.status.in_words(work.place)}: {library}{error}"
            ) from error

    def _resume(self, work: Work) -> None:
        begun = self.trace.now()
        try:
            work.resume()
        except RequestFailed as error:
            raise CommunicationError(f"{self.status.in_words(work.place)}: {error}") from error
        finally:
            if not self._behind:  # else it is no part of what the rank does meanwhile
                self.trace.advanced(*work.what[:2], begun)
            if work.done:
                self._under_way.remove(work)
                self._far.discard(work)
                self.trace.finished(work.ticket)


# Operations between nodes go on while the rank computes.
#
# MPI moves larger messages only inside its calls. Polls between layers come too seldom for a network: a thread makes them while something is on its
# way to or from another node, a thousand times a second, which costs some 3 % of a core then, and nothing else. All calls of MPI are made
# under one lock, so MPI_THREAD_SERIALIZED is enough.
_PERIOD = 0.001  # seconds; with UCX's own segment size over TCP (see env.prepare_mpi) half of what 1 Gbit/s carries


class Background:
    def __init__(self, advance: Callable[[], bool]) -> None:
        """`advance` moves what can move, and says whether there is more to come."""
        self._advance = advance
        self._awake = threading.Event()
        self._thread: threading.Thread | None = None
        self._ends = False

    def wake(self) -> None:
        """Something has been started."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="hpczero-messages", daemon=True)
            self._thread.start()
        self._awake.set()

    def close(self) -> None:
        if self._thread:
            self._ends = True
            self._awake.set()
            self._thread.join()

    def _run(self) -> None:
        while True:
            self._awake.wait()
            if self._ends:
                return
            self._awake.clear()
            if self._advance():
                self._awake.set()
                time.sleep(_PERIOD)
