"""The device that holds a rank's tensors, CPU or GPU: all that hpczero knows of GPUs (docs/gpu.md).

A GPU runs its work later, in the order of a stream. Copies and messages beside the computation go
through a `Queue`, a stream of its own. `begins` orders the queue's next work after all the work
submitted so far. A `Mark` tells how far the queue has come, and orders later computation after it.
The CPU has finished when a call returns: its queue and marks do nothing, and it is the base class
of the others.

`Outgoing` and `Incoming` carry a GPU's tensors in MPI's messages through pinned memory of the host,
`InPlace` from the GPU's own memory where MPI can read it. To MPI's requests these are more of the
same: `Test()` moves what can move. A message goes in pieces of constant size, two at a time: while
one is sent the next is copied. MPI is given nothing before the queue has come to it.
"""

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hpczero import machine
from hpczero.errors import InputError

_NAP = 0.0001  # seconds between two looks at a mark


class Mark:
    """A point in a queue, as an event in a CUDA stream."""

    def Test(self) -> bool:  # named as that of MPI's requests, to be waited for with them
        """Return True if the device has come to this point."""
        return True

    def order(self) -> None:
        """Let all work submitted to the device from now on wait for this point."""

    def wait_on_host(self) -> None:
        """Return once the device has come to this point."""
        while not self.Test():
            time.sleep(_NAP)


class Queue:
    """Work of the device beside the computation, in order."""

    def begins(self) -> None:
        """Let the queue's next work wait for all work submitted to the device so far."""

    def running(self) -> AbstractContextManager[object]:
        """Submit the work inside the context to this queue."""
        return nullcontext()

    def copy(self, output: Tensor, tensor: Tensor) -> None:
        """Copy in this queue, also between the device and pinned memory; needs no `running`."""
        output.copy_(tensor)

    def mark(self) -> Mark:
        return Mark()


@dataclass(frozen=True)
class Memory:
    """Bytes of a device's own memory."""

    total: int
    free: int
    held: int  # by this process's tensors
    peak: int  # the largest `held` so far


class Device:
    """The CPU, and the base class of GPUs."""

    kind = "cpu"
    name = "the CPU"
    identity = ""  # equal on ranks that share a device; "" where its memory is the host's
    torch = torch.device("cpu")
    has_queues = False  # True if work is done after the call that submits it returns

    def holds(self, tensor: Tensor) -> bool:
        return tensor.device.type == self.torch.type

    def queue(self) -> Queue:
        return Queue()

    def pinned(self, size: int) -> Tensor:
        """Allocate bytes of host memory that the device reads and writes while it computes."""
        return torch.empty(size, dtype=torch.uint8)

    def put(self, tensor: Tensor) -> Tensor:
        """Return a tensor of the host on the device."""
        return tensor

    def later(self, values: Tensor) -> Callable[[], list[float]]:
        """Return a function that reads the values once they are computed.

        It waits for the work submitted before this call, and not for later work.
        """
        return values.tolist

    def memory(self) -> Memory | None:
        """Return the figures of its memory; None if it has none but the host's."""
        return None

    def new_peak(self) -> int:
        """Return the most bytes that tensors held since the last call; the count begins anew."""
        return 0


CPU = Device()


class _CudaMark(Mark):
    def __init__(self, stream: "torch.cuda.Stream") -> None:
        self._event = torch.cuda.Event()
        self._event.record(stream)

    def Test(self) -> bool:
        return self._event.query()

    def order(self) -> None:
        torch.cuda.current_stream().wait_event(self._event)


class _CudaQueue(Queue):
    def __init__(self, device: torch.device) -> None:
        # before the computation, which waits for what the queue brings
        self._stream = torch.cuda.Stream(device, priority=-1)

    def begins(self) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))

    def running(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._stream)

    def copy(self, output: Tensor, tensor: Tensor) -> None:
        with self.running():
            output.copy_(tensor, non_blocking=True)

    def mark(self) -> Mark:
        return _CudaMark(self._stream)


