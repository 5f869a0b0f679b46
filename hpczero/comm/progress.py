"""Operations in flight: steps that wait for requests, and what moves them on.

An operation is a generator that yields the requests it waits for, MPI's or others with a `Test()`.
A blocking call starts it and waits. Whoever waits for one operation moves all of them: a rank that
waits here may be what another rank, waiting elsewhere, needs.

Work for a device that does things later goes into the operation's own queue (`hpczero.device`). The
generator may end long before the device has done it. Then whoever waited goes on, and what it asks
of the device comes after the operation.
"""

import math
import os
import threading
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hpczero.comm.status import Status, WaitPoint
from hpczero.comm.trace import Entry, Trace
from hpczero.device import test_all
from hpczero.errors import HpczeroError

if TYPE_CHECKING:
    from hpczero.device import Mark, Queue

# Seconds; with UCX's own segment size over TCP (see env.prepare_mpi) half of what 1 Gbit/s carries.
_PERIOD = 0.001
# Seconds: where ranks are more than cores, a wait only yields for so long, then sleeps in between.
_EAGER = 0.0005
_NAP = 0.0001

What = tuple[str, str, int]  # axis, operation, the other rank of a message or -1
# Yields requests; an empty yield means "not yet: ask again".
Requests = Generator[Sequence[Any], None, None]


class CommunicationError(HpczeroError):
    """The ranks of a group do not fit together."""


class RequestFailed(Exception):
    """The library of a request that is not MPI's says that it failed."""


@dataclass(frozen=True)
class Limits:
    """Sizes in bytes.

    `staging`: buffers that keep arriving pieces until they are summed; `message`: the largest
    single message.
    """

    staging: int = 4 << 20
    message: int = 1 << 30


class Work:
    """An operation in flight; it owns its tensors until `wait()` returns or `poll()` returns True.

    `wait()` orders: what follows it sees the result. On the CPU that means the host waits. An
    operation on a device's tensors makes the device's stream wait, and the host only until all of
    it has been asked for. `done` is True when the device has done it, too.
    """

    def __init__(
        self,
        progress: "Progress",
        steps: Requests,
        entry: Entry,
        point: WaitPoint,
        what: What,
        size: int,
        queue: "Queue | None" = None,
    ) -> None:
        """`queue` takes what the steps ask of the device."""
        self.done = False
        self.queue = queue
        self.tensors: Sequence[object] = ()  # kept until waited for, or done
        self.point = point
        self.what = what
        self.ticket = progress.trace.started(what, size, point.number)
        self.requests: Sequence[Any] = ()
        self._mark: Mark | None = None  # where the steps have ended in the queue
        self._progress = progress
        self._steps = steps
        self._entry = entry

    @property
    def ended(self) -> bool:
        """True once all of it has been asked for: then whoever waits may go on."""
        return self.done or self._mark is not None

    def wait(self) -> None:
        if not self.done:
            begun, processor = time.perf_counter(), time.thread_time()
            if not self.ended:
                self._progress.finish(self)
            if self._mark:
                self._mark.order()
                self.tensors = ()  # whatever takes their memory comes later in the device, too
            self._entry.seconds += time.perf_counter() - begun
            self._progress.spun += time.thread_time() - processor
        self._progress.check()

    def host_sync(self) -> None:
        """Make the host wait until the operation is done."""
        if not self.done:
            self._progress.finish(self, until_done=True)
        self._progress.check()

    def poll(self) -> bool:
        """Move everything that can move; return True if this operation is done."""
        if not self.done:
            begun = self._progress.trace.now()
            self._progress.advance()
            self._progress.trace.advanced(*self.what[:2], begun)
        done = self.done
        self._progress.check()
        return done

    def resume(self) -> None:
        """Take the next step, when the requests are complete."""
        self.requests = ()
        try:
            if self.queue is None:
                self.requests = next(self._steps)
            else:
                with self.queue.running():
                    self.requests = next(self._steps)
        except StopIteration:
            if self.queue is None or self._mark:
                self.done = True
                self.tensors = ()
            else:
                self._mark = self.queue.mark()
                self.requests = (self._mark,)
        except BaseException as error:
            self._progress.note(error)  # before `done`: whoever sees that one checks then
            self.done = True
            raise


