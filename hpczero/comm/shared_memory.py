"""Blocks of memory that lie once on a node and are seen by several of its ranks: an MPI window (without torch, without protocol).

MPICH, Intel MPI and Open MPI put it into a file in /dev/shm that has no name any more once all have it open, so that nothing stays behind
whichever way the ranks end. Room is taken page by page, when a page is written for the first time; MPICH promises more than there is, and
the rank that touches the first page too many dies of SIGBUS. Therefore it is asked for here, before anything is made.
"""

import ctypes
from collections.abc import Generator, Sequence
from ctypes import memmove
from typing import Any

import torch
from torch import Tensor

from hpczero import machine
from hpczero.comm import mpi_backend
from hpczero.comm.mpi_backend import Combine, shard
from hpczero.comm.progress import CommunicationError, Steps
from hpczero.comm.status import WaitPoint
from hpczero.errors import InputError

PAGE = 4096


class SharedBlocks:
    """`.blocks[i]` is the block of rank i of the communicator, of the size that it asked for, beginning at a page. It costs nothing until
    it is written; nobody may rely on what is in it before.
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
        """Collective over the communicator. The first `cleared` bytes of every block are 0. `others` are open in this process: the rest
        of what they were promised is not free.
        """
        facts = [size, _free(others)]
        every = bytearray(16 * communicator.size)
        communicator.Allgather(
            [b"".join(fact.to_bytes(8, "little") for fact in facts), mpi.BYTE], [every, mpi.BYTE]
        )
        sizes, free = (
            [int.from_bytes(every[at : at + 8], "little") for at in range(first, len(every), 16)]
            for first in (0, 8)
        )
        self.size = sum(map(_up, sizes)) + PAGE
        self._is_private = communicator.size == 1  # and not in /dev/shm
        problem = None if self._is_private else shortage(name, self.size, min(free))
        if problem:
            raise InputError(problem)
        self._window = mpi.Win.Allocate_shared(
            self.size if communicator.rank == 0 else 0, 1, comm=communicator
        )
        self._window.Lock_all(mpi.MODE_NOCHECK)
        self._memory = memoryview(self._window.Shared_query(0)[0])
        self.blocks = []
        start = -_address(self._memory) % PAGE
        for size in sizes:
            self.blocks.append(self._memory[start : start + size])
            start += _up(size)
        self.blocks[communicator.rank][:cleared] = bytes(cleared)
        self.order = self._window.Sync  # what this rank wrote before it is seen before what it writes after it; and so for reading
        communicator.Barrier()

    def untouched(self) -> int:
        """Bytes of /dev/shm that take up no room yet."""
        if self._is_private:
            return 0
        pages = -(-self.size // PAGE)
        begin, resident = _address(self._memory), (ctypes.c_ubyte * (pages + 1))()
        if ctypes.CDLL(None).mincore(
            ctypes.c_void_p(begin - begin % PAGE),
            ctypes.c_size_t(self.size + begin % PAGE),
            resident,
        ):
            return self.size
        return max(0, pages - bytes(resident).count(1)) * PAGE

    def close(self) -> None:
        """Collective; the blocks are gone."""
        self.blocks.clear()
        self._window.Unlock_all()
        self._window.Free()


def shortage(name: str, size: int, free: int) -> str | None:
    """Why `size` bytes cannot be shared, and the way out; None: they can."""
    if size <= free:
        return None
    need = f"{name} needs {size:,} bytes of this node's /dev/shm, of which {free:,} are free and promised to nobody"
    return f"{need}: enlarge it (mount -o remount,size=… /dev/shm; --shm-size of a container), or set zero.node_shared = false"


def _free(others: Sequence[SharedBlocks]) -> int:
    space = machine.shared_memory()
    return max(0, space.free - sum(other.untouched() for other in others)) if space else 0


def _address(memory: memoryview) -> int:
    return ctypes.addressof(ctypes.c_ubyte.from_buffer(memory))


def _up(size: int) -> int:
    return -(-size // PAGE) * PAGE


# Short collectives among ranks of one node: through memory that all of them see, with no message.
#
# Every rank has two slots, which it takes in turns, and a counter. An operation has one phase or two:
#
# 1. The rank writes its part into its slot, behind a stamp that says which operation it is, and posts
#    the number of the phase in its counter.
# 2. Once all counters have come to that number it reads the other ranks' slots.
#
# A rank posts a phase only when it has read all that it wanted of the one before. So when all have
# posted a phase, the slots of the phase before are free again: two are enough. Operations go one after
# the other, in the order in which they start, which is the same on all ranks.
#
# Nothing moves here but by the ranks themselves. A rank that has waited for an operation has posted all
# its phases, owes the others nothing, and may block wherever it likes; one that has only started it may not.
_LARGEST = 1 << 18  # bytes of a tensor
_ALL = 1 << 23  # bytes of all ranks' slots of one kind: with many ranks tensors must be shorter
_ONCE = 1 << 15  # bytes over all ranks: up to here every rank sums all of a tensor, in one phase
_LINE = 64  # bytes
_LOOKS = 50  # for the other ranks, before operations that are under way beside this one get a turn


def largest(ranks: int, staging: int) -> int:
    """Bytes of a tensor that goes this way; `staging`: of the buffers that others go through."""
    return max(_LINE, min(_LARGEST, staging, _ALL // ranks) // _LINE * _LINE)


def size_of(ranks: int, staging: int) -> tuple[int, int]:
    """Bytes of a rank's block, and how many of them must be 0 at first."""
    return PAGE + 2 * largest(ranks, staging), PAGE


