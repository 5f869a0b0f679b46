"""A GPU's tensors in MPI's messages: through pinned memory of the computer, or as they are where MPI knows the GPU's memory.

To MPI's requests these are more of the same: `Test()` moves what can move. A message goes in pieces of constant size, of which two are under
way: while one is sent the next is copied. MPI is given nothing before the queue has come to it.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hpczero.device import Device, Mark, Queue

PIECE = 4 << 20  # bytes
_AHEAD = 2  # pieces

Post = Callable[[Tensor], Any]  # starts a message of bytes in the computer's memory


class Outgoing:
    def __init__(self, device: Device, queue: Queue, tensor: Tensor, post: Post) -> None:
        self._device, self._queue, self._post = device, queue, post
        self._left = _pieces(tensor)
        self._copied: deque[tuple[Mark, Tensor]] = deque()
        self._sent: deque[tuple[Any, Tensor]] = deque()
        self.Test()

    def Test(self) -> bool:
        while self._sent and self._sent[0][0].Test():
            self._sent.popleft()
        while self._left and len(self._copied) + len(self._sent) < _AHEAD:
            piece = self._left.popleft()
            buffer = self._device.pinned(piece.numel())
            self._queue.copy(buffer, piece)
            self._copied.append((self._queue.mark(), buffer))
        while self._copied and self._copied[0][0].Test():
            _, buffer = self._copied.popleft()
            self._sent.append((self._post(buffer), buffer))
        return not self._left and not self._copied and not self._sent


class Incoming:
    """Done when all of it is on its way to the device: what follows in the queue finds it there."""

    def __init__(self, device: Device, queue: Queue, tensor: Tensor, post: Post) -> None:
        self._device, self._queue, self._post = device, queue, post
        self._left = _pieces(tensor)
        self._posted: deque[tuple[Any, Tensor, Tensor]] = deque()
        self.Test()

    def Test(self) -> bool:
        while self._posted and self._posted[0][0].Test():
            _, buffer, piece = self._posted.popleft()
            self._queue.copy(piece, buffer)
        while self._left and len(self._posted) < _AHEAD:
            piece = self._left.popleft()
            buffer = self._device.pinned(piece.numel())
            self._posted.append((self._post(buffer), buffer, piece))
        return not self._left and not self._posted


class InPlace:
    """A message of the device's own memory: posted once the queue has come there."""

    def __init__(self, queue: Queue, post: Callable[[], Sequence[Any]]) -> None:
        self._mark, self._post = queue.mark(), post
        self._requests: Sequence[Any] | None = None
        self.Test()

    def Test(self) -> bool:
        if self._requests is None:
            if not self._mark.Test():
                return False
            self._requests = self._post()
        return moved(self._requests)


def moved(requests: Sequence[Any]) -> bool:
    """Moves every one of them, and says whether all are done."""
    done = [request.Test() for request in requests]
    return all(done)


def _pieces(tensor: Tensor) -> deque[Tensor]:
    """Equal for sender and receiver; none of an empty tensor."""
    return deque(piece for piece in tensor.view(-1).view(torch.uint8).split(PIECE) if piece.numel())