class Progress:
    """All operations in flight in this process, oldest first."""

    def __init__(self, mpi: Any, status: Status, whole: "Progress | None" = None) -> None:
        """`whole`: that of the world that this one's is a part of.

        `.lock` is held in every call of MPI; there is one for the process. `.is_crowded`: there are
        fewer cores than ranks, so a rank that waits leaves its core to one that computes.
        """
        self.status = status
        self.lock: threading.RLock = whole.lock if whole else threading.RLock()
        self.is_crowded: bool = whole.is_crowded if whole else False
        self.trace = Trace()
        self.spun = 0.0  # seconds of processor time in waits: a rank that waits may well spin
        self._request_class = mpi.Request
        self._failure = mpi.Exception
        self._library = mpi.get_vendor()[0]
        self._in_flight: list[Work] = []
        self._far: set[Work] = set()  # those that send to other nodes
        self._background = Background(self._advance_in_background)
        self._is_waiting = False
        self._is_background = False  # whether the background is moving operations now
        self._failed: BaseException | None = None  # in the background

    def start(
        self,
        steps: Requests,
        entry: Entry,
        point: WaitPoint,
        what: What,
        size: int = 0,
        far: bool = False,
        queue: "Queue | None" = None,
    ) -> Work:
        """Start an operation.

        `far`: it sends to other nodes, and goes on while the rank computes. `queue`: of the device
        whose tensors it works on.
        """
        with self.lock:
            if queue:
                queue.begins()
            work = Work(self, steps, entry, point, what, size, queue)
            self._in_flight.append(work)
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
        """Raise what failed in the background."""
        if self._failed:
            raise self._failed

    def note(self, error: BaseException) -> None:
        """Keep an error of the background for the rank itself."""
        if self._is_background:
            self._failed = error

    def advance(self) -> bool:
        """Take every step whose requests are complete; return True if there was one."""
        with self.lock:
            self.check()
            return self._advance()

    def snapshot(self) -> Callable[[], None]:
        """Return a call that waits until the device has done all operations started before now.

        Call this before reading a value that those operations produce: the reading would wait, too,
        but unseen by the watchdog.
        """
        with self.lock:
            started = [work for work in self._in_flight if work.queue]

        def host_sync() -> None:
            for work in started:
                work.host_sync()

        return host_sync

    def finish(self, work: Work, until_done: bool = False) -> None:
        """Wait until all of the operation has been asked for, or until it is done."""
        self.status.begin_wait(work.point)
        self.trace.wait(*work.what[:2], work.point.number)
        self._is_waiting = True
        patience = time.monotonic() + _EAGER if self.is_crowded else math.inf
        try:
            while not (work.done if until_done else work.ended):
                if not self._move_on(work):
                    yield_core(patience)
        except CommunicationError as error:
            raise self._explained(work, error) from error.__cause__
        finally:
            self._is_waiting = False
            self.trace.end()
            self.status.end_wait()

    def _move_on(self, work: Work) -> bool:
        with self.lock:
            alone = len(self._in_flight) == 1 and not self.is_crowded
            if alone and work.requests and not work.queue and not self._failed:
                self._complete(work, self._request_class.Waitall)
                self._resume(work)
                return True
            return self.advance()

    def _advance(self) -> bool:
        has_moved = False
        for work in tuple(self._in_flight):
            while not work.done and self._complete(work, self._request_class.Testall):
                self._resume(work)
                if not work.requests:
                    break
                has_moved = True
            has_moved |= work.done
        return has_moved

    def _advance_in_background(self) -> bool:
        with self.lock:
            if not self._is_waiting and self._failed is None:  # else the rank itself moves them
                self._is_background = True
                try:
                    self.advance()
                except BaseException as error:
                    self._failed = error
                finally:
                    self._is_background = False
            return bool(self._far) and self._failed is None

    def _complete(self, work: Work, how: Callable[[Sequence[Any]], bool]) -> bool:
        """Test or wait for the requests; return True if they are complete.

        MPI itself notices some operations that do not fit together: more has been sent than was
        asked for.
        """
        try:
            if work.queue is None:
                return how(work.requests)
            with work.queue.running():
                return test_all(work.requests)
        except (self._failure, RequestFailed) as error:
            library = "" if isinstance(error, RequestFailed) else f"{self._library}: "
            words = f"{self.status.in_words(work.point)}: {library}{error}"
            raise CommunicationError(words) from error

    def _resume(self, work: Work) -> None:
        begun = self.trace.now()
        try:
            work.resume()
        except RequestFailed as error:
            raise CommunicationError(f"{self.status.in_words(work.point)}: {error}") from error
        finally:
            if not self._is_background:  # else it is no part of what the rank does meanwhile
                self.trace.advanced(*work.what[:2], begun)
            if work.done:
                self._in_flight.remove(work)
                self._far.discard(work)
                self.trace.finished(work.ticket)

    def _explained(self, work: Work, error: CommunicationError) -> CommunicationError:
        """Return the error with what the other ranks are doing."""
        if self.status.wait is None:
            self.status.begin_wait(work.point)
        return CommunicationError("\n".join(filter(None, [str(error), self.status.explain()])))


def yield_core(until: float) -> None:
    """Yield the core once; after `until` (of time.monotonic) sleep a moment instead."""
    os.sched_yield() if time.monotonic() < until else time.sleep(_NAP)


class Background:
    """A thread that moves operations between nodes while the rank computes.

    MPI moves larger messages only inside its calls, and polls between layers come too seldom for a
    network. So the thread polls a thousand times a second while something is on its way to or from
    another node. That costs some 3 % of a core then, and nothing else. All calls of MPI are made
    under one lock, so MPI_THREAD_SERIALIZED is enough.
    """

    def __init__(self, advance: Callable[[], bool]) -> None:
        """`advance` moves what can move, and returns True if there is more to come."""
        self._advance = advance
        self._awake = threading.Event()
        self._thread: threading.Thread | None = None
        self._ends = False

    def wake(self) -> None:
        """Begin to poll: something has been started."""
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
