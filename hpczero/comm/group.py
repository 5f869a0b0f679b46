"""Collectives on torch tensors over one group of ranks.

Results depend neither on the order of arrival nor on what carries the bytes: MPI (`mpi_backend`),
the memory of a node (`shared_memory`), NCCL or gloo (`torch_backend`). A reduction exchanges pieces
and sums them locally in rank order (half precision in fp32, rounded once). An all_reduce is a
reduce_scatter followed by an all_gather; a tiny one gathers the whole tensors and reduces them
locally, with the same result.

A tensor is cut over its elements in memory order. With n elements and N ranks each shard has
ceil(n / N): rank r holds elements [r·ceil(n / N), (r + 1)·ceil(n / N)) as far as they exist. The
last shards may be short or empty. `shard(n, N, r)` is that slice.

All ranks of a group start its collectives in the same order. Every operation exists as a blocking
call and as `start_<name>(...) -> Work`. A started operation owns its tensors until it is done. It
moves on while some operation is waited for or polled; one between nodes also in the background
(`progress`). Tensors are contiguous; those of one call must not overlap except where said.
"""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from hpczero.comm import mpi_backend
from hpczero.comm.connection import Connection
from hpczero.comm.mpi_backend import Carrier, Combine, MpiCarrier, ShardCarrier, combine_into, shard
from hpczero.comm.progress import Requests, Work
from hpczero.comm.shared_memory import SharedMemoryCarrier
from hpczero.comm.status import Signature, WaitPoint
from hpczero.comm.torch_backend import TorchCarrier
from hpczero.comm.trace import evenly
from hpczero.device import Device, Queue


