"""What a group needs of MPI: bytes from here to there, as non-blocking requests; and the buffers in which pieces arrive."""

from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hpczero.comm.progress import Limits, Progress
from hpczero.comm.status import NOWHERE, Signature, WaitPoint
from hpczero.comm.trace import Ledger
from hpczero.device import CPU, Device, Incoming, InPlace, Outgoing

BLOCK = 4096  # elements
_NUMBERS = 128  # operations that one after the other get tags of their own
_LOWEST_LIMIT, _HIGHEST_LIMIT = (
    32767,
    (1 << 28) - 1,
)  # of tags: what MPI promises, and more than is needed
_SMALL = 1 << 16  # bytes of a message that goes ahead of others
_BUFFERS = 2  # reductions of a group whose pieces arrive at the same time; further ones wait for their turn


@dataclass(frozen=True)
class Means:
    """What the connections of a world have in common. `direct`: MPI takes the device's memory as it is."""

    mpi: Any
    progress: Progress
    ledger: Ledger
    limits: Limits
    device: Device = CPU
    direct: bool = False


class Connection:
    """Of one group. A group of one rank has no communicator and sends nothing; nobody waits for it, so that its status is not kept."""

    def __init__(self, means: Means, communicator: Any, axis: str, ranks: Sequence[int]) -> None:
        mpi = means.mpi
        self.progress = progress = means.progress
        self.ledger = means.ledger
        self.device = means.device
        self.queue = (
            means.device.queue() if means.device.has_queues else None
        )  # for operations on the device's tensors
        self._byte = mpi.BYTE
        self._memory_at = mpi.memory.fromaddress
        self._direct = means.direct
        self._communicator = communicator
        self._limits = means.limits
        self._buffers: list[Tensor] = []  # free ones
        self._lent = 0
        self._senders: deque[object] = deque()
        self._queue: deque[object] = deque()
        self._entry = progress.status.enter(axis, ranks) if communicator else NOWHERE
        highest = communicator.Get_attr(mpi.TAG_UB) if communicator else 0
        self._labels = (min(highest or _LOWEST_LIMIT, _HIGHEST_LIMIT) + 1) // (2 * _NUMBERS)

    def started(self, number: int, signature: Signature) -> WaitPoint:
        """Every collective is to be told, before it sends anything."""
        if self._communicator:
            self.progress.status.started(self._entry, number, signature)
        return WaitPoint(signature.label, self._entry, number)

    def message(self, label: str, peer: int, number: int) -> WaitPoint:
        """For a message to or from a peer, `number` of those in this direction; it has none among the group's operations."""
        return WaitPoint(
            label.encode()[:64],
            number=number,
            ranks=(self.progress.status.ranks_of[self._entry][peer],),
        )

    def tag(self, number: int, code: int, is_collective: bool) -> int:
        """Messages of operations that do not fit together never meet: instead of wrong values there is a wait, which the watchdog ends."""
        return ((code % self._labels) * 2 + is_collective) * _NUMBERS + number % _NUMBERS

    def send(self, tensor: Tensor, to: int, tag: int, is_met: bool = False) -> list[Any]:
        """`is_met`: done only when the receiver has begun to receive; MPI would otherwise be done with a small message at once."""

        def post(memory: Any) -> Any:
            return (self._communicator.Issend if is_met else self._communicator.Isend)(
                [memory, self._byte], to, tag
            )

        return self._start(Outgoing, tensor, post)

    def receive(self, tensor: Tensor, source: int, tag: int) -> list[Any]:
        def post(memory: Any) -> Any:
            return self._communicator.Irecv([memory, self._byte], source, tag)

        return self._start(Incoming, tensor, post)

    def _start(
        self, staged: type[Outgoing] | type[Incoming], tensor: Tensor, post: Callable[[Any], Any]
    ) -> list[Any]:
        if not self.on_device(tensor):
            return [post(part) for part in self._messages(_memory(tensor))]
        assert self.queue is not None
        if self._direct:
            memory = self._memory_at(tensor.data_ptr(), tensor.nbytes)
            return [InPlace(self.queue, lambda: [post(part) for part in self._messages(memory)])]
        return [staged(self.device, self.queue, tensor, lambda buffer: post(_memory(buffer)))]

    def on_device(self, tensor: Tensor) -> bool:
        """Whether it lies in the memory of a device that has one of its own."""
        return self.queue is not None and self.device.holds(tensor)

    def gather_stamped(self, received: bytearray, tensor: Tensor, stamp: bytes) -> list[Any]:
        """Small tensors of one size from all ranks, one after the other, each behind a stamp."""
        return [
            self._communicator.Iallgather(
                [stamp + bytes(_memory(tensor)), self._byte], [received, self._byte]
            )
        ]

    def on_host(self, tensor: Tensor) -> Generator[Sequence[Any], None, Tensor]:
        """The tensor, or if the CPU cannot read it a copy that it can."""
        if not self.on_device(tensor):
            return tensor
        assert self.queue is not None
        copy = self.device.pinned(tensor.nbytes).view(tensor.dtype)
        self.queue.copy(copy, tensor)
        yield [self.queue.mark()]
        return copy

    def back(self, tensor: Tensor, copy: Tensor) -> None:
        """What was changed in a copy made by `on_host`."""
        if copy is not tensor:
            assert self.queue is not None
            self.queue.copy(tensor, copy)

    def barrier(self) -> list[Any]:
        return [self._communicator.Ibarrier()] if self._communicator else []

    def room(self, size: int, most: int | None = None) -> int:
        """Bytes of the buffer that who needs at least `size`, and can use `most`, gets."""
        staging = self._limits.staging
        return max(staging if most is None else min(staging, most), size)

    def borrow(
        self, size: int, place: torch.device = CPU.torch, most: int | None = None
    ) -> Generator[Sequence[Any], None, Tensor]:
        """A buffer of constant size on the device of this name, kept for later operations. First come, first served: as all ranks start their
        collectives in one order, the oldest one that is still under way has its buffer on every rank, and so always goes on.
        """
        turn = object()
        self._queue.append(turn)
        while self._queue[0] is not turn or self._lent == _BUFFERS:
            yield ()
        self._queue.popleft()
        self._lent += 1
        room = self.room(size, most)
        here = [buffer for buffer in self._buffers if buffer.device == place]
        fitting = next((buffer for buffer in here if buffer.numel() >= room), None)
        taken = here[0] if here and fitting is None else fitting  # one that is too small makes room
        self._buffers = [buffer for buffer in self._buffers if buffer is not taken]
        if fitting is None:
            return torch.empty(room, dtype=torch.uint8, device=place)
        return fitting[:room]

    def send_in_turn(
        self, sends: Sequence[tuple[Tensor, int]], tag: int, in_turn: bool
    ) -> Generator[Sequence[Any], None, None]:
        """Sends (tensor, to) once it is this operation's turn, and waits until they have left: what was started first is to arrive first, not
        all of it at the end.
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

    @property
    def buffered(self) -> int:
        """Bytes of the buffers made so far; none is made after the first few operations."""
        return sum(buffer.numel() for buffer in self._buffers)

    def give_back(self, buffer: Tensor) -> None:
        self._lent -= 1
        self._buffers.append(buffer if buffer._base is None else buffer._base)

    def close(self) -> None:
        self._buffers.clear()
        if self._communicator:
            self.progress.status.leave(self._entry)
            self._communicator.Free()

    def _messages(self, memory: Any) -> list[Any]:
        """Bytes in messages that MPI can count."""
        return [
            memory[begin : begin + self._limits.message]
            for begin in range(0, len(memory), self._limits.message)
        ]


def slot_bytes(tensor: Tensor, ranks: int) -> int:
    """Return what a slot needs that takes a whole shard: whole blocks, as slots are."""
    shard = -(-tensor.numel() // ranks)
    return -(-shard // BLOCK) * BLOCK * tensor.element_size()


def slots_of(buffer: Tensor, slots: int, dtype: torch.dtype) -> Tensor:
    """The buffer as [2 rounds, slots, elements], the elements in whole blocks where it has room for one."""
    elements = buffer.numel() // (2 * slots * dtype.itemsize)
    elements -= elements % BLOCK if elements > BLOCK else 0
    return buffer[: 2 * slots * elements * dtype.itemsize].view(dtype).view(2, slots, elements)


def _memory(tensor: Tensor) -> memoryview:
    return memoryview(tensor.view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]  # numpy arrays have the buffer protocol
