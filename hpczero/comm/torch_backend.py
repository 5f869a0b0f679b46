"""Collectives by torch.distributed: NCCL on GPUs; gloo on CPUs, by which the same code is tested where there is no GPU.

A group has a process group of its own, apart from torch's global ones. It only moves bytes: what is to be summed goes round in an all-to-all and is
summed here in rank order, so that the results are those of the MPI backend to the bit. Collectives alone travel so: of messages between two ranks
NCCL asks that both start all of theirs in one order, which a pipeline that receives ahead does not (docs/gpu.md).

How ranks find each other: rank 0 opens a store at a free port of its own, MPI tells the others where.
"""

import copy
import socket
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import psutil
import torch
from torch import Tensor

from hpczero.comm import mpi_backend
from hpczero.comm.connection import BLOCK, slot_bytes
from hpczero.comm.mpi_backend import Combine, Order, combine_into, shard
from hpczero.comm.nodes import Nodes
from hpczero.comm.progress import CommunicationError, RequestFailed, Steps
from hpczero.comm.status import WaitPoint
from hpczero.device import Device
from hpczero.errors import InputError

_NEVER = timedelta(days=365)  # the watchdog is earlier, and knows who did not come
_MEETING = timedelta(seconds=60)


class Rendezvous:
    """Where the ranks of a world meet to make process groups of one kind, "nccl" or "gloo"."""

    def __init__(self, kind: str, store: Any, address: str, device: Device) -> None:
        """`address`: of this rank, as the others reach it."""
        self.kind, self.device = kind, device
        self._store, self._address = store, address
        self._made: dict[str, int] = {}

    @classmethod
    def of(cls, nodes: Nodes, kind: str, device: Device) -> "Rendezvous":
        """Collective; InputError on all ranks where one does not reach rank 0."""
        from torch.distributed import TCPStore

        one_host = len(set(nodes.hosts)) == 1
        if nodes.rank == 0:
            store = TCPStore("0.0.0.0", 0, None, True, _MEETING, wait_for_workers=False)
            addresses = _addresses(one_host)
            nodes.broadcast_object([addresses, store.port])
            return nodes.run_on_all(lambda: cls(kind, store, addresses[0], device))
        addresses, port = nodes.broadcast_object(None)
        return nodes.run_on_all(lambda: cls.join(kind, device, addresses, port))

    @classmethod
    def join(cls, kind: str, device: Device, addresses: Sequence[str], port: int) -> "Rendezvous":
        from torch.distributed import TCPStore

        for address in addresses:
            try:
                with socket.create_connection((address, port), _MEETING.seconds / 10) as connection:
                    own = connection.getsockname()[0]
                return cls(
                    kind,
                    TCPStore(address, port, None, False, _MEETING, wait_for_workers=False),
                    own,
                    device,
                )
            except (OSError, RuntimeError):
                continue
        raise InputError(
            f'comm.backend = "{kind}": {socket.gethostname()} reaches rank 0 at none of its addresses {", ".join(addresses)}, port {port} '
            '(a firewall between the nodes?); comm.backend = "mpi" needs no such port'
        )

    def group(
        self, axis: str, ranks: Sequence[int], rank: int, room: int, order: Order
    ) -> "Native":
        """Of these ranks, of which this one is number `rank`. `room`: bytes of the buffers that arriving pieces are summed from."""
        from torch.distributed import PrefixStore

        name = f"{axis} {' '.join(map(str, ranks))}"
        self._made[name] = number = self._made.get(name, 0) + 1
        try:
            processes = _process_group(
                self.kind,
                PrefixStore(f"{name} {number}", self._store),
                rank,
                len(ranks),
                self._address,
            )
            first = torch.zeros(1, dtype=torch.float32, device=self.device.torch)
            processes.broadcast(first, 0).wait()
            first.item()  # what is set up for the first operation is there now
        except RuntimeError as error:
            raise CommunicationError(
                f"{self.kind} cannot connect group {axis} of ranks {', '.join(map(str, ranks))}: {error}"
            ) from error
        return Native(processes, self, rank, room, order)


