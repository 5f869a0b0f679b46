"""A device that does later what it is asked for, in the computer's own memory: what reads too
early, or without having waited, reads garbage.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import cycle

import torch
from torch import Tensor

from hpczero.device import Device, Mark, Memory, Queue

# Times that a mark is asked before the queue has come there. As the second of two is asked less
# often, the queue comes to both of them between a question for the first and one for the second.
_LATE = (3, 1)


class QueuedMark(Mark):
    def __init__(self, queue: "QueuedQueue") -> None:
        self._queue, self._place, self._asked = queue, queue.asked, 0
        self._late = next(queue.lateness)

    def Test(self) -> bool:
        self._asked += 1
        if self._asked > self._late:
            self._queue.catch_up(self._place)
            self._queue.seen = max(self._queue.seen, self._place)
        return self._queue.seen >= self._place

    def order(self) -> None:
        self._queue.catch_up(self._place)


class QueuedQueue(Queue):
    """Copies come late; computing in the queue has what was asked for before it done first, as a
    stream has.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a stream may be used by several threads
        self.asked = self.carried_out = 0
        self.seen = 0  # the place up to which a mark has said that the queue has come
        self.lateness = cycle(_LATE)
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
