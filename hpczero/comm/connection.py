"""Messages of a group over MPI: non-blocking requests, and the buffers in which pieces arrive."""

from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from hpczero.comm.progress import Limits, Progress
from hpczero.comm.status import NOWHERE, Signature, WaitPoint
from hpczero.comm.trace import Ledger
from hpczero.device import CPU, Device, Incoming, InPlace, Line, Message, Outgoing

BLOCK = 4096  # elements
_NUMBERS = 128  # operations that one after the other get tags of their own
_LOWEST_LIMIT = 32767  # of tags: MPI promises it
_HIGHEST_LIMIT = (1 << 28) - 1  # of tags: more than is needed
_SMALL = 1 << 16  # bytes of a message that goes ahead of others
_BUFFERS = 2  # reductions of a group whose pieces arrive at the same time; others wait for a turn


@dataclass(frozen=True)
class ConnectionSettings:
    """The means that all connections of a world use.

    `direct`: MPI takes the device's memory as it is.
    """

    mpi: Any
    progress: Progress
    ledger: Ledger
    limits: Limits
    device: Device = CPU
    direct: bool = False


class Connection:
    """The messages of one group.

    A group of one rank has no communicator and sends nothing. Nobody waits for it, so its status is
    not kept.
    """

    def __init__(
        self, settings: ConnectionSettings, communicator: Any, axis: str, ranks: Sequence[int]
    ) -> None:
        mpi = settings.mpi
        self.progress = settings.progress
        self.ledger = settings.ledger
        self.device = settings.device
        # For operations on the device's tensors.
        self.queue = settings.device.queue() if settings.device.has_queues else None
        self._byte = mpi.BYTE
        self._memory_at = mpi.memory.fromaddress
        self._direct = settings.direct
        self._communicator = communicator
        self._limits = settings.limits
        self._free_buffers: list[Tensor] = []
        self._lent = 0
        self._borrowers: deque[object] = deque()
        self._senders: deque[object] = deque()
        # by kind, peer and tag, while there is a message of it
        self._lines = WeakValueDictionary[tuple[type[Message], int, int], Line]()
        self._entry = settings.progress.status.enter(axis, ranks) if communicator else NOWHERE
        highest = communicator.Get_attr(mpi.TAG_UB) if communicator else 0
        self._labels = (min(highest or _LOWEST_LIMIT, _HIGHEST_LIMIT) + 1) // (2 * _NUMBERS)

    def started(self, number: int, signature: Signature) -> WaitPoint:
        """Record a collective in the rank's status; to be called before it sends anything."""
        if self._communicator:
            self.progress.status.started(self._entry, number, signature)
        return WaitPoint(signature.label, self._entry, number)

    def message(self, label: str, peer: int, number: int) -> WaitPoint:
        """Return where a rank waits for message `number` to or from a peer.

        Messages have no number among the group's operations.
        """
        ranks = (self.progress.status.ranks_of[self._entry][peer],)
        return WaitPoint(label.encode()[:64], number=number, ranks=ranks)

    def tag(self, number: int, code: int, is_collective: bool) -> int:
        """Return a tag with which messages of operations that do not fit together never meet.

        Instead of wrong values there is a wait, which the watchdog ends.
        """
        return ((code % self._labels) * 2 + is_collective) * _NUMBERS + number % _NUMBERS

    def send(self, tensor: Tensor, to: int, tag: int, is_met: bool = False) -> list[Any]:
        """Start a send. `is_met`: it is done only when the receiver has begun to receive.

        MPI would otherwise be done with a small message at once.
        """

        def post(memory: Any) -> Any:
            start = self._communicator.Issend if is_met else self._communicator.Isend
            return start([memory, self._byte], to, tag)

        return self._start(Outgoing, (to, tag), tensor, post)

    def receive(self, tensor: Tensor, source: int, tag: int) -> list[Any]:
        def post(memory: Any) -> Any:
            return self._communicator.Irecv([memory, self._byte], source, tag)

        return self._start(Incoming, (source, tag), tensor, post)

    def _start(
        self,
        staged: type[Outgoing] | type[Incoming],
        place: tuple[int, int],
        tensor: Tensor,
        post: Callable[[Any], Any],
    ) -> list[Any]:
        if not self.on_device(tensor):
            return [post(part) for part in self._messages(_memory(tensor))]
        assert self.queue is not None
        line = self._lines.setdefault((staged, *place), Line())
        if self._direct:
            memory = self._memory_at(tensor.data_ptr(), tensor.nbytes)
            parts = self._messages(memory)
            return [InPlace(line, self.queue, lambda: [post(part) for part in parts])]
        return [staged(line, self.device, self.queue, tensor, lambda part: post(_memory(part)))]

    def _messages(self, memory: Any) -> list[Any]:
        """Cut bytes into messages that MPI can count."""
        most = self._limits.message
        return [memory[begin : begin + most] for begin in range(0, len(memory), most)]

    def on_device(self, tensor: Tensor) -> bool:
        """Return True if the tensor lies in a device's own memory."""
        return self.queue is not None and self.device.holds(tensor)

    def on_host(self, tensor: Tensor) -> Generator[Sequence[Any], None, Tensor]:
        """Return the tensor, or a copy if the CPU cannot read it."""
        if not self.on_device(tensor):
            return tensor
        assert self.queue is not None
        copy = self.device.pinned(tensor.nbytes).view(tensor.dtype)
        self.queue.copy(copy, tensor)
        yield [self.queue.mark()]
        return copy

    def copy_back(self, tensor: Tensor, copy: Tensor) -> None:
        """Take back what was changed in a copy made by `on_host`."""
        if copy is not tensor:
            assert self.queue is not None
            self.queue.copy(tensor, copy)

    def gather_stamped(self, received: bytearray, tensor: Tensor, stamp: bytes) -> list[Any]:
        """Gather small tensors of one size from all ranks, each behind a stamp, in rank order."""
        stamped = stamp + bytes(_memory(tensor))
        received_bytes = [received, self._byte]
        return [self._communicator.Iallgather([stamped, self._byte], received_bytes)]

    def barrier(self) -> list[Any]:
        return [self._communicator.Ibarrier()] if self._communicator else []

    def send_in_turn(
        self, sends: Sequence[tuple[Tensor, int]], tag: int, in_turn: bool
    ) -> Generator[Sequence[Any], None, None]:
        """Send each (tensor, to) once it is this operation's turn; wait until they have left.

        What was started first is to arrive first, not all of it at the end.
        """
        turn = object()
        if in_turn and any(tensor.nbytes > _SMALL for tensor, _ in sends):
            self._senders.append(turn)
            while self._senders[0] is not turn:
                yield ()
        try:
            requests = [request for tensor, to in sends for request in self.send(tensor, to, tag)]
            if requests:
                yield requests
        finally:
            if turn in self._senders:
                self._senders.remove(turn)

    # ----------------------------------------------------------------------------------- buffers

    @property
    def buffered(self) -> int:
        """Bytes of the buffers made so far; none is made after the first few operations."""
        return sum(buffer.numel() for buffer in self._free_buffers)

    def room(self, size: int, most: int | None = None) -> int:
        """Return the bytes that `borrow` gives a user who needs `size` and can use `most`."""
        staging = self._limits.staging
        return max(staging if most is None else min(staging, most), size)

    def borrow(
        self, size: int, device: torch.device = CPU.torch, most: int | None = None
    ) -> Generator[Sequence[Any], None, Tensor]:
        """Lend a buffer of constant size on this device, kept for later operations.

        First come, first served. All ranks start their collectives in one order, so the oldest one
        that is still in flight has its buffer on every rank, and always goes on.
        """
        turn = object()
        self._borrowers.append(turn)
        while self._borrowers[0] is not turn or self._lent == _BUFFERS:
            yield ()
        self._borrowers.popleft()
        self._lent += 1
        room = self.room(size, most)
        on_device = [buffer for buffer in self._free_buffers if buffer.device == device]
        fitting = next((buffer for buffer in on_device if buffer.numel() >= room), None)
        # A buffer that is too small makes room for a larger one.
        taken = on_device[0] if on_device and fitting is None else fitting
        self._free_buffers = [buffer for buffer in self._free_buffers if buffer is not taken]
        if fitting is None:
            return torch.empty(room, dtype=torch.uint8, device=device)
        return fitting[:room]

    def give_back(self, buffer: Tensor) -> None:
        self._lent -= 1
        self._free_buffers.append(buffer if buffer._base is None else buffer._base)

    def close(self) -> None:
        self._free_buffers.clear()
        if self._communicator:
            self.progress.status.leave(self._entry)
            self._communicator.Free()


def slot_bytes(tensor: Tensor, ranks: int) -> int:
    """Return the bytes of a slot for a whole shard, rounded up to whole blocks, as slots are."""
    shard = -(-tensor.numel() // ranks)
    return -(-shard // BLOCK) * BLOCK * tensor.element_size()


def slots_of(buffer: Tensor, slots: int, dtype: torch.dtype) -> Tensor:
    """View a buffer as [2 rounds, slots, elements]; elements in whole blocks if it has room."""
    elements = buffer.numel() // (2 * slots * dtype.itemsize)
    elements -= elements % BLOCK if elements > BLOCK else 0
    return buffer[: 2 * slots * elements * dtype.itemsize].view(dtype).view(2, slots, elements)


def _memory(tensor: Tensor) -> memoryview:
    array = tensor.view(-1).view(torch.uint8).numpy()
    return memoryview(array)  # type: ignore[arg-type]  # numpy arrays have the buffer protocol
