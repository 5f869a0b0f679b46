"""Collectives by torch.distributed: NCCL on GPUs, gloo on CPUs.

With gloo the same code is tested where there is no GPU. A group has a process group of its own,
apart from torch's global ones. It only moves bytes: a reduction is an all-to-all followed by a
local sum in rank order, so that results equal those of the MPI backend to the bit. Messages between
two ranks go by MPI. NCCL asks that both ranks start all of theirs in one order, which a pipeline
that receives ahead does not (docs/gpu.md).

Ranks find each other by a store, which rank 0 opens at a free port; MPI tells the others where.
"""

import copy
import socket
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import psutil
import torch
from torch import Tensor

from hpczero.comm.connection import BLOCK, slot_bytes
from hpczero.comm.mpi_backend import TINY, Combine, Order, combine_into, combine_parts, shard
from hpczero.comm.nodes import Nodes
from hpczero.comm.progress import CommunicationError, RequestFailed, Requests
from hpczero.comm.status import WaitPoint
from hpczero.device import Device
from hpczero.errors import InputError

_NEVER = timedelta(days=365)  # the watchdog is earlier, and knows who did not come
_RENDEZVOUS = timedelta(seconds=60)


class Rendezvous:
    """The store by which the ranks of a world make process groups of one kind, "nccl" or "gloo"."""

    def __init__(self, kind: str, store: Any, address: str, device: Device) -> None:
        """`address`: of this rank, as the others reach it."""
        self.kind = kind
        self.device = device
        self._store = store
        self._address = address
        self._made: dict[str, int] = {}  # how many groups of this name

    @classmethod
    def of(cls, nodes: Nodes, kind: str, device: Device) -> "Rendezvous":
        """Make the store. Collective; InputError on all ranks if one does not reach rank 0."""
        from torch.distributed import TCPStore

        one_host = len(set(nodes.hosts)) == 1
        if nodes.rank == 0:
            store = TCPStore("0.0.0.0", 0, None, True, _RENDEZVOUS, wait_for_workers=False)
            addresses = _addresses(one_host)
            nodes.broadcast_object([addresses, store.port])
            return nodes.run_on_all(lambda: cls(kind, store, addresses[0], device))
        addresses, port = nodes.broadcast_object(None)
        return nodes.run_on_all(lambda: cls.join(kind, device, addresses, port))

    @classmethod
    def join(cls, kind: str, device: Device, addresses: Sequence[str], port: int) -> "Rendezvous":
        """Join rank 0's store at the first of its addresses that answers."""
        from torch.distributed import TCPStore

        patience = _RENDEZVOUS.seconds / 10
        for address in addresses:
            try:
                with socket.create_connection((address, port), patience) as connection:
                    own_address = connection.getsockname()[0]
                store = TCPStore(address, port, None, False, _RENDEZVOUS, wait_for_workers=False)
            except (OSError, RuntimeError):
                continue
            return cls(kind, store, own_address, device)
        raise InputError(
            f'comm.backend = "{kind}": {socket.gethostname()} reaches rank 0 at none of its '
            f"addresses {', '.join(addresses)}, port {port} (a firewall between the nodes?); "
            'comm.backend = "mpi" needs no such port'
        )

    def group(
        self, axis: str, ranks: Sequence[int], rank: int, room: int, order: Order
    ) -> "TorchCarrier":
        """Connect these ranks; this one is number `rank` of them.

        `room`: bytes of the buffers that arriving pieces are summed from.
        """
        from torch.distributed import PrefixStore

        name = f"{axis} {' '.join(map(str, ranks))}"
        self._made[name] = number = self._made.get(name, 0) + 1
        store = PrefixStore(f"{name} {number}", self._store)
        try:
            processes = _process_group(self.kind, store, rank, len(ranks), self._address)
            first = torch.zeros(1, dtype=torch.float32, device=self.device.torch)
            # A sum, so that nobody goes on, and maybe leaves, before all are connected. What is set
            # up for the first operation is there then, too.
            processes.allreduce([first]).wait()
            first.item()
        except RuntimeError as error:
            named = f"group {axis} of ranks {', '.join(map(str, ranks))}"
            raise CommunicationError(f"{self.kind} cannot connect {named}: {error}") from error
        return TorchCarrier(processes, self, rank, room, order)


def _addresses(one_host: bool) -> list[str]:
    """Return the addresses at which ranks may reach this host; `one_host`: all of them are here."""
    if one_host:
        return ["127.0.0.1"]
    cards = psutil.net_if_addrs().values()
    known = {entry.address for card in cards for entry in card if entry.family == socket.AF_INET}
    return sorted(address for address in known if not address.startswith("127."))


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
    """A request of torch.distributed, with a `Test()` as MPI's have.

    Where the device waits (`is_queued`), it is done for the host at once.
    """

    def __init__(self, work: Any, is_queued: bool) -> None:
        self._work = work
        self._is_queued = is_queued

    def Test(self) -> bool:
        if not self._is_queued and not self._work.is_completed():
            return False
        try:
            self._work.wait()  # the host waits for nothing: it is done, or the queue waits
        except RuntimeError as error:
            raise RequestFailed(str(error)) from error
        return True


