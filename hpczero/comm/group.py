"""Collectives on torch tensors over one group of ranks.

Values never depend on the order of arrival or on the MPI library: MPI only moves bytes, and reductions are an exchange of pieces
followed by a local sum in rank order (half precision in fp32, rounded once). An all_reduce is a reduce_scatter followed by an
all_gather; a tiny one gathers the whole tensors and reduces locally, with the same result.

How a tensor is cut: over its elements in memory order; with n elements and N ranks each shard has ceil(n / N), rank r holding
elements [r·ceil(n / N), (r + 1)·ceil(n / N)) as far as they exist: the last shards may be short or empty. `shard(n, N, r)` is
that slice.

All ranks of a group start its collectives in the same order. Every operation is there blocking and as `start_<name>(...) -> Work`;
a started one owns its tensors until it is done, and moves on only while some operation is waited for or polled. Tensors are
contiguous; those of one call must not overlap except where said.
"""

from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from hpczero.comm import reduction
from hpczero.comm.connection import Connection, slots_of
from hpczero.comm.work import Steps, Work

_TAGS = 16384  # MPI promises tags up to 32767: the lower half for collectives, the upper for send and receive
_TINY = 1 << 15  # bytes over all ranks: up to here an all_reduce gathers whole tensors
_BROADCAST_PIECE = 1 << 20  # bytes: a rank hands a piece on while it receives the next