def _addresses(one_host: bool) -> list[str]:
    """Of this computer, those that the ranks may reach it at; `one_host`: all of them are here."""
    own = {
        found.address
        for cards in psutil.net_if_addrs().values()
        for found in cards
        if found.family == socket.AF_INET
    }
    return (
        ["127.0.0.1"]
        if one_host
        else sorted(address for address in own if not address.startswith("127."))
    )


def _process_group(kind: str, store: Any, rank: int, size: int, address: str) -> Any:
    from torch import distributed

    if kind == "nccl":
        options = distributed.ProcessGroupNCCL.Options()
        options._timeout = _NEVER
        return distributed.ProcessGroupNCCL(store, rank, size, options)
    options = distributed.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = _NEVER
    options._devices = [distributed.ProcessGroupGloo.create_device(hostname=address)]
    return distributed.ProcessGroupGloo(store, rank, size, options)


class _Request:
    """torch.distributed's, in the manner of MPI's: where it is the device that waits, it is done for the host at once."""

    def __init__(self, work: Any, is_queued: bool) -> None:
        self._work, self._is_queued = work, is_queued

    def Test(self) -> bool:
        if not self._is_queued and not self._work.is_completed():
            return False
        try:
            self._work.wait()  # the host waits for nothing: it is done, or the queue waits
        except RuntimeError as error:
            raise RequestFailed(str(error)) from error
        return True