class TorchCarrier:
    """A `Carrier`: the process group of one group.

    All ranks must start their collectives in one order, and an operation may be several of them:
    operations take turns (`Order`).
    """

    def __init__(
        self, processes: Any, rendezvous: Rendezvous, rank: int, room: int, order: Order
    ) -> None:
        self.rank = rank
        self.size = processes.size()
        self._processes = processes
        self._kind = rendezvous.kind
        self._device = rendezvous.device
        self._room = room
        self._order = order
        self._channel = 0
        self._buffer: Tensor | None = None
        self.queue = self._device.queue()

    def beside(self, communicator: Callable[[], Any]) -> "TorchCarrier":
        """Return a carrier for another group of the same ranks, on the same process group.

        Its operations may start in any order relative to these. Collective, while nothing is in
        flight; `communicator` makes an MPI communicator of these ranks.
        """
        other = copy.copy(self)
        other._channel = self._order.add(communicator)
        other._buffer = None
        other.queue = self._device.queue()
        return other

    @property
    def buffered(self) -> int:
        """Bytes of the memory in which pieces leave, and arrive to be summed."""
        return 0 if self._buffer is None else self._buffer.numel()

    def takes(self, tensor: Tensor) -> bool:
        return self._device.holds(tensor)

    def all_reduce(self, tensor: Tensor, op: str, point: WaitPoint, code: int) -> Requests:
        if tensor.nbytes * self.size <= TINY:
            return self._in_turn(self._all_reduce_tiny(tensor, op))
        own_shard = tensor[shard(tensor.numel(), self.size, self.rank)]
        reduction = self._reduce_scatter(tensor, combine_into(own_shard, op))
        return self._in_turn(reduction, self._all_gather(tensor, own_shard))

    def reduce_scatter(
        self, tensor: Tensor, combine: Combine, point: WaitPoint, code: int
    ) -> Requests:
        return self._in_turn(self._reduce_scatter(tensor, combine))

    def all_gather(self, output: Tensor, tensor: Tensor, point: WaitPoint, code: int) -> Requests:
        return self._in_turn(self._all_gather(output, tensor))

    def exchange(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], point: WaitPoint, code: int
    ) -> Requests:
        return self._in_turn(self._exchange(outputs, inputs))

    def broadcast(self, tensor: Tensor, root: int, point: WaitPoint, code: int) -> Requests:
        return self._in_turn(self._broadcast(tensor, root))

    def close(self) -> None:
        """Collective, when nothing is in flight."""
        if self._kind == "nccl" and self._channel == 0:
            self._processes.shutdown()
        self._processes = None
        self._order.close()

    def _in_turn(self, *steps: Requests) -> Requests:
        turn = self._order.start(self._channel)
        try:
            while not self._order.is_next(self._channel, turn):
                yield ()
            for collective in steps:
                yield from collective
        finally:
            self._order.done(self._channel, turn)

    def _all_reduce_tiny(self, tensor: Tensor, op: str) -> Requests:
        # Made here, in the queue: memory of the computing stream would be given to others as soon
        # as the host is through, while the device still reads it.
        everyones = tensor.new_empty(self.size, tensor.numel())
        yield from self._all_gather(everyones.view(-1), tensor)
        combine_parts(tensor, list(everyones), op)

    def _reduce_scatter(self, tensor: Tensor, combine: Combine) -> Requests:
        """Reduce in rounds of as many elements of each shard as there is room for.

        While one round is summed, the next is on its way.
        """
        pieces = [tensor[shard(tensor.numel(), self.size, rank)] for rank in range(self.size)]
        leaving, arriving = self._slots(tensor)
        length = leaving.shape[1] // self.size
        windows = [slice(begin, begin + length) for begin in range(0, pieces[0].numel(), length)]
        counts = [pieces[self.rank][window].numel() for window in windows]
        arrived = [arriving[number % 2][: self.size * count] for number, count in enumerate(counts)]

        def post(number: int) -> list[Any]:
            parts = [piece[windows[number]] for piece in pieces]
            sizes = [part.numel() for part in parts]
            sent = torch.cat(parts, out=leaving[number % 2][: sum(sizes)])
            return self._all_to_all(arrived[number], sent, [counts[number]] * self.size, sizes)

        posted = post(0) if windows else []
        for number, window in enumerate(windows):
            following = post(number + 1) if number + 1 < len(windows) else []
            yield posted
            combine(window, list(arrived[number].view(self.size, counts[number])))
            posted = following

    def _slots(self, tensor: Tensor) -> tuple[Tensor, Tensor]:
        """Return memory for leaving and for arriving pieces, each as [2 rounds, elements].

        All operations use the same memory, as they take turns.
        """
        width = tensor.element_size()
        most = 4 * self.size * slot_bytes(tensor, self.size)  # for all of it in one round
        room = max(min(self._room, most), 4 * self.size * 8)
        if self._buffer is None or self._buffer.numel() < room:
            self._buffer = None  # before the larger one is made
            self._buffer = torch.empty(room, dtype=torch.uint8, device=tensor.device)
        length = room // (4 * self.size * width)
        length -= length % BLOCK if length > BLOCK else 0
        used = self._buffer[: 4 * self.size * length * width].view(tensor.dtype)
        leaving, arriving = used.view(2, 2, self.size * length)
        return leaving, arriving

    def _all_gather(self, output: Tensor, tensor: Tensor) -> Requests:
        count = output.numel()
        if not count:
            return
        longest = -(-count // self.size)
        padded = output if longest * self.size == count else output.new_empty(longest * self.size)
        sent = tensor
        if tensor.numel() != longest:
            sent = padded[self.rank * longest : (self.rank + 1) * longest]
            sent[: tensor.numel()] = tensor
        yield self._start(self._processes._allgather_base, _bytes(padded), _bytes(sent))
        if padded is not output:
            output.copy_(padded[:count])

    def _exchange(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Requests:
        sizes = [output.numel() for output in outputs]
        sent_sizes = [tensor.numel() for tensor in inputs]
        arrived = outputs[0].new_empty(sum(sizes))
        yield self._all_to_all(arrived, torch.cat(list(inputs)), sizes, sent_sizes)
        for output, part in zip(outputs, arrived.split(sizes), strict=True):
            output.copy_(part)

    def _broadcast(self, tensor: Tensor, root: int) -> Requests:
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