def shard(elements: int, ranks: int, rank: int) -> slice:
    """The elements of a tensor that `rank` holds when it is cut over the group."""
    length = -(-elements // ranks)
    return slice(min(rank * length, elements), min((rank + 1) * length, elements))


class Group:
    """Ranks that talk along one axis: `.ranks` are their numbers in the world, `.size` how many, `.rank` this one's place among them."""

    def __init__(self, axis: str, ranks: Sequence[int], rank: int, node_of_rank: Sequence[int], connection: Connection) -> None:
        self.axis = axis
        self.ranks = tuple(ranks)
        self.rank = rank
        self.size = len(self.ranks)
        self._mpi = connection
        self._peers = [(rank + distance) % self.size for distance in range(1, self.size)]  # not all to rank 0 first
        self._elsewhere = [node_of_rank[peer] != node_of_rank[self.ranks[rank]] for peer in self.ranks]
        self._between = sum(self._elsewhere) / max(1, self.size - 1)  # the share of the peers on other nodes
        self._collectives = 0
        self._messages: dict[tuple[str, int], int] = {}

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> None:
        """Every rank's `tensor` becomes the "sum", "max" or "min" of all, in place."""
        self.start_all_reduce(tensor, op).wait()

    def reduce_scatter(self, output: Tensor, tensor: Tensor, op: str = "sum") -> None:
        """`output` becomes this rank's shard of the sum of all ranks' `tensor`. It may be that very shard of `tensor`, which is
        otherwise unchanged. For half precision it may be fp32: the sum unrounded.
        """
        self.start_reduce_scatter(output, tensor, op).wait()

    def all_gather(self, output: Tensor, tensor: Tensor) -> None:
        """`output` becomes all ranks' shards, one after the other. `tensor` is this rank's, and may be that very shard of `output`."""
        self.start_all_gather(output, tensor).wait()

    def broadcast(self, tensor: Tensor, root: int = 0) -> None:
        """`tensor` becomes that of `root` (a place in the group)."""
        self.start_broadcast(tensor, root).wait()

    def all_to_all(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
        """`outputs[i]` becomes what rank i has as `inputs[<this rank>]`; both know its size. One's own may be the same tensor."""
        self.start_all_to_all(outputs, inputs).wait()

    def send(self, tensor: Tensor, to: int) -> None:
        """To the rank at place `to`; messages between two ranks arrive in the order in which they were started."""
        self.start_send(tensor, to).wait()

    def receive(self, tensor: Tensor, source: int) -> None:
        """Into `tensor`, of the size that was sent."""
        self.start_receive(tensor, source).wait()

    def barrier(self) -> None:
        """Returns once every rank has come here."""
        self.start_barrier().wait()

    def start_all_reduce(self, tensor: Tensor, op: str = "sum") -> Work:
        flat = _flat(tensor)
        reduction.check(op, flat, flat.dtype)
        tiny = flat.nbytes * self.size <= _TINY
        steps = self._all_reduce_tiny(flat, op) if tiny else self._all_reduce(flat, op, self._next_tag())
        return self._start_even("all_reduce", steps, 2 * flat.nbytes)

    def start_reduce_scatter(self, output: Tensor, tensor: Tensor, op: str = "sum") -> Work:
        flat, own = _flat(tensor), _flat(output)
        reduction.check(op, own, flat.dtype)
        self._check_shard("output", own, flat)
        return self._start_even("reduce_scatter", self._reduce_scatter(own, flat, op, self._next_tag()), flat.nbytes)

    def start_all_gather(self, output: Tensor, tensor: Tensor) -> Work:
        flat, own = _flat(output), _flat(tensor)
        assert own.dtype is flat.dtype, f"an all_gather of {own.dtype} cannot be written to {flat.dtype}"
        self._check_shard("tensor", own, flat)
        return self._start_even("all_gather", self._all_gather(flat, own, self._next_tag()), flat.nbytes)

    def start_broadcast(self, tensor: Tensor, root: int = 0) -> Work:
        flat = _flat(tensor)
        return self._start_even("broadcast", self._broadcast(flat, root, self._next_tag()), flat.nbytes)

    def start_all_to_all(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Work:
        counts = f"{len(inputs)} inputs and {len(outputs)} outputs"
        assert len(outputs) == len(inputs) == self.size, f"an all_to_all over {self.size} ranks got {counts}"
        sources, targets = [_flat(tensor) for tensor in inputs], [_flat(tensor) for tensor in outputs]
        sizes = [0 if peer == self.rank else source.nbytes for peer, source in enumerate(sources)]
        between = sum(size for size, elsewhere in zip(sizes, self._elsewhere, strict=True) if elsewhere)
        return self._start("all_to_all", self._exchange(targets, sources, self._next_tag()), sum(sizes) - between, between)

    def start_send(self, tensor: Tensor, to: int) -> Work:
        assert to != self.rank, f"rank {self.rank} of {self.axis} cannot send to itself"
        steps = _once(self._mpi.send(_flat(tensor), to, self._next_message("to", to)))
        between = tensor.nbytes if self._elsewhere[to] else 0
        return self._start("send", steps, tensor.nbytes - between, between)

    def start_receive(self, tensor: Tensor, source: int) -> Work:
        assert source != self.rank, f"rank {self.rank} of {self.axis} cannot receive from itself"
        return self._start("receive", _once(self._mpi.receive(_flat(tensor), source, self._next_message("from", source))), 0, 0)

    def start_barrier(self) -> Work:
        return self._start("barrier", _once(self._mpi.barrier()), 0, 0)

    # How each is carried out: generators that yield the requests that they wait for.

    def _all_reduce_tiny(self, tensor: Tensor, op: str) -> Steps:
        if self._peers and tensor.numel():
            everyones = torch.empty((self.size, tensor.numel()), dtype=tensor.dtype)
            yield self._mpi.gather_equal(everyones, tensor)
            reduction.combine(tensor, tuple(everyones), op)

    def _all_reduce(self, tensor: Tensor, op: str, tag: int) -> Steps:
        own = tensor[shard(tensor.numel(), self.size, self.rank)]
        yield from self._reduce_scatter(own, tensor, op, tag)
        yield from self._all_gather(tensor, own, tag)

    def _reduce_scatter(self, output: Tensor, tensor: Tensor, op: str, tag: int) -> Steps:
        if not self._peers:
            _copy(output, tensor)
            return
        buffer = yield from self._mpi.borrow(self.size - 1)
        try:
            yield from self._reduce_rounds(output, tensor, op, tag, slots_of(buffer, self.size - 1, tensor.dtype))
        finally:
            self._mpi.give_back(buffer)

    def _reduce_rounds(self, output: Tensor, tensor: Tensor, op: str, tag: int, slots: Tensor) -> Steps:
        """As many elements of each shard at a time as the slots hold: while one round is summed, the next is on its way."""
        pieces = [tensor[shard(tensor.numel(), self.size, rank)] for rank in range(self.size)]
        length = slots.shape[-1]
        windows = [slice(begin, begin + length) for begin in range(0, pieces[0].numel(), length)]

        def arriving(number: int) -> dict[int, Tensor]:
            own = pieces[self.rank][windows[number]].numel()
            return {peer: slot[:own] for peer, slot in zip(self._peers, slots[number % 2], strict=True)}

        def post(number: int) -> list[Any]:
            receives = [self._mpi.receive(part, peer, tag) for peer, part in arriving(number).items()]
            sends = [self._mpi.send(pieces[peer][windows[number]], peer, tag) for peer in self._peers]
            return list(chain(*receives, *sends))

        posted = post(0) if windows else []
        for number, window in enumerate(windows):
            following = post(number + 1) if number + 1 < len(windows) else []
            yield posted
            parts = arriving(number) | {self.rank: pieces[self.rank][window]}
            reduction.combine(output[window], [parts[rank] for rank in range(self.size)], op)
            posted = following

    def _all_gather(self, output: Tensor, tensor: Tensor, tag: int) -> Steps:
        pieces = [output[shard(output.numel(), self.size, rank)] for rank in range(self.size)]
        return self._exchange(pieces, [tensor] * self.size, tag)

    def _exchange(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], tag: int) -> Steps:
        receives = [self._mpi.receive(outputs[peer], peer, tag) for peer in reversed(self._peers)]
        sends = [self._mpi.send(inputs[peer], peer, tag) for peer in self._peers]
        _copy(outputs[self.rank], inputs[self.rank])
        yield list(chain(*receives, *sends))

    def _broadcast(self, tensor: Tensor, root: int, tag: int) -> Steps:
        """Along a binomial tree, piece by piece."""
        parent, children = tree((self.rank - root) % self.size, self.size)
        sends: list[Any] = []
        for piece in tensor.split(_BROADCAST_PIECE // tensor.element_size()):
            if parent is not None:
                yield self._mpi.receive(piece, (parent + root) % self.size, tag)
            for child in children:
                sends += self._mpi.send(piece, (child + root) % self.size, tag)
        yield sends

    def _start_even(self, operation: str, steps: Steps, size: int) -> Work:
        """An operation that sends `size` / N bytes to each of the other ranks."""
        sent = size * (self.size - 1) // self.size
        between = round(sent * self._between)
        return self._start(operation, steps, sent - between, between)

    def _start(self, operation: str, steps: Steps, inside: int, between: int) -> Work:
        entry = self._mpi.ledger.entry(self.axis, operation)
        entry.sent(inside, between)
        return self._mpi.progress.start(steps, entry)

    def _check_shard(self, name: str, own: Tensor, whole: Tensor) -> None:
        cut = shard(whole.numel(), self.size, self.rank)
        expected = f"shard {self.rank} of {whole.numel()} elements over {self.size} ranks has {cut.stop - cut.start}"
        assert own.numel() == cut.stop - cut.start, f"{name} has {own.numel()} elements; {expected}"

    def _next_tag(self) -> int:
        """Collectives are told apart by their number, so that several can be under way."""
        self._collectives += 1
        return self._collectives % _TAGS

    def _next_message(self, direction: str, peer: int) -> int:
        number = self._messages[direction, peer] = self._messages.get((direction, peer), 0) + 1
        return _TAGS + number % _TAGS


def tree(place: int, size: int) -> tuple[int | None, list[int]]:
    """Parent and children of a place in the binomial tree over `size` places rooted at 0, the largest branch first."""
    span = place & -place if place else 1 << (size - 1).bit_length()
    branches = [1 << bit for bit in reversed(range(span.bit_length() - 1))]
    return (place - span if place else None), [place + branch for branch in branches if place + branch < size]


def _once(requests: list[Any]) -> Steps:
    yield requests


def _copy(output: Tensor, tensor: Tensor) -> None:
    if output.data_ptr() != tensor.data_ptr():
        output.copy_(tensor)


def _flat(tensor: Tensor) -> Tensor:
    assert tensor.device.type == "cpu", f"the MPI backend moves CPU tensors; this one is on {tensor.device}"
    assert tensor.is_contiguous(), f"only contiguous tensors are sent; this one has shape {tuple(tensor.shape)}, strides {tensor.stride()}"
    return tensor.detach().view(-1)