class Native:
    """A `Carrier`. As all ranks must start what they do in one order, and an operation may be several collectives, operations take turns."""

    def __init__(
        self, processes: Any, rendezvous: Rendezvous, rank: int, room: int, order: Order
    ) -> None:
        self._processes, self._kind, self._device = processes, rendezvous.kind, rendezvous.device
        self.rank, self.size = rank, processes.size()
        self._room = room
        self._order, self._channel = order, 0
        self._buffer: Tensor | None = None
        self.queue = self._device.queue()

    def beside(self, communicator: Callable[[], Any]) -> "Native":
        """For another group of the same ranks, whose operations may start in any order relative to
        these. Collective, while nothing is under way; `communicator` makes one of MPI.
        """
        other = copy.copy(self)
        other._channel = self._order.add(communicator)
        other._buffer = None
        other.queue = self._device.queue()
        return other

    @property
    def buffered(self) -> int:
        """Bytes of the memory in which pieces arrive that are to be summed, and leave."""
        return 0 if self._buffer is None else self._buffer.numel()

    def takes(self, tensor: Tensor) -> bool:
        return self._device.holds(tensor)

    def all_reduce_tiny(self, tensor: Tensor, op: str, code: int, place: WaitPoint) -> Steps:
        def steps() -> Steps:
            # Made here, in the queue: memory of the computing stream would be given to others as
            # soon as the host is through, while the device still reads it.
            everyones = tensor.new_empty(self.size, tensor.numel())
            yield from self._all_gather(everyones.view(-1), tensor)
            mpi_backend.combine_parts(tensor, list(everyones), op)

        return self._in_turn(steps())

    def all_reduce(self, tensor: Tensor, op: str, tag: int) -> Steps:
        own = tensor[shard(tensor.numel(), self.size, self.rank)]
        return self._in_turn(
            self._reduce_scatter(tensor, combine_into(own, op)), self._all_gather(tensor, own)
        )

    def reduce_scatter(self, tensor: Tensor, combine: Combine, tag: int) -> Steps:
        return self._in_turn(self._reduce_scatter(tensor, combine))

    def all_gather(self, output: Tensor, tensor: Tensor, tag: int) -> Steps:
        return self._in_turn(self._all_gather(output, tensor))

    def exchange(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], tag: int) -> Steps:
        return self._in_turn(self._exchange(outputs, inputs))

    def broadcast(self, tensor: Tensor, root: int, tag: int) -> Steps:
        return self._in_turn(self._broadcast(tensor, root))

    def close(self) -> None:
        """Collective, when nothing is under way."""
        if self._kind == "nccl" and self._channel == 0:
            self._processes.shutdown()
        self._processes = None
        self._order.close()

    def _in_turn(self, *steps: Steps) -> Steps:
        turn = self._order.start(self._channel)
        try:
            while not self._order.is_next(self._channel, turn):
                yield ()
            for one in steps:
                yield from one
        finally:
            self._order.done(self._channel, turn)

    def _reduce_scatter(self, tensor: Tensor, combine: Combine) -> Steps:
        """As many elements of each shard at a time as there is room for: while one round is summed, the next is on its way."""
        pieces = [tensor[shard(tensor.numel(), self.size, rank)] for rank in range(self.size)]
        leaving, arriving = self._slots(tensor)
        length = leaving.shape[1] // self.size
        windows = [slice(begin, begin + length) for begin in range(0, pieces[0].numel(), length)]
        own = [pieces[self.rank][window].numel() for window in windows]
        arrived = [arriving[number % 2][: self.size * count] for number, count in enumerate(own)]

        def post(number: int) -> list[Any]:
            parts = [piece[windows[number]] for piece in pieces]
            sizes = [part.numel() for part in parts]
            sent = torch.cat(parts, out=leaving[number % 2][: sum(sizes)])
            return self._all_to_all(arrived[number], sent, [own[number]] * self.size, sizes)

        posted = post(0) if windows else []
        for number, window in enumerate(windows):
            following = post(number + 1) if number + 1 < len(windows) else []
            yield posted
            combine(window, list(arrived[number].view(self.size, own[number])))
            posted = following

    def _slots(self, tensor: Tensor) -> tuple[Tensor, Tensor]:
        """What leaves, and what arrives, as [2 rounds, elements]: the same memory for all operations, which take turns."""
        width = tensor.element_size()
        most = 4 * self.size * slot_bytes(tensor, self.size)  # for all of it in one round
        room = max(min(self._room, most), 4 * self.size * 8)
        if self._buffer is None or self._buffer.numel() < room:
            self._buffer = None  # before the larger one is made
            self._buffer = torch.empty(room, dtype=torch.uint8, device=tensor.device)
        length = room // (4 * self.size * width)
        length -= length % BLOCK if length > BLOCK else 0
        leaving, arriving = (
            self._buffer[: 4 * self.size * length * width]
            .view(tensor.dtype)
            .view(2, 2, self.size * length)
        )
        return leaving, arriving

    def _all_gather(self, output: Tensor, tensor: Tensor) -> Steps:
        count = output.numel()
        if not count:
            return
        longest = -(-count // self.size)
        whole = output if longest * self.size == count else output.new_empty(longest * self.size)
        sent = (
            tensor
            if tensor.numel() == longest
            else whole[self.rank * longest : (self.rank + 1) * longest]
        )
        if sent is not tensor:
            sent[: tensor.numel()] = tensor
        yield self._start(self._processes._allgather_base, _bytes(whole), _bytes(sent))
        if whole is not output:
            output.copy_(whole[:count])

    def _exchange(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Steps:
        sizes = [output.numel() for output in outputs]
        arriving = outputs[0].new_empty(sum(sizes))
        yield self._all_to_all(
            arriving, torch.cat(list(inputs)), sizes, [tensor.numel() for tensor in inputs]
        )
        for output, part in zip(outputs, arriving.split(sizes), strict=True):
            output.copy_(part)

    def _broadcast(self, tensor: Tensor, root: int) -> Steps:
        if tensor.numel():
            yield self._start(self._processes.broadcast, _bytes(tensor), root)

    def _all_to_all(
        self, output: Tensor, tensor: Tensor, arriving: Sequence[int], leaving: Sequence[int]
    ) -> list[Any]:
        width = tensor.element_size()
        sizes = [[count * width for count in counts] for counts in (arriving, leaving)]
        return self._start(self._processes.alltoall_base, _bytes(output), _bytes(tensor), *sizes)

    def _start(self, operation: Callable[..., Any], *arguments: object) -> list[Any]:
        try:
            return [_Request(operation(*arguments), self._device.has_queues)]
        except RuntimeError as error:
            raise RequestFailed(str(error)) from error


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)
