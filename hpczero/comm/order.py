"""One order for the operations of several groups that one communicator of NCCL carries.

NCCL's operations must start in one order on all ranks, those of two communicators on the same GPUs,
too: else each may hold the GPU and wait for the other. The operations of one group start in one
order anyway. Two groups of the same ranks, whose order relative to each other may differ between
ranks, are two channels of one communicator, and agree on an order:

1. A rank tells the first rank of every operation that it starts (a message of no bytes, whose tag is
   the channel).
2. What all ranks have started, the first rank gives the next place, and tells the others.
3. An operation is handed to NCCL when it is its turn. As all ranks have started it by then, nobody
   waits for a rank that has not come, which might itself wait for what comes after it in the order.
"""

from collections import deque
from collections.abc import Callable
from typing import Any

Turn = object


class Order:
    """Whose turn it is. One channel needs no agreement."""

    def __init__(self, mpi: Any) -> None:
        self._mpi = mpi
        self._started: list[deque[Turn]] = [deque()]  # by channel: started here and not yet done
        self._channels: deque[int] = deque()  # whose operations go next
        self._agreement: Agreement | None = None

    def add(self, communicator: Callable[[], Any]) -> int:
        """Another channel. Collective, while nothing is under way; `communicator` makes one of MPI."""
        if self._agreement is None:
            self._agreement = Agreement(self._mpi, communicator())
        self._started.append(deque())
        self._agreement.add()
        return len(self._started) - 1

    def start(self, channel: int) -> Turn:
        turn = Turn()
        self._started[channel].append(turn)
        if self._agreement is None:
            self._channels.append(channel)
        else:
            self._agreement.start(channel)
        return turn

    def is_next(self, channel: int, turn: Turn) -> bool:
        if self._agreement is not None:
            self._channels.extend(self._agreement.agreed())
        return bool(self._channels) and self._channels[0] == channel and self._started[channel][0] is turn

    def done(self, channel: int, turn: Turn) -> None:
        """One that has failed before it was its turn has none."""
        if self._channels and self._channels[0] == channel and self._started[channel][0] is turn:
            self._channels.popleft()
        self._started[channel].remove(turn)

    def close(self) -> None:
        """Collective, when nothing is under way."""
        if self._agreement is not None:
            self._agreement.close()
            self._agreement = None


class Agreement:
    """The agreement of a communicator's ranks; it owns the communicator.

    All calls are made under the lock of `Progress`.
    """

    def __init__(self, mpi: Any, communicator: Any) -> None:
        self._mpi, self._communicator = mpi, communicator
        self._counts = [[0] * communicator.size]  # by channel: operations that each rank has started
        self._placed = [0]  # by channel: operations that have a place
        self._sent: list[Any] = []

    def add(self) -> None:
        self._counts.append([0] * self._communicator.size)
        self._placed.append(0)

    def start(self, channel: int) -> None:
        if self._communicator.rank == 0:
            self._counts[channel][0] += 1
        else:
            self._tell(0, channel)

    def agreed(self) -> list[int]:
        """The channels of operations that have got their places since the last call, in order."""
        received = self._receive()
        self._sent = [request for request in self._sent if not request.Test()]
        if self._communicator.rank > 0:
            return [channel for _, channel in received]
        for rank, channel in received:
            self._counts[channel][rank] += 1
        placed = []
        for channel, counts in enumerate(self._counts):
            placed += [channel] * (min(counts) - self._placed[channel])
            self._placed[channel] = min(counts)
        for channel in placed:
            for rank in range(1, self._communicator.size):
                self._tell(rank, channel)
        return placed

    def close(self) -> None:
        self._mpi.Request.Waitall(self._sent)
        self._communicator.Free()

    def _tell(self, rank: int, channel: int) -> None:
        self._sent.append(self._communicator.Isend([b"", self._mpi.BYTE], rank, channel))

    def _receive(self) -> list[tuple[int, int]]:
        """(rank, channel) of every message that has arrived."""
        found, status = [], self._mpi.Status()
        while self._communicator.Iprobe(self._mpi.ANY_SOURCE, self._mpi.ANY_TAG, status):
            rank, channel = status.Get_source(), status.Get_tag()
            self._communicator.Recv([bytearray(), self._mpi.BYTE], rank, channel)
            found.append((rank, channel))
        return found
