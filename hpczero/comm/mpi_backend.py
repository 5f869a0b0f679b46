"""How MPI carries a group's collectives: each is a generator that yields the requests that it waits for.

MPI only moves bytes, and reductions are an exchange of pieces followed by a local sum in rank order.
"""

from collections import deque
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, Protocol

import torch
from torch import Tensor

from hpczero.comm.connection import Connection, slot_bytes, slots_of
from hpczero.comm.progress import CommunicationError, Steps
from hpczero.comm.status import WaitPoint

# The local half of a reduction: parts that have arrived, combined in rank order (so the result never depends on arrival).
_BLOCK = 1 << 16  # elements: accumulator and parts stay in the cache
_HALF = (torch.float16, torch.bfloat16)
_OPERATIONS: dict[str, Callable[..., Tensor]] = {
    "sum": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
}


def check(op: str, output: Tensor, dtype: torch.dtype) -> None:
    assert op in _OPERATIONS, f"reduction '{op}' is unknown; there are {', '.join(_OPERATIONS)}"
    assert not (op == "sum" and dtype is torch.bool), (
        'booleans have no sum: reduce with "max" (any) or "min" (all)'
    )
    fits = output.dtype is dtype or (dtype in _HALF and output.dtype is torch.float32)
    assert fits, f"a reduction of {dtype} cannot be written to {output.dtype}"


def combine_parts(output: Tensor, parts: Sequence[Tensor], op: str) -> None:
    """output = parts[0] op parts[1] op ..., from left to right. Half precision accumulates in fp32 and is rounded once, when it is
    written (not at all into an fp32 output); integers wrap; NaN stays NaN. `output` may be one of the parts.
    """
    operation = _OPERATIONS[op]
    dtype = parts[0].dtype
    if (
        len(parts) == 2 and output.dtype is dtype
    ):  # torch adds two half-precision numbers in fp32 and rounds once
        operation(parts[0], parts[1], out=output)
        return
    length = max(1, min(_BLOCK, output.numel()) if output.device.type == "cpu" else output.numel())
    accumulator = torch.empty(
        length, dtype=torch.float32 if dtype in _HALF else dtype, device=output.device
    )
    for begin in range(0, output.numel(), length):
        block = slice(begin, begin + length)
        total = accumulator[: output[block].numel()].copy_(parts[0][block])
        for part in parts[1:]:
            operation(total, part[block], out=total)
        output[block].copy_(total)


Combine = Callable[
    [slice, list[Tensor]], None
]  # (elements of the own shard, what each rank sent for them, in rank order)
_BROADCAST_PIECE = 1 << 20  # bytes: a rank hands a piece on while it receives the next


class Carrier(Protocol):
    """Flat tensors; what the operations mean stands in `group`. `tag` separates operations that do not belong together."""

    def all_reduce_tiny(self, tensor: Tensor, op: str, code: int, place: WaitPoint) -> Steps:
        """`code` and `place`: which operation, and how it is called."""
        ...

    def all_reduce(self, tensor: Tensor, op: str, tag: int) -> Steps: ...

    def reduce_scatter(self, tensor: Tensor, combine: Combine, tag: int) -> Steps: ...

    def all_gather(self, output: Tensor, tensor: Tensor, tag: int) -> Steps: ...

    def exchange(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], tag: int) -> Steps: ...

    def broadcast(self, tensor: Tensor, root: int, tag: int) -> Steps: ...


