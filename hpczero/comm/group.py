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

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from hpczero.comm import reduction
from hpczero.comm.connection import Connection, slots_of
from hpczero.comm.ledger import evenly
from hpczero.comm.status import Place, Signature
from hpczero.comm.work import CommunicationError, Steps, Work

Combine = Callable[[slice, list[Tensor]], None]  # (elements of the own shard, what each rank sent for them, in rank order)
_TINY = 1 << 15  # bytes over all ranks: up to here an all_reduce gathers whole tensors
_BROADCAST_PIECE = 1 << 20  # bytes: a rank hands a piece on while it receives the next


def shard(elements: int, ranks: int, rank: int) -> slice:
    """The elements of a tensor that `rank` holds when it is cut over the group."""
    length = -(-elements // ranks)
    return slice(min(rank * length, elements), min((rank + 1) * length, elements))


class Group:
    """Ranks that talk along one axis: `.ranks` are their numbers in the world, `.size` how many, `.rank` this one's place among them."""

    def __init__(self, axis: str, ranks: Sequence[int], rank: int, node_of_rank: Sequence[int], connection: Connection) -> None:
        self.axis = self.label = axis  # the label: in a trace
        self.ranks = tuple(ranks)
        self.rank = rank
        self.size = len(self.ranks)
        self.connection = connection
        self._peers = [(rank + distance) % self.size for distance in range(1, self.size)]  # not all to rank 0 first
        self._elsewhere = [node_of_rank[peer] != node_of_rank[self.ranks[rank]] for peer in self.ranks]
        self._count_elsewhere = sum(self._elsewhere)
        self._collectives = 0
        self._signatures: dict[object, Signature] = {}
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
        place, code = self._next("all_reduce", flat, op)
        steps = self._all_reduce_tiny(flat, op, code, place) if tiny else self._all_reduce(flat, op, self._tag(place, code))
        return self._start_even("all_reduce", steps, 2 * flat.nbytes, place)

    def start_reduce_scatter(self, output: Tensor, tensor: Tensor, op: str = "sum", combine: Combine | None = None) -> Work:
        """`combine`, where given, does the local sum into `output` itself; but for the last one its windows are multiples of 4096 elements."""
        flat, own = _flat(tensor), _flat(output)
        reduction.check(op, own, flat.dtype)
        self._check_shard("output", own, flat)
        if combine is None:
            combine = _combine_into(own, op)
        place, code = self._next("reduce_scatter", flat, op)
        return self._start_even("reduce_scatter", self._reduce_scatter(flat, combine, self._tag(place, code)), flat.nbytes, place)

    def start_all_gather(self, output: Tensor, tensor: Tensor, detail: str = "") -> Work:
        """`detail` says what is gathered: ranks that gather different things do not meet."""
        flat, own = _flat(output), _flat(tensor)
        assert own.dtype is flat.dtype, f"an all_gather of {own.dtype} cannot be written to {flat.dtype}"
        self._check_shard("tensor", own, flat)
        place, code = self._next("all_gather", flat, detail)
        return self._start_even("all_gather", self._all_gather(flat, own, self._tag(place, code)), flat.nbytes, place)

    def start_broadcast(self, tensor: Tensor, root: int = 0) -> Work:
        flat = _flat(tensor)
        place, code = self._next("broadcast", flat, f"from {root}")
        return self._start_even("broadcast", self._broadcast(flat, root, self._tag(place, code)), flat.nbytes, place)

    def start_all_to_all(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Work:
        counts = f"{len(inputs)} inputs and {len(outputs)} outputs"
        assert len(outputs) == len(inputs) == self.size, f"an all_to_all over {self.size} ranks got {counts}"
        sources, targets = [_flat(tensor) for tensor in inputs], [_flat(tensor) for tensor in outputs]
        sizes = [0 if peer == self.rank else source.nbytes for peer, source in enumerate(sources)]
        between = sum(size for size, elsewhere in zip(sizes, self._elsewhere, strict=True) if elsewhere)
        place, code = self._next("all_to_all")
        return self._start("all_to_all", self._exchange(targets, sources, self._tag(place, code)), sum(sizes) - between, between, place)

    def start_send(self, tensor: Tensor, to: int) -> Work:
        assert to != self.rank, f"rank {self.rank} of {self.axis} cannot send to itself"
        place, tag = self._next_message("send", "to", to, tensor.nbytes)
        flat = _flat(tensor)
        steps = _once(lambda: self.connection.send(flat, to, tag))
        between = tensor.nbytes if self._elsewhere[to] else 0
        return self._start("send", steps, tensor.nbytes - between, between, place)

    def start_receive(self, tensor: Tensor, source: int) -> Work:
        assert source != self.rank, f"rank {self.rank} of {self.axis} cannot receive from itself"
        place, tag = self._next_message("receive", "from", source, tensor.nbytes)
        flat = _flat(tensor)
        steps = _once(lambda: self.connection.receive(flat, source, tag))
        return self._start("receive", steps, 0, 0, place, far=self._elsewhere[source])

    def start_barrier(self) -> Work:
        place, _ = self._next("barrier")
        return self._start("barrier", _once(self.connection.barrier), 0, 0, place)

    # How each is carried out: generators that yield the requests that they wait for.

    def _all_reduce_tiny(self, tensor: Tensor, op: str, code: int, place: Place) -> Steps:
        """As MPI matches its own collectives without regard to what they are, each rank's values stand behind a stamp."""
        if not self._peers or not tensor.numel():
            return
        stamp, length = code.to_bytes(8, "little"), 8 + tensor.nbytes
        received = bytearray(self.size * length)
        yield self.connection.gather_stamped(received, tensor, stamp)
        starts = range(0, len(received), length)
        for rank, start in zip(self.ranks, starts, strict=True):
            if received[start : start + 8] != stamp:
                where = f"{place.label.decode()} (number {place.number} along {self.axis})"
                raise CommunicationError(f"{where}: what came from rank {rank} belongs to another operation, or has another size")
        everyones = [torch.frombuffer(received, dtype=tensor.dtype, count=tensor.numel(), offset=start + 8) for start in starts]
        reduction.combine(tensor, everyones, op)

    def _all_reduce(self, tensor: Tensor, op: str, tag: int) -> Steps:
        own = tensor[shard(tensor.numel(), self.size, self.rank)]
        yield from self._reduce_scatter(tensor, _combine_into(own, op), tag)
        yield from self._all_gather(tensor, own, tag, in_turn=False)  # it would ask for its turn only now, behind what the others may wait for

    def _reduce_scatter(self, tensor: Tensor, combine: Combine, tag: int) -> Steps:
        if not self._peers:
            combine(slice(0, tensor.numel()), [tensor])
            return
        buffer = yield from self.connection.borrow(2 * 8 * (self.size - 1))  # at least one element of any type in each slot
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

    def _all_gather(self, output: Tensor, tensor: Tensor, tag: int, in_turn: bool = True) -> Steps:
        pieces = [output[shard(output.numel(), self.size, rank)] for rank in range(self.size)]
        return self._exchange(pieces, [tensor] * self.size, tag, in_turn)

    def _exchange(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], tag: int, in_turn: bool = True) -> Steps:
        receives = [self.connection.receive(outputs[peer], peer, tag) for peer in reversed(self._peers)]
        _copy(outputs[self.rank], inputs[self.rank])
        yield from self.connection.send_in_turn([(inputs[peer], peer) for peer in self._peers], tag, in_turn)
        yield list(chain(*receives))

    def _broadcast(self, tensor: Tensor, root: int, tag: int) -> Steps:
        """Along a binomial tree, piece by piece."""
        parent, children = tree((self.rank - root) % self.size, self.size)
        sends: list[Any] = []
        for piece in tensor.split(_BROADCAST_PIECE // tensor.element_size()):
            if parent is not None:
                yield self.connection.receive(piece, (parent + root) % self.size, tag)
            for child in children:
                sends += self.connection.send(piece, (child + root) % self.size, tag)
        yield sends

    def _start_even(self, operation: str, steps: Steps, size: int, place: Place) -> Work:
        """An operation that sends `size` / N bytes to each of the other ranks."""
        return self._start(operation, steps, *evenly(size, self.size, self._count_elsewhere), place)

    def stack(self, values: Tensor) -> Tensor:
        """[ranks, ...]: the same few values of all ranks."""
        everyones = values.new_empty((self.size, *values.shape))
        self.all_gather(everyones, values)
        return everyones

    def start_steps(self, operation: str, steps: Steps, between: int, shared: int) -> Work:
        """An operation that reads `shared` bytes in the node's memory and sends others to other nodes."""
        self.connection.ledger.entry(self.axis, operation).shared += shared
        self._collectives += 1
        place = self.connection.started(self._collectives, Signature.of(operation))
        return self._start(operation, steps, 0, between, place, shared)

    def _start(self, operation: str, steps: Steps, inside: int, between: int, place: Place, shared: int = 0, far: bool = False) -> Work:
        """`far`: it brings something from other nodes, if it sends nothing there itself."""
        entry = self.connection.ledger.entry(self.axis, operation)
        entry.sent(inside, between)
        what = self.label, operation, place.ranks[0] if place.ranks else -1
        return self.connection.progress.start(steps, entry, place, what, inside + between + shared, far=far or between > 0)

    def _check_shard(self, name: str, own: Tensor, whole: Tensor) -> None:
        cut = shard(whole.numel(), self.size, self.rank)
        expected = f"shard {self.rank} of {whole.numel()} elements over {self.size} ranks has {cut.stop - cut.start}"
        assert own.numel() == cut.stop - cut.start, f"{name} has {own.numel()} elements; {expected}"

    def next_tag(self) -> int:
        """Of the operation that `start_steps` starts next."""
        self._collectives += 1
        return self.connection.tag(self._collectives, 0, True)

    def _next(self, operation: str, tensor: Tensor | None = None, detail: str = "") -> tuple[Place, int]:
        """The place of the next collective, which the ranks of the node see from now on, and the code that all ranks must have for it."""
        self._collectives += 1
        key = (operation, detail, tensor.dtype, tensor.nbytes) if tensor is not None else operation
        signature = self._signatures.get(key)
        if signature is None:
            what = f"of {tensor.nbytes} bytes of {str(tensor.dtype).removeprefix('torch.')}" if tensor is not None else ""
            signature = self._signatures[key] = Signature.of(operation, detail, what)
        return self.connection.started(self._collectives, signature), signature.code

    def _tag(self, place: Place, code: int) -> int:
        return self.connection.tag(place.number, code, True)

    def _next_message(self, operation: str, direction: str, peer: int, size: int) -> tuple[Place, int]:
        number = self._messages[direction, peer] = self._messages.get((direction, peer), 0) + 1
        label = f"{operation} {number} of {size} bytes {direction} rank {self.ranks[peer]} along {self.axis}"
        return self.connection.message(label, peer, number), self.connection.tag(number, size, False)


def tree(place: int, size: int) -> tuple[int | None, list[int]]:
    """Parent and children of a place in the binomial tree over `size` places rooted at 0, the largest branch first."""
    span = place & -place if place else 1 << (size - 1).bit_length()
    branches = [1 << bit for bit in reversed(range(span.bit_length() - 1))]
    return (place - span if place else None), [place + branch for branch in branches if place + branch < size]


def _once(post: Callable[[], list[Any]]) -> Steps:
    yield post()


def _combine_into(output: Tensor, op: str) -> Combine:
    def combine(window: slice, parts: list[Tensor]) -> None:
        reduction.combine(output[window], parts, op)

    return combine


def _copy(output: Tensor, tensor: Tensor) -> None:
    if output.data_ptr() != tensor.data_ptr():
        output.copy_(tensor)


def _flat(tensor: Tensor) -> Tensor:
    assert tensor.device.type == "cpu", f"the MPI backend moves CPU tensors; this one is on {tensor.device}"
    assert tensor.is_contiguous(), f"only contiguous tensors are sent; this one has shape {tuple(tensor.shape)}, strides {tensor.stride()}"
    return tensor.detach().view(-1)
