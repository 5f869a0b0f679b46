"""Memory that the ranks of a node share: blocks, windows with counters, short collectives.

The memory is an MPI window. MPICH, Intel MPI and Open MPI put it into a file in /dev/shm that has
no name any more once all ranks have it open: nothing stays behind, however the ranks end. A page
takes up room when it is first written. MPICH promises more than there is, and the rank that touches
the first page too many dies of SIGBUS. Therefore `SharedBlocks` checks for free room first.
"""

import ctypes
import time
from collections.abc import Generator, Sequence
from ctypes import memmove
from typing import Any, Protocol

import torch
from torch import Tensor

from hpczero import machine
from hpczero.comm.mpi_backend import TINY, Combine, combine_parts, mismatch, shard
from hpczero.comm.progress import Progress, Requests, yield_core
from hpczero.comm.status import Status, WaitPoint
from hpczero.errors import InputError

PAGE = 4096
LINE = 64  # bytes of a cache line
_STRIDE = LINE // 8  # from one counter of a window to the next
_EAGER = 0.002  # seconds of a wait in which a rank only yields the core; then it sleeps in between
_LARGEST = 1 << 18  # bytes of a tensor
_ALL = 1 << 23  # bytes of all ranks' slots of one kind: with many ranks tensors must be shorter
_LOOKS = 50  # at the other ranks' counters, before other operations in flight get a turn