class Cuda(Device):
    """A GPU, by its number among those that this process sees (PyTorch calls AMD's cuda, too)."""

    kind = "cuda"
    has_queues = True

    def __init__(self, number: int) -> None:
        self.torch = torch.device("cuda", number)
        torch.cuda.set_device(self.torch)
        # the first tensor starts CUDA: from now on the memory that it takes itself is not free
        torch.empty(1, dtype=torch.float32, device=self.torch)
        properties = torch.cuda.get_device_properties(self.torch)
        self.name = f"{properties.name} (cuda:{number})"
        self.capability = properties.major, properties.minor
        self.identity = str(getattr(properties, "uuid", number))
        self._peak = 0  # before the last `new_peak`

    def queue(self) -> Queue:
        return _CudaQueue(self.torch)

    def pinned(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def put(self, tensor: Tensor) -> Tensor:
        return tensor.pin_memory().to(self.torch, non_blocking=True)

    def later(self, values: Tensor) -> Callable[[], list[float]]:
        on_host = torch.empty_like(values, device="cpu", pin_memory=True)
        on_host.copy_(values, non_blocking=True)
        copied = torch.cuda.Event()
        copied.record()

        def read() -> list[float]:
            copied.synchronize()
            return on_host.tolist()

        return read

    def memory(self) -> Memory | None:
        free, total = torch.cuda.mem_get_info(self.torch)
        held = torch.cuda.memory_allocated(self.torch)
        peak = max(self._peak, torch.cuda.max_memory_allocated(self.torch))
        return Memory(total, free, held, peak)

    def new_peak(self) -> int:
        peak = torch.cuda.max_memory_allocated(self.torch)
        self._peak = max(self._peak, peak)
        torch.cuda.reset_peak_memory_stats(self.torch)
        return peak


def visible() -> int:
    """Return the number of GPUs that this process may use.

    PyTorch is asked only where there is a driver, as it may print warnings where there is none.
    """
    return torch.cuda.device_count() if machine.gpu_driver() and torch.cuda.is_available() else 0


def choose_kind(wanted: str, seen: Sequence[int], hosts: Sequence[str]) -> str:
    """Return "cpu" or "cuda" for all ranks, from `train.device` and the GPUs each one sees (pure).

    InputError: some ranks see a GPU and some see none, or all of them see none and "cuda" is set.
    """
    if wanted == "cpu" or (wanted == "auto" and not any(seen)):
        return "cpu"
    if all(seen):
        return "cuda"
    without = [rank for rank, count in enumerate(seen) if not count]
    shown = ", ".join(f"rank {rank} on {hosts[rank]}" for rank in without[:4])
    if len(without) > 4:
        shown += f" and {len(without) - 4} more"
    raise InputError(
        f'train.device = "{wanted}": {len(without)} of {len(seen)} ranks see no GPU: {shown}; '
        "give every rank one (a driver (nvidia-smi), a PyTorch built for it, and gpus in the batch "
        'system\'s request), or set train.device = "cpu"'
    )


def device_of_rank(kind: str, local_rank: int, ranks: int) -> Device:
    """Return the device of the rank with this number among the ranks of its node.

    Ranks that see all GPUs of the node take them in order, so that neighbours are neighbours; if
    there are more ranks than GPUs, consecutive ranks share one.
    """
    if kind == "cpu":
        return CPU
    count = visible()
    number = local_rank * count // ranks if ranks > count else local_rank
    try:
        return Cuda(number)
    except RuntimeError as error:
        raise InputError(
            f'GPU {number} of {count} cannot be used: {error}; train.device = "cpu" does without'
        ) from error


# -------------------------------------------------------------- messages of a GPU's tensors by MPI

PIECE = 4 << 20  # bytes
_AHEAD = 2  # pieces in flight

Post = Callable[[Tensor], Any]  # starts a message of bytes in host memory


class Line(deque["Message"]):
    """Messages that MPI tells apart by their order alone, of which some are still to be posted.

    The device may come to two of them between one test and the next: each posts nothing until it is
    the first.
    """


class Message(ABC):
    """A message that is posted when the device has come to it, and its place in the line."""

    def __init__(self, line: Line) -> None:
        self._line = line
        line.append(self)

    def _may_post(self) -> bool:
        """Return True once all before it in its line is posted."""
        while self._line[0] is not self:
            first = self._line[0]
            first.Test()
            if self._line[0] is first:
                return False
        return True

    @abstractmethod
    def Test(self) -> bool: ...


class Outgoing(Message):
    """A message sent from the device, done when MPI has sent all of it."""

    def __init__(
        self, line: Line, device: Device, queue: Queue, tensor: Tensor, post: Post
    ) -> None:
        super().__init__(line)
        self._device = device
        self._queue = queue
        self._post = post
        self._left = _pieces(tensor)
        self._copied: deque[tuple[Mark, Tensor]] = deque()
        self._sent: deque[tuple[Any, Tensor]] = deque()
        self._is_posted = False
        self.Test()

    def Test(self) -> bool:
        while self._sent and self._sent[0][0].Test():
            self._sent.popleft()
        while self._left and len(self._copied) + len(self._sent) < _AHEAD:
            piece = self._left.popleft()
            buffer = self._device.pinned(piece.numel())
            self._queue.copy(buffer, piece)
            self._copied.append((self._queue.mark(), buffer))
        if not self._is_posted and self._may_post():
            while self._copied and self._copied[0][0].Test():
                _, buffer = self._copied.popleft()
                self._sent.append((self._post(buffer), buffer))
            if not self._left and not self._copied:
                self._line.popleft()
                self._is_posted = True
        return self._is_posted and not self._sent


class Incoming(Message):
    """A message to the device; done when its copies are queued: later work in the queue sees it."""

    def __init__(
        self, line: Line, device: Device, queue: Queue, tensor: Tensor, post: Post
    ) -> None:
        super().__init__(line)
        self._device = device
        self._queue = queue
        self._post = post
        self._left = _pieces(tensor)
        self._posted: deque[tuple[Any, Tensor, Tensor]] = deque()
        self._is_posted = False
        self.Test()

    def Test(self) -> bool:
        while self._posted and self._posted[0][0].Test():
            _, buffer, piece = self._posted.popleft()
            self._queue.copy(piece, buffer)
        if not self._is_posted and self._may_post():
            while self._left and len(self._posted) < _AHEAD:
                piece = self._left.popleft()
                buffer = self._device.pinned(piece.numel())
                self._posted.append((self._post(buffer), buffer, piece))
            if not self._left:
                self._line.popleft()
                self._is_posted = True
        return self._is_posted and not self._posted


class InPlace(Message):
    """A message in the device's own memory, posted once the queue has come to it."""

    def __init__(self, line: Line, queue: Queue, post: Callable[[], Sequence[Any]]) -> None:
        super().__init__(line)
        self._mark = queue.mark()
        self._post = post
        self._requests: Sequence[Any] | None = None
        self.Test()

    def Test(self) -> bool:
        if self._requests is None:
            if not (self._may_post() and self._mark.Test()):
                return False
            self._requests = self._post()
            self._line.popleft()
        return test_all(self._requests)


def test_all(requests: Sequence[Any]) -> bool:
    """Let every request make progress; return True if all are done."""
    done = [request.Test() for request in requests]
    return all(done)


def _pieces(tensor: Tensor) -> deque[Tensor]:
    """Cut a tensor into bytes, equally for sender and receiver; an empty tensor has no piece."""
    return deque(piece for piece in tensor.view(-1).view(torch.uint8).split(PIECE) if piece.numel())
