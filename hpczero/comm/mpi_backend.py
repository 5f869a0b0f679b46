"""How MPI carries a group's collectives: each is a generator that yields the requests that it waits for.

MPI only moves bytes, and reductions are an exchange of pieces followed by a local sum in rank order.
"""

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, Protocol

import torch
from torch import Tensor

from hpczero.comm import reduction
from hpczero.comm.connection import Connection, slot_bytes, slots_of
from hpczero.comm.progress import CommunicationError, Steps
from hpczero.comm.status import Place

Combine = Callable[[slice, list[Tensor]], None]  # (elements of the own shard, what each rank sent for them, in rank order)
_BROADCAST_PIECE = 1 << 20  # bytes: a rank hands a piece on while it receives the next


class Carrier(Protocol):
    """Flat tensors; what the operations mean stands in `group`. `tag` separates operations that do not belong together."""

    def all_reduce_tiny(self, tensor: Tensor, op: str, code: int, place: Place) -> Steps:
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
        reduction.combine(output[window], parts, op)

    return combine


class ByMessages:
    def __init__(self, connection: Connection, axis: str, ranks: Sequence[int], rank: int) -> None:
        """`ranks` of the group by their numbers in the world, `rank`: which of them this one is."""
        self.connection, self._axis, self.ranks, self.rank, self.size = connection, axis, ranks, rank, len(ranks)
        self._peers = [(rank + distance) % self.size for distance in range(1, self.size)]  # not all to rank 0 first

    def all_reduce_tiny(self, tensor: Tensor, op: str, code: int, place: Place) -> Steps:
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
                raise CommunicationError(f"{where}: what came from rank {rank} belongs to another operation, or has another size")
        everyones = [torch.frombuffer(received, dtype=tensor.dtype, count=tensor.numel(), offset=start + 8) for start in starts]
        reduction.combine(copy, everyones, op)
        self.connection.back(tensor, copy)

    def all_reduce(self, tensor: Tensor, op: str, tag: int) -> Steps:
        own = tensor[shard(tensor.numel(), self.size, self.rank)]
        yield from self.reduce_scatter(tensor, combine_into(own, op), tag)
        yield from self._all_gather(tensor, own, tag, in_turn=False)  # it would ask for its turn only now, behind what the others may wait for

    def reduce_scatter(self, tensor: Tensor, combine: Combine, tag: int) -> Steps:
        if not self._peers:
            combine(slice(0, tensor.numel()), [tensor])
            return
        others = self.size - 1
        least = 2 * 8 * others  # one element of any type in each slot
        most = None if tensor.device.type == "cpu" else 2 * others * slot_bytes(tensor, self.size)
        buffer = yield from self.connection.borrow(least, tensor.device, most)
        try:
            yield from self._reduce_rounds(tensor, combine, tag, slots_of(buffer, self.size - 1, tensor.dtype))
        finally:
            self.connection.give_back(buffer)

    def _reduce_rounds(self, tensor: Tensor, combine: Combine, tag: int, slots: Tensor) -> Steps:
        """As many elements of each shard at a time as the slots hold: while one round is summed, the next is on its way."""
        pieces = [tensor[shard(tensor.numel(), self.size, rank)] for rank in range(self.size)]
        length = slots.shape[-1]
        windows = [slice(begin, begin + length) for begin in range(0, pieces[0].numel(), length)]

        def arriving(number: int) -> dict[int, Tensor]:
            own = pieces[self.rank][windows[number]].numel()
            return {peer: slot[:own] for peer, slot in zip(self._peers, slots[number % 2], strict=True)}

        def post(number: int) -> list[Any]:
            receives = [self.connection.receive(part, peer, tag) for peer, part in arriving(number).items()]
            sends = [self.connection.send(pieces[peer][windows[number]], peer, tag) for peer in self._peers]
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

    def _exchange(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], tag: int, in_turn: bool) -> Steps:
        """`in_turn`: what was started before leaves before."""
        receives = [self.connection.receive(outputs[peer], peer, tag) for peer in reversed(self._peers)]
        _copy(outputs[self.rank], inputs[self.rank])
        yield from self.connection.send_in_turn([(inputs[peer], peer) for peer in self._peers], tag, in_turn)
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
    return (place - span if place else None), [place + branch for branch in branches if place + branch < size]


def _copy(output: Tensor, tensor: Tensor) -> None:
    if output.data_ptr() != tensor.data_ptr():
        output.copy_(tensor)
