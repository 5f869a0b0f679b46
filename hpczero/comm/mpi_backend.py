"""Collectives by MPI: exchanges of pieces, sums in rank order, one order for several groups.

MPI only moves bytes. A collective is a generator that yields the requests it waits for
(`progress`). A reduction exchanges pieces; the parts that have arrived are then combined locally in
rank order, so that the result never depends on the order of arrival.
"""

from collections import deque
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, Protocol

import torch
from torch import Tensor

from hpczero.comm.connection import Connection, slot_bytes, slots_of
from hpczero.comm.progress import CommunicationError, Requests
from hpczero.comm.status import WaitPoint

TINY = 1 << 15  # bytes over all ranks: up to here every rank of an all_reduce sums whole tensors
_BLOCK = 1 << 16  # elements: accumulator and parts stay in the cache
_BROADCAST_PIECE = 1 << 20  # bytes: a rank hands a piece on while it receives the next
_HALF = (torch.float16, torch.bfloat16)
_OPERATIONS: dict[str, Callable[..., Tensor]] = {
    "sum": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
}

# (elements of the rank's own shard, what each rank has sent for them in rank order)
Combine = Callable[[slice, list[Tensor]], None]


class ShardCarrier(Protocol):
    """The collectives that cut tensors into shards; they mean what `Group` says.

    Tensors are flat. `point` says where a rank waits; `code` must be equal on all ranks.
    """

    def all_reduce(self, tensor: Tensor, op: str, point: WaitPoint, code: int) -> Requests: ...

    def reduce_scatter(
        self, tensor: Tensor, combine: Combine, point: WaitPoint, code: int
    ) -> Requests: ...

    def all_gather(
        self, output: Tensor, tensor: Tensor, point: WaitPoint, code: int
    ) -> Requests: ...


class Carrier(ShardCarrier, Protocol):
    """All collectives on tensors."""

    def exchange(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], point: WaitPoint, code: int
    ) -> Requests: ...

    def broadcast(self, tensor: Tensor, root: int, point: WaitPoint, code: int) -> Requests: ...


# ------------------------------------------------------------------------- cutting and combining