class SharedBlocks:
    """Blocks of memory, one for each rank of a communicator, seen by all of them.

    `.blocks[i]` is the block of rank i, of the size that it asked for, beginning at a page. It
    takes up no room until it is written; nobody may rely on its contents before.
    """

    def __init__(
        self,
        mpi: Any,
        communicator: Any,
        name: str,
        size: int,
        cleared: int,
        others: Sequence["SharedBlocks"],
    ) -> None:
        """Collective over the communicator. The first `cleared` bytes of every block are 0.

        `others` are open in this process: what they have not touched yet is not free.
        """
        mine = size.to_bytes(8, "little") + _free(others).to_bytes(8, "little")
        gathered = bytearray(16 * communicator.size)
        communicator.Allgather([mine, mpi.BYTE], [gathered, mpi.BYTE])
        starts = range(0, len(gathered), 8)
        numbers = [int.from_bytes(gathered[at : at + 8], "little") for at in starts]
        sizes = numbers[::2]
        self.size = sum(map(whole_pages, sizes)) + PAGE
        self._is_private = communicator.size == 1  # and not in /dev/shm
        problem = None if self._is_private else shortage(name, self.size, min(numbers[1::2]))
        if problem:
            raise InputError(problem)
        here = self.size if communicator.rank == 0 else 0
        self._window = mpi.Win.Allocate_shared(here, 1, comm=communicator)
        self._window.Lock_all(mpi.MODE_NOCHECK)
        self._memory = memoryview(self._window.Shared_query(0)[0])
        self.blocks = []
        start = -_address(self._memory) % PAGE
        for block_size in sizes:
            self.blocks.append(self._memory[start : start + block_size])
            start += whole_pages(block_size)
        self.blocks[communicator.rank][:cleared] = bytes(cleared)
        # A memory barrier: what this rank wrote before it is seen before what it writes after it;
        # and so for reading.
        self.sync = self._window.Sync
        communicator.Barrier()

    def untouched(self) -> int:
        """Return the bytes of /dev/shm that take up no room yet."""
        if self._is_private:
            return 0
        pages = -(-self.size // PAGE)
        begin = _address(self._memory)
        into_page = begin % PAGE
        resident = (ctypes.c_ubyte * (pages + 1))()
        first = ctypes.c_void_p(begin - into_page)
        if ctypes.CDLL(None).mincore(first, ctypes.c_size_t(self.size + into_page), resident):
            return self.size
        return max(0, pages - bytes(resident).count(1)) * PAGE

    def close(self) -> None:
        """Free the blocks. Collective."""
        self.blocks.clear()
        self._window.Unlock_all()
        self._window.Free()


def shortage(name: str, size: int, free: int) -> str | None:
    """Say why `size` bytes cannot be shared, and the way out; None if they can."""
    if size <= free:
        return None
    return (
        f"{name} needs {size:,} bytes of this node's /dev/shm, of which {free:,} are free and "
        "promised to nobody: enlarge it (mount -o remount,size=… /dev/shm; --shm-size of a "
        "container), or set zero.node_shared = false"
    )


def whole_pages(size: int) -> int:
    """Round up to whole pages."""
    return -(-size // PAGE) * PAGE


def _free(others: Sequence[SharedBlocks]) -> int:
    space = machine.shared_memory()
    return max(0, space.free - sum(other.untouched() for other in others)) if space else 0


def _address(memory: memoryview) -> int:
    return ctypes.addressof(ctypes.c_ubyte.from_buffer(memory))


# ------------------------------------------------------------------------ windows with counters


class SharesMemory(Protocol):
    """Ranks that can share memory: `Nodes`."""

    rank: int
    status: Status
    progress: Progress

    def numbers(self, ranks: Sequence[int]) -> tuple[int, ...]: ...

    def share_memory(
        self, ranks: Sequence[int], name: str, size: int, cleared: int
    ) -> SharedBlocks: ...

    def unshare_memory(self, shared: SharedBlocks, ranks: Sequence[int]) -> None: ...


class NodeWindow:
    """Memory that ranks of one node share; built with `NodeWindow.allocate`.

    `.ranks` share it; `.index` is this rank's number among them. Every rank sees the others' parts
    in place, and counters tell when something is there.

    Protocol: write into a part and `post` a counter; the others `wait` for the value, then read the
    part in place. Posting makes visible what was written before it, and what is read after a wait
    is what was posted. Counters start at 0 and only grow.
    """

    def __init__(
        self,
        name: str,
        world: SharesMemory,
        ranks: Sequence[int],
        shared: SharedBlocks,
        counters: int,
    ) -> None:
        self.name = name
        self.ranks = tuple(ranks)
        self.index = self.ranks.index(world.rank)
        # Each rank's counters lie before its part. Each has a cache line to itself, so that a rank
        # that waits for one does not slow down a rank that posts another.
        head = counters * LINE
        self._counters = [block[:head].cast("q") for block in shared.blocks]
        self._parts = [_tensor(block[whole_pages(head) :]) for block in shared.blocks]
        self._shared = shared
        self._world = world
        self._status: Status = world.status
        self._progress: Progress = world.progress

    @classmethod
    def allocate(
        cls,
        world: SharesMemory,
        ranks: Sequence[int],
        size: int,
        counters: int = 64,
        name: str = "shared",
    ) -> "NodeWindow":
        """Give each of `ranks`, which share a node, a part of the `size` that it asks for.

        Collective over `ranks`. InputError on all of them if the node has too little to share.
        """
        head = counters * LINE
        shared = world.share_memory(ranks, f"window {name}", whole_pages(head) + size, head)
        return cls(name, world, ranks, shared, counters)

    def part(self, index: int) -> Tensor:
        """Return the part of `ranks[index]` as bytes, beginning at a page.

        It takes up room only where it has been written to; nobody may rely on its contents before.
        Its owner should write first: the first to touch a page decides in which memory of the node
        the page lies.
        """
        return self._parts[index]

    def post(self, counter: int, value: int) -> None:
        """Set a counter of this rank."""
        self._shared.sync()
        self._counters[self.index][counter * _STRIDE] = value

    def seen(self, index: int, counter: int) -> int:
        """Return the value that `ranks[index]` has posted last."""
        value = self._counters[index][counter * _STRIDE]
        self._shared.sync()
        return value

    def reached(self, counter: int, value: int) -> bool:
        """Return True once all ranks' counters are at `value` or beyond."""
        at = counter * _STRIDE
        for counters in self._counters:
            if counters[at] < value:
                return False
        self._shared.sync()
        return True

    def wait(self, counter: int, value: int) -> None:
        """Wait until all ranks' counters are at `value` or beyond.

        Messages in flight go on meanwhile, and the core is left to others.
        """
        if self.reached(counter, value):
            return
        label = f"counter {counter} of window {self.name} to reach {value}"
        point = WaitPoint(label.encode()[:64], ranks=self._world.numbers(self.ranks))
        self._status.begin_wait(point, lambda: self._world.numbers(self.missing(counter, value)))
        patience = time.monotonic() + _EAGER
        try:
            while not self.reached(counter, value):
                if not self._progress.advance():
                    yield_core(patience)
        finally:
            self._status.end_wait()

    def missing(self, counter: int, value: int) -> list[int]:
        """Return the ranks whose counters are below `value`."""
        at = counter * _STRIDE
        pairs = zip(self.ranks, self._counters, strict=True)
        return [rank for rank, counters in pairs if counters[at] < value]

    def close(self) -> None:
        """Collective. Tensors on the parts must not be used any more."""
        self._parts.clear()
        self._counters.clear()
        self._world.unshare_memory(self._shared, self.ranks)


def _tensor(memory: memoryview) -> Tensor:
    if not len(memory):
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(memory, dtype=torch.uint8)


# --------------------------------------------------------------------------- short collectives


def largest(ranks: int, staging: int) -> int:
    """Return the bytes of the largest tensor that goes this way.

    `staging`: bytes of the buffers that longer ones go through.
    """
    return max(LINE, min(_LARGEST, staging, _ALL // ranks) // LINE * LINE)


def size_of(ranks: int, staging: int) -> tuple[int, int]:
    """Return the bytes of a rank's block, and how many of them must be 0 at first."""
    return PAGE + 2 * largest(ranks, staging), PAGE


class SharedMemoryCarrier:
    """A `ShardCarrier` for short tensors of the CPU, through memory of a node, without messages.

    Protocol. Every rank has two slots, which it uses in turns, and a counter. An operation has one
    phase or two:

    1. The rank writes its tensor into its slot, behind a stamp that says which operation it is, and
       posts the number of the phase in its counter.
    2. Once all counters have come to that number it reads the other ranks' slots.

    A rank posts a phase only when it has read all that it wanted of the one before. So when all
    have posted a phase, the slots of the phase before are free again: two are enough. Operations go
    one after the other, in the order in which they start, which is the same on all ranks.

    Only the ranks themselves move anything. A rank that has waited for an operation has posted all
    its phases, owes the others nothing, and may block wherever it likes. One that has only started
    it may not.
    """

    def __init__(self, shared: SharedBlocks, axis: str, ranks: Sequence[int], rank: int) -> None:
        """`ranks`: their numbers in the world; `rank`: this rank's number in the group."""
        self.shared = shared
        self.ranks = ranks
        self.rank = rank
        self.size = len(ranks)
        self._axis = axis
        self._largest = (len(shared.blocks[0]) - PAGE) // 2
        self._order = shared.sync
        self._counters = [block[:8].cast("Q") for block in shared.blocks]
        self._stamps = [block[64:80].cast("Q") for block in shared.blocks]
        slots = [torch.frombuffer(block[PAGE:], dtype=torch.uint8) for block in shared.blocks]
        self._slots = [[slot[: self._largest], slot[self._largest :]] for slot in slots]
        self._addresses = [[slot.data_ptr() for slot in slots] for slots in self._slots]
        self._views: dict[tuple[int, int, torch.dtype, int], Tensor] = {}
        self._phase = self._started = self._ended = 0

    def close(self) -> None:
        """Let go of the memory, before it is freed."""
        for views in (self._counters, self._stamps, self._slots):
            views.clear()
        self._views.clear()

    def takes(self, tensor: Tensor) -> bool:
        return 0 < tensor.nbytes <= self._largest

    def all_reduce(self, tensor: Tensor, op: str, point: WaitPoint, code: int) -> Requests:
        yield from self._turn()
        count = tensor.numel()
        slot = yield from self._meet(tensor, point, code)
        parts = [self._view(rank, slot, tensor.dtype, count) for rank in range(self.size)]
        if tensor.nbytes * self.size <= TINY:
            combine_parts(tensor, parts, op)
        else:
            cut = shard(count, self.size, self.rank)
            combine_parts(tensor[cut], [part[cut] for part in parts], op)
            slot = yield from self._meet(tensor[cut], point, code)
            self._read_shards(tensor, slot)
        self._ended += 1

    def reduce_scatter(
        self, tensor: Tensor, combine: Combine, point: WaitPoint, code: int
    ) -> Requests:
        yield from self._turn()
        slot = yield from self._meet(tensor, point, code)
        count = tensor.numel()
        cut = shard(count, self.size, self.rank)
        views = [self._view(rank, slot, tensor.dtype, count) for rank in range(self.size)]
        parts = [tensor[cut] if rank == self.rank else view[cut] for rank, view in enumerate(views)]
        combine(slice(0, cut.stop - cut.start), parts)
        self._ended += 1

    def all_gather(self, output: Tensor, tensor: Tensor, point: WaitPoint, code: int) -> Requests:
        yield from self._turn()
        slot = yield from self._meet(tensor, point, code)
        own_shard = output[shard(output.numel(), self.size, self.rank)]
        memmove(own_shard.data_ptr(), tensor.data_ptr(), tensor.nbytes)  # they may be the same
        self._read_shards(output, slot)
        self._ended += 1

    def _turn(self) -> Requests:
        self._started += 1
        number = self._started
        while self._ended != number - 1:
            yield ()

    def _meet(
        self, tensor: Tensor, point: WaitPoint, code: int
    ) -> Generator[Sequence[Any], None, int]:
        """Carry out one phase; return the number of the slots to read."""
        self._phase += 1
        phase = self._phase
        slot = phase % 2
        memmove(self._addresses[self.rank][slot], tensor.data_ptr(), tensor.nbytes)
        self._stamps[self.rank][slot] = code
        self._order()  # what was written is seen before the counter
        self._counters[self.rank][0] = phase
        looks = 0
        for counter in self._counters:  # of all ranks
            while counter[0] < phase:
                looks += 1
                if looks > _LOOKS:
                    yield ()
        self._order()  # and nothing is read before it
        for rank, stamps in enumerate(self._stamps):
            if stamps[slot] != code:
                raise mismatch(point, self._axis, self.ranks[rank])
        return slot

    def _read_shards(self, output: Tensor, slot: int) -> None:
        length = -(-output.numel() // self.size) * output.itemsize
        begin = output.data_ptr()
        size = output.nbytes
        for rank, addresses in enumerate(self._addresses):
            start = min(rank * length, size)
            if rank != self.rank:
                memmove(begin + start, addresses[slot], min(length, size - start))

    def _view(self, rank: int, slot: int, dtype: torch.dtype, count: int) -> Tensor:
        key = rank, slot, dtype, count
        view = self._views.get(key)
        if view is None:
            memory = self._slots[rank][slot][: count * dtype.itemsize]
            view = self._views[key] = memory.view(dtype)
        return view
