"""Where a rank's tensors live: all that the program knows of GPUs (docs/gpu.md).

A GPU does what it is asked for later, in the order of a stream. Work beside the computing, copies and messages, goes through a `Queue`, a stream of
its own: `begins` puts what follows there behind all that was asked for so far, a `Mark` says how far it came and puts what is computed
from then on behind it. The CPU has done everything when a call returns; its queue and marks do nothing, and it is the base of the others.
"""

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hpczero import machine
from hpczero.errors import InputError


class Mark:
    """A place in a queue."""

    def Test(self) -> bool:  # as a request of MPI, which it is waited for together with
        """Whether the device has come there."""
        return True

    def order(self) -> None:
        """What is asked of the device from now on comes after it."""


class Queue:
    def begins(self) -> None:
        """What follows here comes after all that has been asked of the device so far."""

    def running(self) -> AbstractContextManager[object]:
        """What is asked of the device inside goes here."""
        return nullcontext()

    def copy(self, output: Tensor, tensor: Tensor) -> None:
        """Here, inside `running` or not; between the device and pinned memory too."""
        output.copy_(tensor)

    def mark(self) -> Mark:
        return Mark()


@dataclass(frozen=True)
class Memory:
    """Bytes of a device's own memory: `total`, `free` of it now, `held` by this process's tensors, and the most of these so far."""

    total: int
    free: int
    held: int
    peak: int


class Device:
    """The CPU."""

    kind = "cpu"
    name = "the CPU"
    identity = ""  # equal on ranks that share a device; "" where the memory is the computer's own
    torch = torch.device("cpu")
    has_queues = False  # whether what is asked of it is done later

    def holds(self, tensor: Tensor) -> bool:
        return tensor.device.type == self.torch.type

    def queue(self) -> Queue:
        return Queue()

    def pinned(self, size: int) -> Tensor:
        """Bytes of the computer's memory that the device reads and writes beside the computing."""
        return torch.empty(size, dtype=torch.uint8)

    def put(self, tensor: Tensor) -> Tensor:
        """A tensor of the computer's, on the device."""
        return tensor

    def later(self, values: Tensor) -> Callable[[], list[float]]:
        """Reads what has been asked of the device: it is waited for when this is called, and what is asked of it after them is not."""
        return values.tolist

    def memory(self) -> Memory | None:
        """None: its memory is the computer's."""
        return None


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
        self._stream = torch.cuda.Stream(
            device, priority=-1
        )  # ahead of the computing, which waits for what it brings

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
    """One GPU of this computer, by its number among those that this process sees. (AMD's are called cuda by PyTorch, too.)"""

    kind = "cuda"
    has_queues = True

    def __init__(self, number: int) -> None:
        self.torch = torch.device("cuda", number)
        torch.cuda.set_device(self.torch)
        torch.empty(
            1, dtype=torch.float32, device=self.torch
        )  # from now on what CUDA itself takes of its memory is not free
        found = torch.cuda.get_device_properties(self.torch)
        self.name = f"{found.name} (cuda:{number})"
        self.capability = found.major, found.minor
        self.identity = str(getattr(found, "uuid", number))

    def queue(self) -> Queue:
        return _CudaQueue(self.torch)

    def pinned(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def put(self, tensor: Tensor) -> Tensor:
        return tensor.pin_memory().to(self.torch, non_blocking=True)

    def later(self, values: Tensor) -> Callable[[], list[float]]:
        here = torch.empty_like(values, device="cpu", pin_memory=True)
        here.copy_(values, non_blocking=True)
        made = torch.cuda.Event()
        made.record()

        def read() -> list[float]:
            made.synchronize()
            return here.tolist()

        return read

    def memory(self) -> Memory | None:
        free, total = torch.cuda.mem_get_info(self.torch)
        return Memory(
            total,
            free,
            torch.cuda.memory_allocated(self.torch),
            torch.cuda.max_memory_allocated(self.torch),
        )


def visible() -> int:
    """GPUs that this process may use; PyTorch is asked only where there is a driver, as it may have something to say where there is none."""
    return torch.cuda.device_count() if machine.gpu_driver() and torch.cuda.is_available() else 0


def agreed(wanted: str, seen: Sequence[int], hosts: Sequence[str]) -> str:
    """What `train.device` (auto, cpu, cuda) means for ranks that see so many GPUs each: "cpu" or "cuda" for all of them (pure)."""
    if wanted == "cpu" or (wanted == "auto" and not any(seen)):
        return "cpu"
    if all(seen):
        return "cuda"
    without = [rank for rank, count in enumerate(seen) if not count]
    shown = ", ".join(f"rank {rank} on {hosts[rank]}" for rank in without[:4]) + (
        f" and {len(without) - 4} more" if len(without) > 4 else ""
    )
    drivers = (
        "a driver (nvidia-smi), a PyTorch built for it, and gpus in the batch system's request"
    )
    way_out = f'give every rank one ({drivers}), or set train.device = "cpu"'
    raise InputError(
        f'train.device = "{wanted}": {len(without)} of {len(seen)} ranks see no GPU: {shown}; {way_out}'
    )


def of_rank(kind: str, place: int, ranks: int) -> Device:
    """The device of a rank that is number `place` of so many on its computer: where ranks see all its GPUs they are dealt out in blocks, so that
    neighbours are neighbours; with more ranks than GPUs, several have one together.
    """
    if kind == "cpu":
        return CPU
    count = visible()
    number = place * count // ranks if ranks > count else place
    try:
        return Cuda(number)
    except RuntimeError as error:
        raise InputError(
            f'GPU {number} of {count} cannot be used: {error}; train.device = "cpu" does without'
        ) from error


# A GPU's tensors in MPI's messages: through pinned memory of the computer, or as they are where MPI knows the GPU's memory.
#
# To MPI's requests these are more of the same: `Test()` moves what can move. A message goes in pieces of constant size, of which two are under
# way: while one is sent the next is copied. MPI is given nothing before the queue has come to it.
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
