"""The data ranks of one node keep one copy of the weights and read each other's gradients in place.

Only sums of a node travel. Protocol of a reduction, for ranks with R on their node:

1. READY: every rank's tensor is complete in its block. All of the node wait for that.
2. Each rank sums slice i of R of every shard that belongs to another node (i is its number on the
   node) and sends it to the owner. The owner of a shard adds up the R pieces of its own node, in
   place, and the sums of the other nodes, in the order of the nodes.
3. DONE: nobody of the node reads the tensor any more.

A gather sends each shard once to every other node, one slice to each of its ranks, which write it
where all of the node read it; WRITTEN ends it. Messages that stand for shards (`ShardMessages`)
arrive each at the beginning of its shard's place. After WRITTEN the ranks of the node share the
work of reading them; READ ends it.
"""

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from hpczero.comm.connection import BLOCK
from hpczero.comm.grid import node_slice
from hpczero.comm.group import Group
from hpczero.comm.progress import Requests, Work
from hpczero.comm.shared_memory import NodeWindow
from hpczero.device import CPU

if TYPE_CHECKING:
    from hpczero.comm.world import World

READY, DONE, WRITTEN, READ = range(4)  # counters


class LocalSum(Protocol):
    """The arithmetic of a reduction.

    `parts` are what the `ranks` (numbers in the group) have for the same elements.
    """

    def into_shard(self, window: slice, parts: list[Tensor], ranks: Sequence[int]) -> None:
        """Sum up elements `window` of this rank's own shard."""

    def of_node(self, first: int, parts: list[Tensor], ranks: Sequence[int], out: Tensor) -> None:
        """Sum up the elements of the tensor from `first` on, rounded to `out`."""


class ShardMessages(Protocol):
    """Messages that a gather sends in place of shards, which are longer."""

    size: int  # bytes of each message

    def write(self, message: Tensor, rank: int) -> None:
        """Write the message of the shard of `rank`, which is this one."""

    def read(self, message: Tensor, rank: int, shard: Tensor) -> None:
        """Read the message of the shard of `rank`, also of this one: all have the same values."""


