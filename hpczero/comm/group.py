"""Collectives on torch tensors over one group of ranks.

Values never depend on the order of arrival, on the MPI library or on what else carries the bytes (`messages`, `native`): reductions are an
exchange of pieces followed by a local sum in rank order (half precision in fp32, rounded once). An all_reduce is a reduce_scatter followed by an
all_gather; a tiny one gathers the whole tensors and reduces locally, with the same result.

How a tensor is cut: over its elements in memory order; with n elements and N ranks each shard has ceil(n / N), rank r holding
elements [r·ceil(n / N), (r + 1)·ceil(n / N)) as far as they exist: the last shards may be short or empty. `shard(n, N, r)` is
that slice.

All ranks of a group start its collectives in the same order. Every operation is there blocking and as `start_<name>(...) -> Work`;
a started one owns its tensors until it is done, and moves on only while some operation is waited for or polled. Tensors are
contiguous; those of one call must not overlap except where said.
"""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from hpczero.comm import mpi_backend
from hpczero.comm.connection import Connection
from hpczero.comm.mpi_backend import ByMessages, Carrier, Combine, combine_into, shard
from hpczero.comm.progress import Steps, Work
from hpczero.comm.shared_memory import ByWindow
from hpczero.comm.status import Signature, WaitPoint
from hpczero.comm.torch_backend import Native
from hpczero.comm.trace import evenly
from hpczero.device import Device, Queue

_TINY = 1 << 15  # bytes over all ranks: up to here an all_reduce gathers whole tensors


