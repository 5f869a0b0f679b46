"""What a group needs of MPI: bytes from here to there, as non-blocking requests; and the buffers in which pieces arrive."""

from collections import deque
from collections.abc import Generator, Sequence
from typing import Any

import torch
from torch import Tensor

from hpczero.comm.ledger import Ledger
from hpczero.comm.work import Limits, Progress

_BUFFERS = 2  # reductions of a group whose pieces arrive at the same time; further ones wait for their turn


class Connection:
    """Of one group. A group of one rank has no communicator and sends nothing."""

    def __init__(self, mpi: Any, communicator: Any, progress: Progress, ledger: Ledger, limits: Limits) -> None:
        self.progress = progress
        self.ledger = ledger
        self._byte = mpi.BYTE
        self._communicator = communicator
        self._limits = limits
        self._buffers: list[Tensor] = []  # free ones
        self._lent = 0
        self._queue: deque[object] = deque()

    def send(self, tensor: Tensor, to: int, tag: int) -> list[Any]:
        return [self._communicator.Isend([part, self._byte], to, tag) for part in self._messages(tensor)]

    def receive(self, tensor: Tensor, source: int, tag: int) -> list[Any]:
        return [self._communicator.Irecv([part, self._byte], source, tag) for part in self._messages(tensor)]

    def gather_equal(self, output: Tensor, tensor: Tensor) -> list[Any]:
        """Tensors of one size from all ranks, one after the other."""
        return [self._communicator.Iallgather([_memory(tensor), self._byte], [_memory(output), self._byte])]

    def barrier(self) -> list[Any]:
        return [self._communicator.Ibarrier()] if self._communicator else []

    def borrow(self, slots: int) -> Generator[Sequence[Any], None, Tensor]:
        """A buffer of constant size, kept for later operations. First come, first served: as all ranks start their collectives in one
        order, the oldest one that is still under way has its buffer on every rank, and so always goes on.
        """
        turn = object()
        self._queue.append(turn)
        while self._queue[0] is not turn or self._lent == _BUFFERS:
            yield ()
        self._queue.popleft()
        self._lent += 1
        size = max(self._limits.staging, 2 * 8 * slots)  # at least one element of any type in each slot
        return self._buffers.pop() if self._buffers else torch.empty(size, dtype=torch.uint8)

    def give_back(self, buffer: Tensor) -> None:
        self._lent -= 1
        self._buffers.append(buffer)

    def close(self) -> None:
        self._buffers.clear()
        if self._communicator:
            self._communicator.Free()

    def _messages(self, tensor: Tensor) -> list[memoryview]:
        """The tensor's bytes, in messages that MPI can count."""
        memory = _memory(tensor)
        return [memory[begin : begin + self._limits.message] for begin in range(0, len(memory), self._limits.message)]


def slots_of(buffer: Tensor, slots: int, dtype: torch.dtype) -> Tensor:
    """The buffer as [2 rounds, slots, elements]."""
    elements = buffer.numel() // (2 * slots * dtype.itemsize)
    return buffer[: 2 * slots * elements * dtype.itemsize].view(dtype).view(2, slots, elements)


def _memory(tensor: Tensor) -> memoryview:
    return memoryview(tensor.view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]  # numpy arrays have the buffer protocol
