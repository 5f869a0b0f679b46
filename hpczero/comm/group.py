"""Collectives on torch tensors over one group of ranks: all_reduce, reduce_scatter, all_gather, broadcast, all_to_all, send, receive, barrier.

Values never depend on the order of arrival or on the MPI library: MPI only moves bytes, and reductions are an exchange of pieces
followed by a local sum in rank order (half precision in fp32, rounded once). An all_reduce is a reduce_scatter followed by an all_gather; a tiny one
gathers the whole tensors and reduces locally.

How a tensor is cut: over its elements in memory order; with n elements and N ranks each shard has ceil(n / N), rank r holding elements
[r·ceil(n / N), (r + 1)·ceil(n / N)) as far as they exist: the last shards may be short or empty. `shard(n, N, r)` is that slice.

All ranks of a group start its collectives in the same order. Every operation is there blocking and as `start_<name>(...) -> Work`; a
started one owns its tensors until it is done. Tensors are contiguous; those of one call must not overlap except where said.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hpczero.comm import reduction
from hpczero.comm.ledger import Ledger
from hpczero.comm.work import Progress, Steps, Work

_TAGS = 16384  # MPI promises tags up to 32767: the lower half for collectives, the upper for send and receive
_TINY = 4096  # bytes: below, an all_reduce gathers whole tensors
_BROADCAST_PIECE = 1 << 20  # bytes: a rank hands a piece on while it receives the next


@dataclass(frozen=True)
class Limits:
    """Sizes in bytes: of the buffers that arriving pieces are kept in until they are summed, and of the largest single message."""

    staging: int = 8 << 20
    message: int = 1 << 30


def shard(elements: int, ranks: int, rank: int) -> slice:
    """The elements of a tensor that rank holds when it is cut over the group."""
    length = -(-elements // ranks)
    return slice(min(rank * length, elements), min((rank + 1) * length, elements))


class Group:
    """Ranks that talk along one axis. `.rank` is the own place in it, `.size` its length, `.ranks` the world ranks of all places."""

    def __init__(self, axis: str, ranks: Sequence[int], rank: int, node_of_rank: Sequence[int], mpi: "Connection") -> None:
        self.axis = axis
        self.ranks = tuple(ranks)
        self.rank = rank
        self.size = len(self.ranks)
        self._mpi = mpi
        self._elsewhere = [node_of_rank[peer] != node_of_rank[self.ranks[rank]] for peer in self.ranks]
        self._peers = [(rank + distance) % self.size for distance in range(1, self.size)]  # everyone sends to someone else first
        self._collectives = 0
        self._messages: dict[tuple[str, int], int] = {}

    # -- the operations, blocking ------------------------------------------------------------------------------------------------

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> None:
        """Every rank's `tensor` becomes the sum, max or min of all, in place."""
        self.start_all_reduce(tensor, op).wait()

    def reduce_scatter(self, output: Tensor, tensor: Tensor, op: str = "sum") -> None:
        """`output`: this rank's shard of the sum of all ranks' `tensor`. It may be that very shard of `tensor`, which is otherwise
        unchanged; for half precision it may be fp32 (the sum unrounded).
        """
        self.start_reduce_scatter(output, tensor, op).wait()

    def all_gather(self, output: Tensor, tensor: Tensor) -> None:
        """`output`: the shards of all ranks, one after the other; `tensor` is this rank's, and may be that very shard of `output`."""
        self.start_all_gather(output, tensor).wait()

    def broadcast(self, tensor: Tensor, root: int = 0) -> None:
        """`tensor` becomes that of `root` (a place in the group)."""
        self.start_broadcast(tensor, root).wait()

    def all_to_all(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
        """`outputs[i]` becomes what rank i has as `inputs[<this rank>]`; both sides know the sizes."""
        self.start_all_to_all(outputs, inputs).wait()

    def send(self, tensor: Tensor, to: int) -> None:
        """Messages from one rank to another arrive in the order in which they were started."""
        self.start_send(tensor, to).wait()

    def receive(self, tensor: Tensor, source: int) -> None:
        self.start_receive(tensor, source).wait()

    def barrier(self) -> None:
        self.start_barrier().wait()

    # -- the operations, started -------------------------------------------------------------------------------------------------

    def start_all_reduce(self, tensor: Tensor, op: str = "sum") -> Work:
        flat = _flat(tensor)
        reduction.check(op, flat, flat.dtype)
        steps = self._all_reduce_tiny(flat, op) if _bytes(flat) <= _TINY else self._all_reduce(flat, op)
        return self._start("all_reduce", steps, 2 * _bytes(flat))

    def start_reduce_scatter(self, output: Tensor, tensor: Tensor, op: str = "sum") -> Work:
        flat, own = _flat(tensor), _flat(output)
        reduction.check(op, own, flat.dtype)
        self._check_shard("output", own, flat)
        return self._start("reduce_scatter", self._reduce_scatter(own, flat, op, self._next_tag()), _bytes(flat))

    def start_all_gather(self, output: Tensor, tensor: Tensor) -> Work:
        flat, own = _flat(output), _flat(tensor)
        assert own.dtype is flat.dtype, f"an all_gather of {own.dtype} cannot be written to {flat.dtype}"
        self._check_shard("tensor", own, flat)
        return self._start("all_gather", self._all_gather(flat, own, self._next_tag()), _bytes(flat))

    def start_broadcast(self, tensor: Tensor, root: int = 0) -> Work:
        flat = _flat(tensor)
        return self._start("broadcast", self._broadcast(flat, root, self._next_tag()), _bytes(flat))

    def start_all_to_all(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Work:
        assert len(outputs) == len(inputs) == self.size, f"all_to_all over {self.size} ranks got {len(inputs)} inputs and {len(outputs)} outputs"
        sources, targets = [_flat(tensor) for tensor in inputs], [_flat(tensor) for tensor in outputs]
        return self._start_sized("all_to_all", self._all_to_all(targets, sources, self._next_tag()), [_bytes(source) for source in sources])

    def start_send(self, tensor: Tensor, to: int) -> Work:
        assert to != self.rank, "a rank cannot send to itself"
        steps = self._messages_of(self._mpi.send(_flat(tensor), to, self._next_message("to", to)))
        return self._start_sized("send", steps, [_bytes(tensor) if peer == to else 0 for peer in range(self.size)])

    def start_receive(self, tensor: Tensor, source: int) -> Work:
        assert source != self.rank, "a rank cannot receive from itself"
        steps = self._messages_of(self._mpi.receive(_flat(tensor), source, self._next_message("from", source)))
        return self._start("receive", steps, 0)

    def start_barrier(self) -> Work:
        return self._start("barrier", self._messages_of(self._mpi.barrier()), 0)

    # -- how each is carried out: generators that yield the requests they wait for ---------------------------------------------------

    def _all_reduce_tiny(self, tensor: Tensor, op: str) -> Steps:
        if self._peers and tensor.numel():
            everyones = torch.empty((self.size, tensor.numel()), dtype=tensor.dtype)
            yield [self._mpi.gather_equal(everyones, tensor)]
            reduction.combine(tensor, tuple(everyones), op)

    def _all_reduce(self, tensor: Tensor, op: str) -> Steps:
        own = tensor[shard(tensor.numel(), self.size, self.rank)]
        tag = self._next_tag()
        yield from self._reduce_scatter(own, tensor, op, tag)
        yield from self._all_gather(tensor, own, tag)

    def _reduce_scatter(self, output: Tensor, tensor: Tensor, op: str, tag: int) -> Steps:
        """In rounds, as much as the staging holds: while one round is summed the next is on its way."""
        pieces = [tensor[shard(tensor.numel(), self.size, rank)] for rank in range(self.size)]
        if not self._peers:
            output.copy_(tensor)
            return
        staging = self._mpi.staging(tensor.dtype, self.size - 1)
        length = staging.shape[-1]

        def post(number: int) -> list[Any]:
            window = slice(number * length, (number + 1) * length)
            own = pieces[self.rank][window]
            receives = [self._mpi.receive(slot[: own.numel()], peer, tag) for slot, peer in zip(staging[number % 2], self._peers, strict=True)]
            sends = [self._mpi.send(pieces[peer][window], peer, tag) for peer in self._peers]
            return [request for requests in receives + sends for request in requests]

        rounds = -(-pieces[0].numel() // length)
        posted = post(0)
        for number in range(rounds):
            following = post(number + 1) if number + 1 < rounds else []
            yield posted
            window = slice(number * length, (number + 1) * length)
            parts = {self.rank: pieces[self.rank][window]}
            parts |= {peer: slot[: parts[self.rank].numel()] for slot, peer in zip(staging[number % 2], self._peers, strict=True)}
            reduction.combine(output[window], [parts[rank] for rank in range(self.size)], op)
            posted = following
        self._mpi.give_back(staging)

    def _all_gather(self, output: Tensor, tensor: Tensor, tag: int) -> Steps:
        pieces = [output[shard(output.numel(), self.size, rank)] for rank in range(self.size)]
        return self._exchange(pieces, [tensor] * self.size, tag)

    def _all_to_all(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], tag: int) -> Steps:
        return self._exchange(outputs, inputs, tag)

    def _exchange(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], tag: int) -> Steps:
        receives = [self._mpi.receive(outputs[peer], peer, tag) for peer in reversed(self._peers)]
        sends = [self._mpi.send(inputs[peer], peer, tag) for peer in self._peers]
        if outputs[self.rank].data_ptr() != inputs[self.rank].data_ptr():
            outputs[self.rank].copy_(inputs[self.rank])
        yield [request for requests in receives + sends for request in requests]

    def _broadcast(self, tensor: Tensor, root: int, tag: int) -> Steps:
        """Along a binomial tree, piece by piece."""
        parent, children = _tree((self.rank - root) % self.size, self.size)
        sends: list[Any] = []
        for piece in tensor.split(max(1, _BROADCAST_PIECE // tensor.element_size())):
            if parent is not None:
                yield self._mpi.receive(piece, (parent + root) % self.size, tag)
            for child in children:
                sends += self._mpi.send(piece, (child + root) % self.size, tag)
        yield sends

    @staticmethod
    def _messages_of(requests: list[Any]) -> Steps:
        yield requests

    # -- bookkeeping -----------------------------------------------------------------------------------------------------------------

    def _start(self, operation: str, steps: Steps, size: int) -> Work:
        """An operation that sends `size` / N bytes to each of the other ranks."""
        return self._start_sized(operation, steps, [size / self.size] * self.size)

    def _start_sized(self, operation: str, steps: Steps, sizes: Sequence[float]) -> Work:
        entry = self._mpi.ledger.entry(self.axis, operation)
        between = sum(size for size, elsewhere in zip(sizes, self._elsewhere, strict=True) if elsewhere)
        entry.sent(round(sum(sizes) - sizes[self.rank]), round(between))
        return self._mpi.progress.start(steps, entry)

    def _check_shard(self, name: str, own: Tensor, whole: Tensor) -> None:
        expected = shard(whole.numel(), self.size, self.rank)
        length = expected.stop - expected.start
        assert own.numel() == length, f"{name} has {own.numel()} elements; shard {self.rank} of {whole.numel()} over {self.size} ranks has {length}"

    def _next_tag(self) -> int:
        """Collectives are told apart by their number, so that several can be under way."""
        self._collectives += 1
        return self._collectives % _TAGS

    def _next_message(self, direction: str, peer: int) -> int:
        number = self._messages[direction, peer] = self._messages.get((direction, peer), 0) + 1
        return _TAGS + number % _TAGS


class Connection:
    """What a group needs of MPI: bytes from here to there. A group of one rank has no communicator."""

    def __init__(self, mpi: Any, communicator: Any, progress: Progress, ledger: Ledger, limits: Limits) -> None:
        self.progress = progress
        self.ledger = ledger
        self._byte = mpi.BYTE if mpi else None
        self._communicator = communicator
        self._limits = limits
        self._staging: list[Tensor] = []

    def send(self, tensor: Tensor, to: int, tag: int) -> list[Any]:
        return [self._communicator.Isend([part, self._byte], to, tag) for part in self._parts(tensor)]

    def receive(self, tensor: Tensor, source: int, tag: int) -> list[Any]:
        return [self._communicator.Irecv([part, self._byte], source, tag) for part in self._parts(tensor)]

    def gather_equal(self, output: Tensor, tensor: Tensor) -> Any:
        return self._communicator.Iallgather([_memory(tensor), self._byte], [_memory(output), self._byte])

    def barrier(self) -> list[Any]:
        return [self._communicator.Ibarrier()] if self._communicator else []

    def staging(self, dtype: torch.dtype, slots: int) -> Tensor:
        """[2 rounds, slots, elements]: a buffer of constant size, kept for the next operation."""
        raw = self._staging.pop() if self._staging else torch.empty(max(self._limits.staging, 16 * slots), dtype=torch.uint8)
        elements = raw.numel() // (2 * slots * dtype.itemsize)
        return raw[: 2 * slots * elements * dtype.itemsize].view(dtype).view(2, slots, elements)

    def give_back(self, staging: Tensor) -> None:
        self._staging.append(torch.empty(0, dtype=torch.uint8).set_(staging.untyped_storage()))

    def close(self) -> None:
        self._staging.clear()
        if self._communicator:
            self._communicator.Free()

    def _parts(self, tensor: Tensor) -> list[memoryview]:
        memory = _memory(tensor)
        return [memory[begin : begin + self._limits.message] for begin in range(0, len(memory), self._limits.message)]


def _memory(tensor: Tensor) -> memoryview:
    return memoryview(tensor.view(-1).view(torch.uint8).numpy())


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _flat(tensor: Tensor) -> Tensor:
    assert tensor.device.type == "cpu", f"the MPI backend moves CPU tensors; this one is on {tensor.device}"
    assert tensor.is_contiguous(), f"tensors are sent as they lie in memory: make this one contiguous first (shape {tuple(tensor.shape)}, strides {tensor.stride()})"
    return tensor.detach().view(-1)


def _tree(place: int, size: int) -> tuple[int | None, list[int]]:
    """Parent and children of a place in the binomial tree rooted at 0, the largest branch first."""
    span = place & -place if place else 1 << (size - 1).bit_length()
    branches = [1 << bit for bit in reversed(range(span.bit_length() - 1))]
    return (place - span if place else None), [place + branch for branch in branches if place + branch < size]
