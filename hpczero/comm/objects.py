"""Collectives of Python objects: what JSON can carry, among the ranks of a communicator.

Work on files takes one rank a second and another, whose disk is slow, many minutes. The watchdog
must not take the slow rank for a dead one. So `run_while_polling` does such work in a thread, which
calls no MPI, while the ranks meet now and then until all have done theirs.
"""

import json
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from typing import Any, TypeVar, cast

from hpczero.comm.progress import Progress, Requests
from hpczero.comm.status import Signature, Status, WaitPoint
from hpczero.comm.trace import Entry
from hpczero.errors import InputError

_PIECE = 1 << 30  # bytes: the largest single message
_POLL_EVERY = 0.2  # seconds

Result = TypeVar("Result")


class ObjectCollectives:
    """The ranks of a communicator, which all call each of these in the same order.

    `.rank`, `.size`; `.status` what this rank is doing, `.progress` its operations in flight.
    """

    def __init__(
        self,
        mpi: Any,
        communicator: Any,
        whole: "ObjectCollectives | None" = None,
        origin: Sequence[int] = (),
    ) -> None:
        """`whole`: the world that this is a part of, in which these ranks are called `origin`."""
        self._mpi = mpi
        self._communicator = communicator
        self.rank: int = communicator.rank
        self.size: int = communicator.size
        self.status: Status = whole.status if whole else Status()
        self.progress: Progress = Progress(mpi, self.status, whole.progress if whole else None)
        self._origin = tuple(origin or range(self.size))
        self._entry = self.status.enter("world", self._origin)
        self._number = 0

    def numbers(self, ranks: Sequence[int]) -> tuple[int, ...]:
        """Return what these ranks are called in the world of the whole job."""
        return tuple(self._origin[rank] for rank in ranks)

    def broadcast_object(self, value: Any) -> Any:
        """Return rank 0's value on every rank; of any length, a tuple becomes a list."""
        box = [json.dumps(value).encode() if self.rank == 0 else b""]
        self._run(self._broadcast(box), "broadcast_object")
        return json.loads(box[0])

    def gather_objects(self, value: Any) -> list[Any] | None:
        """Return every rank's value, in rank order, on rank 0; None elsewhere."""
        received: list[bytearray] = []
        self._run(self._gather(json.dumps(value).encode(), received), "gather_objects")
        return [json.loads(text) for text in received] if self.rank == 0 else None

    def all_gather_objects(self, value: Any) -> list[Any]:
        """Return every rank's value, in rank order, on every rank."""
        values: list[Any] = self.broadcast_object(self.gather_objects(value))
        return values

    def run_on_all(self, action: Callable[[], Result]) -> Result:
        """Run the action on every rank; an InputError of any rank is raised on all of them."""
        result = None
        problem = None
        try:
            result = action()
        except InputError as error:
            problem = self._mpi.Get_processor_name(), str(error)
        problems = enumerate(self.gather_objects(problem) or [])
        first = self.broadcast_object(next((found for found in problems if found[1]), None))
        if first:
            rank, (host, text) = first
            raise InputError(f"rank {rank} on {host}: {text}" if rank else text)
        return cast(Result, result)

    def _run(self, steps: Requests, operation: str) -> None:
        self._number += 1
        signature = Signature.of(operation)
        self.status.started(self._entry, self._number, signature)
        point = WaitPoint(signature.label, self._entry, self._number)
        self.progress.start(steps, Entry(), point, ("world", operation, -1)).wait()

    def _meet(self) -> Requests:
        yield [self._communicator.Ibarrier()]

    def _broadcast(self, box: list[bytes]) -> Requests:
        length = bytearray(len(box[0]).to_bytes(8, "little"))
        yield [self._communicator.Ibcast([length, self._mpi.BYTE])]
        text = bytearray(box[0]) or bytearray(int.from_bytes(length, "little"))
        for piece in _pieces(text):
            yield [self._communicator.Ibcast([piece, self._mpi.BYTE])]
        box[0] = bytes(text)

    def _gather(self, text: bytes, received: list[bytearray]) -> Requests:
        byte = self._mpi.BYTE
        lengths = bytearray(8 * self.size if self.rank == 0 else 0)
        own_length = [len(text).to_bytes(8, "little"), byte]
        yield [self._communicator.Igather(own_length, [lengths, byte] if self.rank == 0 else None)]
        if self.rank > 0:
            yield [self._communicator.Isend([piece, byte], 0) for piece in _pieces(text)]
            return
        for rank in range(self.size):
            length = int.from_bytes(lengths[8 * rank : 8 * rank + 8], "little")
            received.append(bytearray(length))
        received[0][:] = text
        yield [
            self._communicator.Irecv([piece, byte], rank)
            for rank in range(1, self.size)
            for piece in _pieces(received[rank])
        ]


def _pieces(text: bytes | bytearray) -> list[memoryview]:
    return [memoryview(text)[begin : begin + _PIECE] for begin in range(0, len(text), _PIECE)]


def run_while_polling(
    ranks: ObjectCollectives,
    action: Callable[[], Result],
    meanwhile: Callable[[], object] = lambda: None,
) -> Result:
    """Run the action in a thread, and return its result when it has ended on all ranks.

    Collective. The calling thread does what is to be done `meanwhile`.
    """
    done: Future[Result] = Future()
    problem: BaseException | None = None

    def work() -> None:
        try:
            done.set_result(action())
        except BaseException as error:
            done.set_exception(error)

    try:
        threading.Thread(target=work, name="hpczero-files", daemon=True).start()
    except RuntimeError:  # no more threads are to be had: the others wait as long as they may
        work()
    try:
        meanwhile()
    except BaseException as error:  # the others are met all the same
        problem = error
    while True:
        wait([done], _POLL_EVERY)
        if all(ranks.all_gather_objects(done.done())):
            if problem:
                raise problem
            return done.result()