def shard(elements: int, ranks: int, rank: int) -> slice:
    """The elements of a tensor that `rank` holds when it is cut over the group."""
    length = -(-elements // ranks)
    return slice(min(rank * length, elements), min((rank + 1) * length, elements))


def combine_into(output: Tensor, op: str) -> Combine:
    def combine(window: slice, parts: list[Tensor]) -> None:
        combine_parts(output[window], parts, op)

    return combine


class ByMessages:
    def __init__(self, connection: Connection, axis: str, ranks: Sequence[int], rank: int) -> None:
        """`ranks` of the group by their numbers in the world, `rank`: which of them this one is."""
        self.connection, self._axis, self.ranks, self.rank, self.size = (
            connection,
            axis,
            ranks,
            rank,
            len(ranks),
        )
        self._peers = [
            (rank + distance) % self.size for distance in range(1, self.size)
        ]  # not all to rank 0 first

    def all_reduce_tiny(self, tensor: Tensor, op: str, code: int, place: WaitPoint) -> Steps:
        """As MPI matches its own collectives without regard to what they are, each rank's values stand behind a stamp."""
        if not self._peers or not tensor.numel():
            return
        stamp, length = code.to_bytes(8, "little"), 8 + tensor.nbytes
        received = bytearray(self.size * length)
        copy = yield from self.connection.on_host(tensor)
        yield self.connection.gather_stamped(received, copy, stamp)
        starts = range(0, len(received), length)
        for rank, start in zip(self.ranks, starts, strict=True):
            if received[start : start + 8] != stamp:
                where = f"{place.label.decode()} (number {place.number} along {self._axis})"
                raise CommunicationError(
                    f"{where}: what came from rank {rank} belongs to another operation, or has another size"
                )
        everyones = [
            torch.frombuffer(received, dtype=tensor.dtype, count=tensor.numel(), offset=start + 8)
            for start in starts
        ]
        combine_parts(copy, everyones, op)
        self.connection.back(tensor, copy)

    def all_reduce(self, tensor: Tensor, op: str, tag: int) -> Steps:
        own = tensor[shard(tensor.numel(), self.size, self.rank)]
        yield from self.reduce_scatter(tensor, combine_into(own, op), tag)
        yield from self._all_gather(
            tensor, own, tag, in_turn=False
        )  # it would ask for its turn only now, behind what the others may wait for

    def reduce_scatter(self, tensor: Tensor, combine: Combine, tag: int) -> Steps:
        if not self._peers:
            combine(slice(0, tensor.numel()), [tensor])
            return
        others = self.size - 1
        least = 2 * 8 * others  # one element of any type in each slot
        most = None if tensor.device.type == "cpu" else 2 * others * slot_bytes(tensor, self.size)
        buffer = yield from self.connection.borrow(least, tensor.device, most)
        try:
            yield from self._reduce_rounds(
                tensor, combine, tag, slots_of(buffer, self.size - 1, tensor.dtype)
            )
        finally:
            self.connection.give_back(buffer)

    def _reduce_rounds(self, tensor: Tensor, combine: Combine, tag: int, slots: Tensor) -> Steps:
        """As many elements of each shard at a time as the slots hold: while one round is summed, the next is on its way."""
        pieces = [tensor[shard(tensor.numel(), self.size, rank)] for rank in range(self.size)]
        length = slots.shape[-1]
        windows = [slice(begin, begin + length) for begin in range(0, pieces[0].numel(), length)]

        def arriving(number: int) -> dict[int, Tensor]:
            own = pieces[self.rank][windows[number]].numel()
            return {
                peer: slot[:own] for peer, slot in zip(self._peers, slots[number % 2], strict=True)
            }

        def post(number: int) -> list[Any]:
            receives = [
                self.connection.receive(part, peer, tag) for peer, part in arriving(number).items()
            ]
            sends = [
                self.connection.send(pieces[peer][windows[number]], peer, tag)
                for peer in self._peers
            ]
            return list(chain(*receives, *sends))

        posted = post(0) if windows else []
        for number, window in enumerate(windows):
            following = post(number + 1) if number + 1 < len(windows) else []
            yield posted
            parts = arriving(number) | {self.rank: pieces[self.rank][window]}
            combine(window, [parts[rank] for rank in range(self.size)])
            posted = following

    def all_gather(self, output: Tensor, tensor: Tensor, tag: int) -> Steps:
        return self._all_gather(output, tensor, tag, in_turn=True)

    def _all_gather(self, output: Tensor, tensor: Tensor, tag: int, in_turn: bool) -> Steps:
        pieces = [output[shard(output.numel(), self.size, rank)] for rank in range(self.size)]
        return self._exchange(pieces, [tensor] * self.size, tag, in_turn)

    def exchange(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], tag: int) -> Steps:
        return self._exchange(outputs, inputs, tag, in_turn=True)

    def _exchange(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], tag: int, in_turn: bool
    ) -> Steps:
        """`in_turn`: what was started before leaves before."""
        receives = [
            self.connection.receive(outputs[peer], peer, tag) for peer in reversed(self._peers)
        ]
        _copy(outputs[self.rank], inputs[self.rank])
        yield from self.connection.send_in_turn(
            [(inputs[peer], peer) for peer in self._peers], tag, in_turn
        )
        yield list(chain(*receives))

    def broadcast(self, tensor: Tensor, root: int, tag: int) -> Steps:
        """Along a binomial tree, piece by piece."""
        parent, children = tree((self.rank - root) % self.size, self.size)
        sends: list[Any] = []
        for piece in tensor.split(_BROADCAST_PIECE // tensor.element_size()):
            if parent is not None:
                yield self.connection.receive(piece, (parent + root) % self.size, tag)
            for child in children:
                sends += self.connection.send(piece, (child + root) % self.size, tag)
        yield sends


def tree(place: int, size: int) -> tuple[int | None, list[int]]:
    """Parent and children of a place in the binomial tree over `size` places rooted at 0, the largest branch first."""
    span = place & -place if place else 1 << (size - 1).bit_length()
    branches = [1 << bit for bit in reversed(range(span.bit_length() - 1))]
    return (place - span if place else None), [
        place + branch for branch in branches if place + branch < size
    ]


def _copy(output: Tensor, tensor: Tensor) -> None:
    if output.data_ptr() != tensor.data_ptr():
        output.copy_(tensor)


# One order for the operations of several groups that one communicator of NCCL carries.
#
# NCCL's operations must start in one order on all ranks, those of two communicators on the same GPUs,
# too: else each may hold the GPU and wait for the other. The operations of one group start in one
# order anyway. Two groups of the same ranks, whose order relative to each other may differ between
# ranks, are two channels of one communicator, and agree on an order:
#
# 1. A rank tells the first rank of every operation that it starts (a message of no bytes, whose tag is
#    the channel).
# 2. What all ranks have started, the first rank gives the next place, and tells the others.
# 3. An operation is handed to NCCL when it is its turn. As all ranks have started it by then, nobody
#    waits for a rank that has not come, which might itself wait for what comes after it in the order.
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
        return (
            bool(self._channels)
            and self._channels[0] == channel
            and self._started[channel][0] is turn
        )

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
        self._counts = [
            [0] * communicator.size
        ]  # by channel: operations that each rank has started
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
