"""A device that does later what it is asked for, in the computer's own memory: what reads too
early, or without having waited, reads garbage.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor

from hpczero.device import Device, Mark, Memory, Queue

_LATE = 3  # times that a mark is asked before the queue has come there


class QueuedMark(Mark):
    def __init__(self, queue: "QueuedQueue") -> None:
        self._queue, self._place, self._asked = queue, queue.asked, 0

    def Test(self) -> bool:
        self._asked += 1
        if self._asked > _LATE:
            self._queue.catch_up(self._place)
        return self._queue.carried_out >= self._place

    def order(self) -> None:
        self._queue.catch_up(self._place)


class QueuedQueue(Queue):
    """Copies come late; computing in the queue has what was asked for before it done first, as a
    stream has.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a stream may be used by several threads
        self.asked = self.carried_out = 0
        self._waiting: deque[Callable[[], object]] = deque()

    def running(self) -> AbstractContextManager[object]:
        return self._running()

    @contextmanager
    def _running(self) -> Iterator[None]:
        self.catch_up(self.asked)
        yield

    def copy(self, output: Tensor, tensor: Tensor) -> None:
        with self._lock:
            self.asked += 1
            self._waiting.append(lambda: output.copy_(tensor))

    def mark(self) -> Mark:
        return QueuedMark(self)

    def catch_up(self, place: int) -> None:
        with self._lock:
            while self.carried_out < place:
                self._waiting.popleft()()
                self.carried_out += 1


class Queued(Device):
    name = "a device that is late"
    has_queues = True
    identity = "0"

    def queue(self) -> Queue:
        return QueuedQueue()

    def pinned(self, size: int) -> Tensor:
        return torch.full((size,), 0x7F, dtype=torch.uint8)

    def memory(self) -> Memory | None:
        return Memory(1 << 40, 1 << 40, 0, 0)