def shard(elements: int, ranks: int, rank: int) -> slice:
    """Return the elements that `rank` holds of a tensor that is cut over the ranks."""
    length = -(-elements // ranks)
    return slice(min(rank * length, elements), min((rank + 1) * length, elements))


def check(op: str, output: Tensor, dtype: torch.dtype) -> None:
    assert op in _OPERATIONS, f"reduction '{op}' is unknown; there are {', '.join(_OPERATIONS)}"
    assert not (op == "sum" and dtype is torch.bool), (
        'booleans have no sum: reduce with "max" (any) or "min" (all)'
    )
    fits = output.dtype is dtype or (dtype in _HALF and output.dtype is torch.float32)
    assert fits, f"a reduction of {dtype} cannot be written to {output.dtype}"


def combine_parts(output: Tensor, parts: Sequence[Tensor], op: str) -> None:
    """Write parts[0] op parts[1] op ..., from left to right, to `output`, which may be a part.

    Half precision accumulates in fp32 and is rounded once, when it is written (not at all into an
    fp32 output). Integers wrap; NaN stays NaN.
    """
    operation = _OPERATIONS[op]
    dtype = parts[0].dtype
    if len(parts) == 2 and output.dtype is dtype:  # torch adds two halves in fp32, rounding once
        operation(parts[0], parts[1], out=output)
        return
    size = output.numel()
    length = max(1, min(_BLOCK, size) if output.device.type == "cpu" else size)
    wide = torch.float32 if dtype in _HALF else dtype
    accumulator = torch.empty(length, dtype=wide, device=output.device)
    for begin in range(0, size, length):
        block = slice(begin, begin + length)
        total = accumulator[: output[block].numel()].copy_(parts[0][block])
        for part in parts[1:]:
            operation(total, part[block], out=total)
        output[block].copy_(total)


def combine_into(output: Tensor, op: str) -> Combine:
    def combine(window: slice, parts: list[Tensor]) -> None:
        combine_parts(output[window], parts, op)

    return combine


# --------------------------------------------------------------------------------- collectives


class MpiCarrier:
    """A `Carrier`: messages of MPI between the ranks of one group."""

    def __init__(self, connection: Connection, axis: str, ranks: Sequence[int], rank: int) -> None:
        """`ranks`: their numbers in the world; `rank`: this rank's number in the group."""
        self.connection = connection
        self.ranks = ranks
        self.rank = rank
        self.size = len(ranks)
        self._axis = axis
        # Every rank begins with another peer: not all of them with rank 0.
        self._peers = [(rank + distance) % self.size for distance in range(1, self.size)]

    def all_reduce(self, tensor: Tensor, op: str, point: WaitPoint, code: int) -> Requests:
        if tensor.nbytes * self.size <= TINY:
            return self._all_reduce_tiny(tensor, op, point, code)
        return self._all_reduce_shards(tensor, op, self.connection.tag(point.number, code, True))

    def _all_reduce_tiny(self, tensor: Tensor, op: str, point: WaitPoint, code: int) -> Requests:
        """Gather whole tensors by MPI's own collective, and reduce them locally.

        MPI matches its collectives by their order alone. So each rank's values stand behind a
        stamp, which says to which operation they belong.
        """
        if not self._peers or not tensor.numel():
            return
        stamp = code.to_bytes(8, "little")
        length = 8 + tensor.nbytes
        received = bytearray(self.size * length)
        copy = yield from self.connection.on_host(tensor)
        yield self.connection.gather_stamped(received, copy, stamp)
        starts = range(0, len(received), length)
        for rank, start in zip(self.ranks, starts, strict=True):
            if received[start : start + 8] != stamp:
                raise mismatch(point, self._axis, rank)
        everyones = [
            torch.frombuffer(received, dtype=tensor.dtype, count=tensor.numel(), offset=start + 8)
            for start in starts
        ]
        combine_parts(copy, everyones, op)
        self.connection.copy_back(tensor, copy)

    def _all_reduce_shards(self, tensor: Tensor, op: str, tag: int) -> Requests:
        own_shard = tensor[shard(tensor.numel(), self.size, self.rank)]
        yield from self._reduce_scatter(tensor, combine_into(own_shard, op), tag)
        # Not in turn: it would queue up only now, behind operations that others may wait for.
        yield from self._all_gather(tensor, own_shard, tag, in_turn=False)

    def reduce_scatter(
        self, tensor: Tensor, combine: Combine, point: WaitPoint, code: int
    ) -> Requests:
        return self._reduce_scatter(tensor, combine, self.connection.tag(point.number, code, True))

    def _reduce_scatter(self, tensor: Tensor, combine: Combine, tag: int) -> Requests:
        if not self._peers:
            combine(slice(0, tensor.numel()), [tensor])
            return
        others = self.size - 1
        least = 2 * 8 * others  # one element of any type in each slot
        most = None if tensor.device.type == "cpu" else 2 * others * slot_bytes(tensor, self.size)
        buffer = yield from self.connection.borrow(least, tensor.device, most)
        try:
            slots = slots_of(buffer, others, tensor.dtype)
            yield from self._reduce_rounds(tensor, combine, tag, slots)
        finally:
            self.connection.give_back(buffer)

    def _reduce_rounds(self, tensor: Tensor, combine: Combine, tag: int, slots: Tensor) -> Requests:
        """Reduce in rounds of as many elements of each shard as a slot holds.

        While one round is summed, the next is on its way.
        """
        pieces = [tensor[shard(tensor.numel(), self.size, rank)] for rank in range(self.size)]
        length = slots.shape[-1]
        windows = [slice(begin, begin + length) for begin in range(0, pieces[0].numel(), length)]

        def arriving(number: int) -> dict[int, Tensor]:
            count = pieces[self.rank][windows[number]].numel()
            pairs = zip(self._peers, slots[number % 2], strict=True)
            return {peer: slot[:count] for peer, slot in pairs}

        def post(number: int) -> list[Any]:
            window = windows[number]
            receives = [
                self.connection.receive(part, peer, tag) for peer, part in arriving(number).items()
            ]
            sends = [self.connection.send(pieces[peer][window], peer, tag) for peer in self._peers]
            return list(chain(*receives, *sends))

        posted = post(0) if windows else []
        for number, window in enumerate(windows):
            following = post(number + 1) if number + 1 < len(windows) else []
            yield posted
            parts = arriving(number) | {self.rank: pieces[self.rank][window]}
            combine(window, [parts[rank] for rank in range(self.size)])
            posted = following

    def all_gather(self, output: Tensor, tensor: Tensor, point: WaitPoint, code: int) -> Requests:
        tag = self.connection.tag(point.number, code, True)
        return self._all_gather(output, tensor, tag, in_turn=True)

    def _all_gather(self, output: Tensor, tensor: Tensor, tag: int, in_turn: bool) -> Requests:
        pieces = [output[shard(output.numel(), self.size, rank)] for rank in range(self.size)]
        return self._exchange(pieces, [tensor] * self.size, tag, in_turn)

    def exchange(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], point: WaitPoint, code: int
    ) -> Requests:
        tag = self.connection.tag(point.number, code, True)
        return self._exchange(outputs, inputs, tag, in_turn=True)

    def _exchange(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], tag: int, in_turn: bool
    ) -> Requests:
        """`in_turn`: operations that were started before send before."""
        receives = [
            self.connection.receive(outputs[peer], peer, tag) for peer in reversed(self._peers)
        ]
        _copy(outputs[self.rank], inputs[self.rank])
        sends = [(inputs[peer], peer) for peer in self._peers]
        yield from self.connection.send_in_turn(sends, tag, in_turn)
        yield list(chain(*receives))

    def broadcast(self, tensor: Tensor, root: int, point: WaitPoint, code: int) -> Requests:
        """Broadcast along a binomial tree, piece by piece."""
        tag = self.connection.tag(point.number, code, True)
        parent, children = binomial_tree((self.rank - root) % self.size, self.size)
        sends: list[Any] = []
        for piece in tensor.split(_BROADCAST_PIECE // tensor.element_size()):
            if parent is not None:
                yield self.connection.receive(piece, (parent + root) % self.size, tag)
            for child in children:
                sends += self.connection.send(piece, (child + root) % self.size, tag)
        yield sends


def mismatch(point: WaitPoint, axis: str, rank: int) -> CommunicationError:
    """Make the error for a stamp that is not this operation's."""
    operation = f"{point.label.decode()} (number {point.number} along {axis})"
    theirs = f"what came from rank {rank} belongs to another operation"
    return CommunicationError(f"{operation}: {theirs}, or has another size")


def binomial_tree(position: int, size: int) -> tuple[int | None, list[int]]:
    """Return parent and children in the binomial tree over `size` positions, rooted at 0.

    The child with the largest branch comes first.
    """
    span = position & -position if position else 1 << (size - 1).bit_length()
    branches = [1 << bit for bit in reversed(range(span.bit_length() - 1))]
    children = [position + branch for branch in branches if position + branch < size]
    return (position - span if position else None), children


def _copy(output: Tensor, tensor: Tensor) -> None:
    if output.data_ptr() != tensor.data_ptr():
        output.copy_(tensor)


# ---------------------------------------------------- one order for the operations of two groups
#
# NCCL's operations must start in one order on all ranks, even those of two communicators on the
# same GPUs: else each may hold the GPU and wait for the other. The operations of one group start in
# one order anyway. Two groups of the same ranks, whose order relative to each other may differ
# between ranks, are two channels of one communicator. They agree on an order:
#
# 1. A rank tells the first rank of every operation that it starts (a message of no bytes, whose tag
#    is the channel).
# 2. The first rank gives the next place in the order to an operation that all ranks have started,
#    and tells the others.
# 3. A rank hands an operation to NCCL when it is its turn. As all ranks have started it by then,
#    nobody waits for a rank that has not come, which might itself wait for what comes after it in
#    the order.

Turn = object


class Order:
    """Say whose turn it is among the operations of all channels; one channel needs no agreement."""

    def __init__(self, mpi: Any) -> None:
        self._mpi = mpi
        self._started: list[deque[Turn]] = [deque()]  # by channel: started here and not yet done
        self._channels: deque[int] = deque()  # of the next operations, in the order agreed on
        self._agreement: Agreement | None = None

    def add(self, communicator: Callable[[], Any]) -> int:
        """Add a channel and return its number. Collective, while nothing is in flight.

        `communicator` makes an MPI communicator of these ranks.
        """
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
        channels = self._channels
        return bool(channels) and channels[0] == channel and self._started[channel][0] is turn

    def done(self, channel: int, turn: Turn) -> None:
        """End the operation; one that has failed before its turn leaves the order as it is."""
        channels = self._channels
        if channels and channels[0] == channel and self._started[channel][0] is turn:
            channels.popleft()
        self._started[channel].remove(turn)

    def close(self) -> None:
        """Collective, when nothing is in flight."""
        if self._agreement is not None:
            self._agreement.close()
            self._agreement = None


class Agreement:
    """The agreement of a communicator's ranks; it owns the communicator.

    All calls are made under the lock of `Progress`.
    """

    def __init__(self, mpi: Any, communicator: Any) -> None:
        self._mpi = mpi
        self._communicator = communicator
        # By channel: how many operations each rank has started, and how many have a place.
        self._counts = [[0] * communicator.size]
        self._placed = [0]
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
        """Return the channels of the operations placed since the last call, in order."""
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
        """Return (rank, channel) of every message that has arrived."""
        messages = []
        status = self._mpi.Status()
        while self._communicator.Iprobe(self._mpi.ANY_SOURCE, self._mpi.ANY_TAG, status):
            rank, channel = status.Get_source(), status.Get_tag()
            self._communicator.Recv([bytearray(), self._mpi.BYTE], rank, channel)
            messages.append((rank, channel))
        return messages