class Group:
    """Ranks that communicate along one axis.

    `.ranks`: their numbers in the world; `.size`: how many; `.rank`: this rank's number in the
    group. `root`, `to` and `source` are numbers in the group, too.
    """

    def __init__(
        self,
        axis: str,
        ranks: Sequence[int],
        rank: int,
        node_of_rank: Sequence[int],
        connection: Connection,
        native: TorchCarrier | None = None,
    ) -> None:
        """`native` carries the collectives on tensors that it takes; MPI carries all others."""
        self.axis = axis
        self.label = axis  # in a trace
        self.ranks = tuple(ranks)
        self.rank = rank
        self.size = len(self.ranks)
        self.connection = connection
        self.native = native
        # For short collectives, where the ranks share memory.
        self.window: SharedMemoryCarrier | None = None
        self._messages = MpiCarrier(connection, axis, self.ranks, rank)
        node = node_of_rank[self.ranks[rank]]
        self._on_other_node = [node_of_rank[peer] != node for peer in self.ranks]
        self._count_on_other_nodes = sum(self._on_other_node)
        self._collectives = 0
        self._signatures: dict[object, Signature] = {}
        self._messages_started: dict[tuple[str, int], int] = {}

    @property
    def device(self) -> Device:
        """Device of this rank's tensors."""
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

    # ---------------------------------------------------------------------------------- blocking

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> None:
        """Replace `tensor` on every rank by the "sum", "max" or "min" over all ranks."""
        self.start_all_reduce(tensor, op).wait()

    def reduce_scatter(self, output: Tensor, tensor: Tensor, op: str = "sum") -> None:
        """Write this rank's shard of the sum of all ranks' `tensor` to `output`.

        `output` may be that very shard of `tensor`, which is otherwise unchanged. For half
        precision it may be fp32: the sum unrounded.
        """
        self.start_reduce_scatter(output, tensor, op).wait()

    def all_gather(self, output: Tensor, tensor: Tensor) -> None:
        """Write all ranks' shards to `output`, one after the other.

        `tensor` is this rank's shard, and may be that very shard of `output`.
        """
        self.start_all_gather(output, tensor).wait()

    def broadcast(self, tensor: Tensor, root: int = 0) -> None:
        """Replace `tensor` on every rank by that of `root`."""
        self.start_broadcast(tensor, root).wait()

    def all_to_all(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
        """Write to `outputs[i]` what rank i has as `inputs[<this rank>]`; both know its size.

        A rank's output for itself may be its input for itself.
        """
        self.start_all_to_all(outputs, inputs).wait()

    def send(self, tensor: Tensor, to: int) -> None:
        """Send to one rank; messages between two ranks arrive in the order they were started."""
        self.start_send(tensor, to).wait()

    def receive(self, tensor: Tensor, source: int) -> None:
        """Receive into `tensor`, which has the size that was sent."""
        self.start_receive(tensor, source).wait()

    def barrier(self) -> None:
        """Return once every rank has called this."""
        self.start_barrier().wait()

    def stack(self, values: Tensor) -> Tensor:
        """Return the same few values of all ranks as [ranks, ...]."""
        everyones = values.new_empty((self.size, *values.shape))
        self.all_gather(everyones, values)
        return everyones

    # ----------------------------------------------------------------------------------- started

    def start_all_reduce(self, tensor: Tensor, op: str = "sum") -> Work:
        flat = self._flat(tensor)
        mpi_backend.check(op, flat, flat.dtype)
        point, code = self._next("all_reduce", flat, op)
        steps = self._shard_carrier(flat).all_reduce(flat, op, point, code)
        return self._start_even("all_reduce", steps, 2 * flat.nbytes, point, flat)

    def start_reduce_scatter(
        self, output: Tensor, tensor: Tensor, op: str = "sum", combine: Combine | None = None
    ) -> Work:
        """`combine`, if given, does the local sum into `output` itself.

        The windows that it is called with are multiples of 4096 elements, but for the last one.
        """
        flat = self._flat(tensor)
        target = self._flat(output)
        mpi_backend.check(op, target, flat.dtype)
        self._check_shard("output", target, flat)
        if combine is None:
            combine = combine_into(target, op)
        point, code = self._next("reduce_scatter", flat, op)
        steps = self._shard_carrier(flat).reduce_scatter(flat, combine, point, code)
        return self._start_even("reduce_scatter", steps, flat.nbytes, point, flat, target)

    def start_all_gather(
        self,
        output: Tensor,
        tensor: Tensor,
        detail: str = "",
        then: Callable[[], None] | None = None,
    ) -> Work:
        """`detail` names what is gathered: ranks that gather different things do not meet.

        `then` is called when all is there, and belongs to the operation.
        """
        flat = self._flat(output)
        source = self._flat(tensor)
        assert source.dtype is flat.dtype, (
            f"an all_gather of {source.dtype} cannot be written to {flat.dtype}"
        )
        self._check_shard("tensor", source, flat)
        point, code = self._next("all_gather", flat, detail)
        steps = self._shard_carrier(flat).all_gather(flat, source, point, code)
        if then is not None:
            steps = _followed(steps, then)
        return self._start_even("all_gather", steps, flat.nbytes, point, flat, source)

    def start_broadcast(self, tensor: Tensor, root: int = 0) -> Work:
        flat = self._flat(tensor)
        point, code = self._next("broadcast", flat, f"from {root}")
        steps = self._carrier(flat).broadcast(flat, root, point, code)
        return self._start_even("broadcast", steps, flat.nbytes, point, flat)

    def start_all_to_all(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Work:
        assert len(outputs) == len(inputs) == self.size, (
            f"an all_to_all over {self.size} ranks got {len(inputs)} inputs and "
            f"{len(outputs)} outputs"
        )
        sources = [self._flat(tensor) for tensor in inputs]
        targets = [self._flat(tensor) for tensor in outputs]
        sizes = [0 if peer == self.rank else source.nbytes for peer, source in enumerate(sources)]
        between = sum(size for size, far in zip(sizes, self._on_other_node, strict=True) if far)
        inside = sum(sizes) - between
        point, code = self._next("all_to_all")
        steps = self._carrier(sources[0]).exchange(targets, sources, point, code)
        tensors = (*sources, *targets)
        return self._start("all_to_all", steps, inside, between, point, tensors=tensors)

    def start_send(self, tensor: Tensor, to: int) -> Work:
        assert to != self.rank, f"rank {self.rank} of {self.axis} cannot send to itself"
        size = tensor.nbytes
        point, tag = self._next_message("send", "to", to, size)
        flat = self._flat(tensor)
        steps = _once(lambda: self.connection.send(flat, to, tag, is_met=True))
        inside, between = (0, size) if self._on_other_node[to] else (size, 0)
        return self._start("send", steps, inside, between, point, tensors=(flat,), by_mpi=True)

    def start_receive(self, tensor: Tensor, source: int) -> Work:
        assert source != self.rank, f"rank {self.rank} of {self.axis} cannot receive from itself"
        point, tag = self._next_message("receive", "from", source, tensor.nbytes)
        flat = self._flat(tensor)
        steps = _once(lambda: self.connection.receive(flat, source, tag))
        far = self._on_other_node[source]
        return self._start("receive", steps, 0, 0, point, far=far, tensors=(flat,), by_mpi=True)

    def start_barrier(self) -> Work:
        point, _ = self._next("barrier")
        return self._start("barrier", _once(self.connection.barrier), 0, 0, point)

    def start_steps(self, operation: str, steps: Requests, between: int, shared: int) -> Work:
        """Start steps made elsewhere, as the group's next collective.

        They send `between` bytes to other nodes and read `shared` bytes in the node's memory.
        """
        self.connection.ledger.entry(self.axis, operation).shared += shared
        self._collectives += 1
        point = self.connection.started(self._collectives, Signature.of(operation))
        return self._start(operation, steps, 0, between, point, shared)

    def next_tag(self) -> int:
        """Return the tag for the messages of the operation that `start_steps` starts next."""
        return self.connection.tag(self._collectives + 1, 0, True)

    # --------------------------------------------------------------------------------- carriers

    def _shard_carrier(self, tensor: Tensor) -> ShardCarrier:
        """Choose the node's memory for a short tensor, if the ranks share it; else as `_carrier`.

        A group has a window only where its world has no other backend than MPI.
        """
        window = self.window
        if window and window.takes(tensor) and not self.connection.on_device(tensor):
            return window
        return self.native if self.native and self.native.takes(tensor) else self._messages

    def _carrier(self, tensor: Tensor) -> Carrier:
        """Choose torch.distributed for tensors that it takes, MPI for all others."""
        return self.native if self.native and self.native.takes(tensor) else self._messages

    def _queue(self, tensor: Tensor, by_mpi: bool) -> Queue | None:
        if self.native and not by_mpi and self.native.takes(tensor):
            return self.native.queue
        return self.connection.queue if self.connection.on_device(tensor) else None

    # --------------------------------------------------------------------------------- starting

    def _start_even(
        self, operation: str, steps: Requests, size: int, point: WaitPoint, *tensors: Tensor
    ) -> Work:
        """Start an operation that sends `size` / N bytes to each of the other ranks."""
        inside, between = evenly(size, self.size, self._count_on_other_nodes)
        return self._start(operation, steps, inside, between, point, tensors=tensors)

    def _start(
        self,
        operation: str,
        steps: Requests,
        inside: int,
        between: int,
        point: WaitPoint,
        shared: int = 0,
        far: bool = False,
        tensors: Sequence[Tensor] = (),
        by_mpi: bool = False,
    ) -> Work:
        """Start an operation that sends `inside` bytes on this node and `between` to others.

        `far`: it receives from other nodes, though it sends nothing there. `by_mpi`: MPI carries
        it, whatever carries the collectives.
        """
        entry = self.connection.ledger.entry(self.axis, operation)
        entry.sent(inside, between)
        what = self.label, operation, point.ranks[0] if point.ranks else -1
        queue = self._queue(tensors[0], by_mpi) if tensors else None
        size = inside + between + shared
        work = self.connection.progress.start(
            steps, entry, point, what, size, far or between > 0, queue
        )
        if queue and not work.done:
            work.tensors = tensors
        return work

    def _flat(self, tensor: Tensor) -> Tensor:
        assert tensor.is_cpu or self.connection.on_device(tensor), (
            f"this group moves tensors of the CPU and of {self.connection.device.torch}; "
            f"this one is on {tensor.device}"
        )
        assert tensor.is_contiguous(), (
            f"only contiguous tensors are sent; this one has shape {tuple(tensor.shape)}, "
            f"strides {tensor.stride()}"
        )
        # Not detach(): autograd would count a write as a change of all that shares the storage.
        flat = tensor.data
        return flat if flat.dim() == 1 else flat.view(-1)

    def _check_shard(self, name: str, given: Tensor, full: Tensor) -> None:
        cut = shard(full.numel(), self.size, self.rank)
        assert given.numel() == cut.stop - cut.start, (
            f"{name} has {given.numel()} elements; shard {self.rank} of {full.numel()} elements "
            f"over {self.size} ranks has {cut.stop - cut.start}"
        )

    def _next(
        self, operation: str, tensor: Tensor | None = None, detail: str = ""
    ) -> tuple[WaitPoint, int]:
        """Number the next collective, and show it to the ranks of the node from now on.

        Return where a rank waits for it, and the code that all ranks must have for it.
        """
        self._collectives += 1
        key = (operation, detail, tensor.dtype, tensor.nbytes) if tensor is not None else operation
        signature = self._signatures.get(key)
        if signature is None:
            what = ""
            if tensor is not None:
                dtype = str(tensor.dtype).removeprefix("torch.")
                what = f"of {tensor.nbytes} bytes of {dtype}"
            signature = self._signatures[key] = Signature.of(operation, detail, what)
        return self.connection.started(self._collectives, signature), signature.code

    def _next_message(
        self, operation: str, direction: str, peer: int, size: int
    ) -> tuple[WaitPoint, int]:
        """Number the next message to or from a peer; return where a rank waits for it, its tag."""
        number = self._messages_started.get((direction, peer), 0) + 1
        self._messages_started[direction, peer] = number
        name = f"{operation} {number} of {size} bytes"
        label = f"{name} {direction} rank {self.ranks[peer]} along {self.axis}"
        tag = self.connection.tag(number, size, False)
        return self.connection.message(label, peer, number), tag


def _followed(steps: Requests, then: Callable[[], None]) -> Requests:
    yield from steps
    then()


def _once(post: Callable[[], list[Any]]) -> Requests:
    yield post()