class Group:
    """Ranks that talk along one axis: `.ranks` are their numbers in the world, `.size` how many, `.rank` this one's place among them."""

    def __init__(
        self,
        axis: str,
        ranks: Sequence[int],
        rank: int,
        node_of_rank: Sequence[int],
        connection: Connection,
        native: Native | None = None,
    ) -> None:
        """`native` carries the collectives on tensors that it takes, and MPI all the rest."""
        self.axis = self.label = axis  # the label: in a trace
        self.ranks = tuple(ranks)
        self.rank = rank
        self.size = len(self.ranks)
        self.connection = connection
        self.native = native
        self._messages = ByMessages(connection, axis, self.ranks, rank)
        self._elsewhere = [
            node_of_rank[peer] != node_of_rank[self.ranks[rank]] for peer in self.ranks
        ]
        self._count_elsewhere = sum(self._elsewhere)
        self.window: ByWindow | None = None  # for short collectives, where the ranks share memory
        self._collectives = 0
        self._signatures: dict[object, Signature] = {}
        self._sent: dict[tuple[str, int], int] = {}

    @property
    def device(self) -> Device:
        """Where this rank's tensors live."""
        return self.connection.device

    @property
    def buffered(self) -> int:
        """Bytes of the buffers in which pieces arrive that are to be summed."""
        return self.connection.buffered + (self.native.buffered if self.native else 0)

    def close(self) -> None:
        """Give back the communicator; nothing may be in flight."""
        self.connection.close()
        if self.native:
            self.native.close()

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
        flat = self._flat(tensor)
        mpi_backend.check(op, flat, flat.dtype)
        tiny = flat.nbytes * self.size <= _TINY
        place, code = self._next("all_reduce", flat, op)
        carrier = self._carrier(flat)
        if window := self._window(carrier, flat):
            steps = window.all_reduce(flat, op, code, place)
        elif tiny:
            steps = carrier.all_reduce_tiny(flat, op, code, place)
        else:
            steps = carrier.all_reduce(flat, op, self._tag(place, code))
        return self._start_even("all_reduce", steps, 2 * flat.nbytes, place, flat)

    def start_reduce_scatter(
        self, output: Tensor, tensor: Tensor, op: str = "sum", combine: Combine | None = None
    ) -> Work:
        """`combine`, where given, does the local sum into `output` itself; but for the last one its windows are multiples of 4096 elements."""
        flat, own = self._flat(tensor), self._flat(output)
        mpi_backend.check(op, own, flat.dtype)
        self._check_shard("output", own, flat)
        if combine is None:
            combine = combine_into(own, op)
        place, code = self._next("reduce_scatter", flat, op)
        carrier = self._carrier(flat)
        if window := self._window(carrier, flat):
            steps = window.reduce_scatter(flat, combine, code, place)
        else:
            steps = carrier.reduce_scatter(flat, combine, self._tag(place, code))
        return self._start_even("reduce_scatter", steps, flat.nbytes, place, flat, own)

    def start_all_gather(self, output: Tensor, tensor: Tensor, detail: str = "") -> Work:
        """`detail` says what is gathered: ranks that gather different things do not meet."""
        flat, own = self._flat(output), self._flat(tensor)
        assert own.dtype is flat.dtype, (
            f"an all_gather of {own.dtype} cannot be written to {flat.dtype}"
        )
        self._check_shard("tensor", own, flat)
        place, code = self._next("all_gather", flat, detail)
        carrier = self._carrier(flat)
        if window := self._window(carrier, flat):
            steps = window.all_gather(flat, own, code, place)
        else:
            steps = carrier.all_gather(flat, own, self._tag(place, code))
        return self._start_even("all_gather", steps, flat.nbytes, place, flat, own)

    def start_broadcast(self, tensor: Tensor, root: int = 0) -> Work:
        flat = self._flat(tensor)
        place, code = self._next("broadcast", flat, f"from {root}")
        return self._start_even(
            "broadcast",
            self._carrier(flat).broadcast(flat, root, self._tag(place, code)),
            flat.nbytes,
            place,
            flat,
        )

    def start_all_to_all(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Work:
        counts = f"{len(inputs)} inputs and {len(outputs)} outputs"
        assert len(outputs) == len(inputs) == self.size, (
            f"an all_to_all over {self.size} ranks got {counts}"
        )
        sources, targets = (
            [self._flat(tensor) for tensor in inputs],
            [self._flat(tensor) for tensor in outputs],
        )
        sizes = [0 if peer == self.rank else source.nbytes for peer, source in enumerate(sources)]
        between = sum(
            size for size, elsewhere in zip(sizes, self._elsewhere, strict=True) if elsewhere
        )
        place, code = self._next("all_to_all")
        steps = self._carrier(sources[0]).exchange(targets, sources, self._tag(place, code))
        return self._start(
            "all_to_all", steps, sum(sizes) - between, between, place, tensors=(*sources, *targets)
        )

    def start_send(self, tensor: Tensor, to: int) -> Work:
        assert to != self.rank, f"rank {self.rank} of {self.axis} cannot send to itself"
        place, tag = self._next_message("send", "to", to, tensor.nbytes)
        flat = self._flat(tensor)
        steps = _once(lambda: self.connection.send(flat, to, tag, is_met=True))
        between = tensor.nbytes if self._elsewhere[to] else 0
        return self._start(
            "send", steps, tensor.nbytes - between, between, place, tensors=(flat,), by_mpi=True
        )

    def start_receive(self, tensor: Tensor, source: int) -> Work:
        assert source != self.rank, f"rank {self.rank} of {self.axis} cannot receive from itself"
        place, tag = self._next_message("receive", "from", source, tensor.nbytes)
        flat = self._flat(tensor)
        steps = _once(lambda: self.connection.receive(flat, source, tag))
        return self._start(
            "receive", steps, 0, 0, place, far=self._elsewhere[source], tensors=(flat,), by_mpi=True
        )

    def start_barrier(self) -> Work:
        place, _ = self._next("barrier")
        return self._start("barrier", _once(self.connection.barrier), 0, 0, place)

    # How each is carried out.

    def _carrier(self, tensor: Tensor) -> Carrier:
        return self.native if self.native and self.native.takes(tensor) else self._messages

    def _window(self, carrier: Carrier, tensor: Tensor) -> ByWindow | None:
        """Return the window if the tensor is short and the ranks share memory."""
        if self.window is None or carrier is not self._messages or not self.window.takes(tensor):
            return None
        return None if self.connection.on_device(tensor) else self.window

    def _start_even(
        self, operation: str, steps: Steps, size: int, place: WaitPoint, *tensors: Tensor
    ) -> Work:
        """An operation that sends `size` / N bytes to each of the other ranks."""
        return self._start(
            operation,
            steps,
            *evenly(size, self.size, self._count_elsewhere),
            place,
            tensors=tensors,
        )

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

    def _start(
        self,
        operation: str,
        steps: Steps,
        inside: int,
        between: int,
        place: WaitPoint,
        shared: int = 0,
        far: bool = False,
        tensors: Sequence[Tensor] = (),
        by_mpi: bool = False,
    ) -> Work:
        """`far`: it brings something from other nodes, if it sends nothing there itself. `by_mpi`: whatever carries the collectives."""
        entry = self.connection.ledger.entry(self.axis, operation)
        entry.sent(inside, between)
        what = self.label, operation, place.ranks[0] if place.ranks else -1
        queue = self._queue(tensors[0], by_mpi) if tensors else None
        work = self.connection.progress.start(
            steps, entry, place, what, inside + between + shared, far or between > 0, queue
        )
        if queue and not work.done:
            work.tensors = tensors
        return work

    def _queue(self, tensor: Tensor, by_mpi: bool) -> Queue | None:
        if self.native and not by_mpi and self.native.takes(tensor):
            return self.native.queue
        return self.connection.queue if self.connection.on_device(tensor) else None

    def _flat(self, tensor: Tensor) -> Tensor:
        here = tensor.is_cpu or self.connection.on_device(tensor)
        assert here, (
            f"this group moves tensors of the CPU and of {self.connection.device.torch}; this one is on {tensor.device}"
        )
        assert tensor.is_contiguous(), (
            f"only contiguous tensors are sent; this one has shape {tuple(tensor.shape)}, strides {tensor.stride()}"
        )
        flat = tensor.data  # not detach(): autograd would count what is written as a change of all that lies in the same block
        return flat if flat.dim() == 1 else flat.view(-1)

    def _check_shard(self, name: str, own: Tensor, whole: Tensor) -> None:
        cut = shard(whole.numel(), self.size, self.rank)
        expected = f"shard {self.rank} of {whole.numel()} elements over {self.size} ranks has {cut.stop - cut.start}"
        assert own.numel() == cut.stop - cut.start, f"{name} has {own.numel()} elements; {expected}"

    def next_tag(self) -> int:
        """Of the operation that `start_steps` starts next."""
        return self.connection.tag(self._collectives + 1, 0, True)

    def _next(
        self, operation: str, tensor: Tensor | None = None, detail: str = ""
    ) -> tuple[WaitPoint, int]:
        """The place of the next collective, which the ranks of the node see from now on, and the code that all ranks must have for it."""
        self._collectives += 1
        key = (operation, detail, tensor.dtype, tensor.nbytes) if tensor is not None else operation
        signature = self._signatures.get(key)
        if signature is None:
            what = (
                f"of {tensor.nbytes} bytes of {str(tensor.dtype).removeprefix('torch.')}"
                if tensor is not None
                else ""
            )
            signature = self._signatures[key] = Signature.of(operation, detail, what)
        return self.connection.started(self._collectives, signature), signature.code

    def _tag(self, place: WaitPoint, code: int) -> int:
        return self.connection.tag(place.number, code, True)

    def _next_message(
        self, operation: str, direction: str, peer: int, size: int
    ) -> tuple[WaitPoint, int]:
        number = self._sent[direction, peer] = self._sent.get((direction, peer), 0) + 1
        label = f"{operation} {number} of {size} bytes {direction} rank {self.ranks[peer]} along {self.axis}"
        return self.connection.message(label, peer, number), self.connection.tag(
            number, size, False
        )


def _once(post: Callable[[], list[Any]]) -> Steps:
    yield post()