class NodeAxis:
    """A `Group` with one copy per node. Tensors lie in the blocks of `allocate`, called first.

    A `rank` is a number in the group; an `index` is a rank's number on its node.
    """

    shared = True
    replicas = None

    def __init__(self, world: "World", group: Group) -> None:
        self.group = group
        self.rank = group.rank
        self.size = group.size
        self.device = CPU
        self._world = world
        nodes = [world.node_of_rank[rank] for rank in group.ranks]
        self._node = nodes[self.rank]
        self._ranks_of: dict[int, list[int]] = {node: [] for node in sorted(set(nodes))}
        for rank, node in enumerate(nodes):
            self._ranks_of[node].append(rank)
        self.ranks_on_node = self._ranks_of[self._node]
        self.neighbours = len(self.ranks_on_node)
        self.local = self.ranks_on_node.index(self.rank)
        self._on_other_nodes = [rank for rank in range(self.size) if rank not in self.ranks_on_node]
        # Pieces in the buffer in a round: sums for other nodes' ranks, and other nodes' sums. The
        # most of any node, so that nodes with different numbers of ranks cut the same windows.
        fewest = min(map(len, self._ranks_of.values()))
        self._pieces = self.size - fewest + len(self._ranks_of) - 1
        self._window: NodeWindow | None = None
        self._numbers = [0, 0, 0, 0]  # by counter: of the operation started last
        self._posted = [0, 0, 0, 0]

    def allocate(self, once: Mapping[str, int], each: Mapping[str, int]) -> dict[str, Tensor]:
        """Return blocks in the node's memory by name.

        There is one for all ranks of the node (`once`), or one for each of them (`each`).
        """
        of_each = sum(each.values())
        size = of_each + (sum(once.values()) if self.local == 0 else 0)
        ranks = [self.group.ranks[rank] for rank in self.ranks_on_node]
        self._window = NodeWindow.allocate(self._world, ranks, size)
        owners = dict.fromkeys(each, self.local) | dict.fromkeys(once, 0)
        taken: dict[int, int] = {}
        blocks = {}
        for name, amount in chain(each.items(), once.items()):
            owner = owners[name]
            start = taken.get(owner, of_each if name in once else 0)
            # .data: autograd counts the writes to all views of one tensor together, but is to watch
            # each block for itself.
            blocks[name] = self._window.part(owner)[start : start + amount].data
            taken[owner] = start + amount
        return blocks

    def reduce(self, tensor: Tensor, sums: LocalSum) -> Work:
        length = tensor.numel() // self.size
        width = tensor.element_size()
        windows = self._windows(length, width) if self._on_other_nodes else []
        slices = [
            node_slice(window.stop - window.start, self.neighbours, self.local)
            for window in windows
        ]
        summed = sum(part.stop - part.start for part in slices)
        between = len(self._on_other_nodes) * summed * width
        read = (self.neighbours - 1) * (length * width + between)
        steps = self._reduce(tensor, sums, self.group.next_tag())
        return self.group.start_steps("reduce_scatter", steps, between, read)

    def gather(
        self,
        tensor: Tensor,
        per_rank: bool = False,
        name: str = "",
        messages: ShardMessages | None = None,
    ) -> Work:
        """Bring every shard to all: once per node, or (`per_rank`) into each rank's own tensor.

        `messages` stand for the shards, where nodes have one tensor.
        """
        assert not (per_rank and messages)
        sent = tensor.numel() // self.size * tensor.element_size()
        read = (self.size - 1) * sent if per_rank else 0
        if messages:
            sent = messages.size
            own = tensor[self._shard(tensor, self.rank)]
            messages.write(own.view(torch.uint8)[:sent], self.rank)
        steps = self._gather(tensor, per_rank, messages, self.group.next_tag())
        between = (len(self._ranks_of) - 1) * sent
        return self.group.start_steps("all_gather", steps, between, read)

    def node_barrier(self) -> Work:
        """Wait until all of the node have written what they had to write in its memory."""
        return self.group.start_steps("barrier", self._all_written(), 0, 0)

    def written(self, elements: int, sharded: bool) -> slice:
        """Return the elements of the weights that this rank writes.

        These are its shard, or its slice of all of them where every rank has all results.
        """
        if sharded:
            return slice(self.rank * elements // self.size, (self.rank + 1) * elements // self.size)
        return node_slice(elements, self.neighbours, self.local)

    def close(self) -> None:
        if self._window:
            self._window.close()

    # --------------------------------------------------------------------------------- reduction

    def _reduce(self, tensor: Tensor, sums: LocalSum, tag: int) -> Requests:
        number = self._number(READY)
        yield from self._post(READY, number)
        yield from self._reached(READY, number)
        yield from self._turn(DONE, number)
        tensors = [self._tensor_of(index, tensor) for index in range(self.neighbours)]
        if self._on_other_nodes:
            yield from self._reduce_between(tensors, sums, tag)
        else:
            length = tensor.numel() // self.size
            parts = [theirs[self._shard(tensor, self.rank)] for theirs in tensors]
            sums.into_shard(slice(0, length), parts, self.ranks_on_node)
        yield from self._post(DONE, number)
        yield from self._reached(DONE, number)

    def _reduce_between(self, tensors: list[Tensor], sums: LocalSum, tag: int) -> Requests:
        length = tensors[0].numel() // self.size
        dtype = tensors[0].dtype
        connection = self.group.connection
        buffer = yield from connection.borrow(self._least(length, dtype.itemsize))
        try:
            for window in self._windows(length, dtype.itemsize):
                yield from self._round(tensors, window, buffer.view(dtype), sums, tag)
        finally:
            connection.give_back(buffer)

    def _windows(self, length: int, width: int) -> list[slice]:
        """Return the elements of each shard that a round reduces.

        A buffer of constant size has room for as many of them, of `width` bytes each.
        """
        room = self.group.connection.room(self._least(length, width)) // width // self._pieces
        step = max(1, length if room >= length else room // BLOCK * BLOCK)
        return [slice(start, min(start + step, length)) for start in range(0, length, step)]

    def _least(self, length: int, width: int) -> int:
        return self._pieces * min(BLOCK, length) * width

    def _round(
        self, tensors: list[Tensor], window: slice, buffer: Tensor, sums: LocalSum, tag: int
    ) -> Requests:
        connection = self.group.connection
        length = tensors[0].numel() // self.size
        count = window.stop - window.start
        free = iter(buffer[: self._pieces * count].split(count)) if count else iter(())
        mine = node_slice(count, self.neighbours, self.local)
        requests: list[Any] = []
        arriving = {node: next(free) for node in self._ranks_of if node != self._node}
        for node, piece in arriving.items():
            ranks = self._ranks_of[node]
            for index, rank in enumerate(ranks):
                theirs = piece[node_slice(count, len(ranks), index)]
                requests += connection.receive(theirs, rank, tag)
        for rank in self._on_other_nodes:
            first = rank * length + window.start + mine.start
            out = next(free)[: mine.stop - mine.start]
            parts = [tensor[first : first + out.numel()] for tensor in tensors]
            sums.of_node(first, parts, self.ranks_on_node, out)
            requests += connection.send(out, rank, tag)
        yield requests
        own_window = slice(self.rank * length + window.start, self.rank * length + window.stop)
        of_this_node = [tensor[own_window] for tensor in tensors]
        summands: list[Tensor] = []
        summed_by: list[int] = []
        for node, ranks in self._ranks_of.items():
            summands += [arriving[node]] if node in arriving else of_this_node
            summed_by += ranks[:1] if node in arriving else ranks
        sums.into_shard(window, summands, summed_by)

    # ------------------------------------------------------------------------------------ gather

    def _gather(
        self, tensor: Tensor, per_rank: bool, messages: ShardMessages | None, tag: int
    ) -> Requests:
        number = self._number(WRITTEN)
        reading = self._number(READ) if messages else 0
        connection = self.group.connection
        shards = sent = [tensor[self._shard(tensor, rank)] for rank in range(self.size)]
        if messages:
            sent = [shard.view(torch.uint8)[: messages.size] for shard in shards]
        requests: list[Any] = []
        for rank in self._on_other_nodes:
            cut = node_slice(sent[rank].numel(), self.neighbours, self.local)
            requests += connection.receive(sent[rank][cut], rank, tag)
        own = sent[self.rank]
        for node, ranks in self._ranks_of.items():
            if node != self._node:
                for index, rank in enumerate(ranks):
                    part = own[node_slice(own.numel(), len(ranks), index)]
                    requests += connection.send(part, rank, tag)
        if requests:
            yield requests
        yield from self._post(WRITTEN, number)
        yield from self._reached(WRITTEN, number)
        if messages:
            for rank in range(self.local, self.size, self.neighbours):
                messages.read(sent[rank].clone(), rank, shards[rank])
            yield from self._post(READ, reading)
            yield from self._reached(READ, reading)
        if per_rank:
            for index, rank in enumerate(self.ranks_on_node):
                theirs = self._tensor_of(index, tensor)
                if index != self.local:
                    received = [
                        self._slice_for(tensor, other, index) for other in self._on_other_nodes
                    ]
                    for cut in (self._shard(tensor, rank), *received):
                        tensor[cut] = theirs[cut]

    def _all_written(self) -> Requests:
        number = self._number(WRITTEN)
        yield from self._post(WRITTEN, number)
        yield from self._reached(WRITTEN, number)

    # -------------------------------------------------------------------------- parts of tensors

    def _shard(self, tensor: Tensor, rank: int) -> slice:
        length = tensor.numel() // self.size
        return slice(rank * length, (rank + 1) * length)

    def _slice_for(self, tensor: Tensor, rank: int, index: int) -> slice:
        """Return what this node's rank `index` receives of the shard of `rank`, on another node."""
        shard = self._shard(tensor, rank)
        cut = node_slice(shard.stop - shard.start, self.neighbours, index)
        return slice(shard.start + cut.start, shard.start + cut.stop)

    def _tensor_of(self, index: int, tensor: Tensor) -> Tensor:
        """Return what the node's rank `index` has where `tensor` lies in this rank's block."""
        assert self._window is not None
        start = tensor.data_ptr() - self._window.part(self.local).data_ptr()
        return self._window.part(index)[start : start + tensor.nbytes].view(tensor.dtype)

    # ---------------------------------------------------------------------------------- counters

    def _number(self, counter: int) -> int:
        """Number an operation; operations are numbered as they start, equally on all ranks."""
        self._numbers[counter] += 1
        return self._numbers[counter]

    def _turn(self, counter: int, number: int) -> Requests:
        """Wait until all operations before `number` have been posted.

        Operations in flight may overtake each other, but a counter says that *all* up to its value
        have come so far.
        """
        while self._posted[counter] != number - 1:
            yield ()

    def _post(self, counter: int, number: int) -> Requests:
        assert self._window is not None
        yield from self._turn(counter, number)
        self._posted[counter] = number
        self._window.post(counter, number)

    def _reached(self, counter: int, number: int) -> Requests:
        assert self._window is not None
        while not self._window.reached(counter, number):
            yield ()