class ByWindow:
    def __init__(self, shared: SharedBlocks, axis: str, ranks: Sequence[int], rank: int) -> None:
        """`ranks` of the group by their numbers in the world, `rank`: which of them this one is."""
        self.shared, self._axis, self.ranks, self.rank = shared, axis, ranks, rank
        self.size, self._largest = len(ranks), (len(shared.blocks[0]) - PAGE) // 2
        self._order = shared.order
        self._counters = [block[:8].cast("Q") for block in shared.blocks]
        self._stamps = [block[64:80].cast("Q") for block in shared.blocks]
        slots = [torch.frombuffer(block[PAGE:], dtype=torch.uint8) for block in shared.blocks]
        self._slots = [[slot[: self._largest], slot[self._largest :]] for slot in slots]
        self._addresses = [[slot.data_ptr() for slot in slots] for slots in self._slots]
        self._views: dict[tuple[int, int, torch.dtype, int], Tensor] = {}
        self._phase = self._started = self._ended = 0

    def close(self) -> None:
        """Before the memory goes."""
        for views in (self._counters, self._stamps, self._slots):
            views.clear()
        self._views.clear()

    def takes(self, tensor: Tensor) -> bool:
        return 0 < tensor.nbytes <= self._largest

    def all_reduce(self, tensor: Tensor, op: str, code: int, place: WaitPoint) -> Steps:
        yield from self._turn()
        everyone, count = range(self.size), tensor.numel()
        slot = yield from self._meet(tensor, code, place)
        parts = [self._view(rank, slot, tensor.dtype, count) for rank in everyone]
        if tensor.nbytes * self.size <= _ONCE:
            mpi_backend.combine_parts(tensor, parts, op)
        else:
            own = shard(count, self.size, self.rank)
            mpi_backend.combine_parts(tensor[own], [part[own] for part in parts], op)
            slot = yield from self._meet(tensor[own], code, place)
            self._read_shards(tensor, slot)
        self._ended += 1

    def reduce_scatter(
        self, tensor: Tensor, combine: Combine, code: int, place: WaitPoint
    ) -> Steps:
        yield from self._turn()
        slot = yield from self._meet(tensor, code, place)
        own, count = shard(tensor.numel(), self.size, self.rank), tensor.numel()
        views = [self._view(rank, slot, tensor.dtype, count) for rank in range(self.size)]
        parts = [tensor[own] if rank == self.rank else view[own] for rank, view in enumerate(views)]
        combine(slice(0, own.stop - own.start), parts)
        self._ended += 1

    def all_gather(self, output: Tensor, tensor: Tensor, code: int, place: WaitPoint) -> Steps:
        yield from self._turn()
        slot = yield from self._meet(tensor, code, place)
        own = output[shard(output.numel(), self.size, self.rank)]
        memmove(own.data_ptr(), tensor.data_ptr(), tensor.nbytes)  # they may be the same
        self._read_shards(output, slot)
        self._ended += 1

    def _turn(self) -> Steps:
        self._started += 1
        number = self._started
        while self._ended != number - 1:
            yield ()

    def _meet(
        self, tensor: Tensor, code: int, place: WaitPoint
    ) -> Generator[Sequence[Any], None, int]:
        """One phase; gives the number of the slots to read."""
        self._phase += 1
        phase, slot = self._phase, self._phase % 2
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
                what = f"{place.label.decode()} (number {place.number} along {self._axis})"
                theirs = f"what came from rank {self.ranks[rank]} belongs to another operation"
                raise CommunicationError(f"{what}: {theirs}, or has another size")
        return slot

    def _read_shards(self, output: Tensor, slot: int) -> None:
        length = -(-output.numel() // self.size) * output.itemsize
        begin, size = output.data_ptr(), output.nbytes
        for rank, addresses in enumerate(self._addresses):
            at = min(rank * length, size)
            if rank != self.rank:
                memmove(begin + at, addresses[slot], min(length, size - at))

    def _view(self, rank: int, slot: int, dtype: torch.dtype, count: int) -> Tensor:
        key = rank, slot, dtype, count
        view = self._views.get(key)
        if view is None:
            memory = self._slots[rank][slot][: count * dtype.itemsize]
            view = self._views[key] = memory.view(dtype)
        return view
