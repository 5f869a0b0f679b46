"""Blocks of memory that lie once on a node and are seen by several of its ranks: an MPI window (without torch, without protocol).

MPICH, Intel MPI and Open MPI put it into a file in /dev/shm that has no name any more once all have it open, so that nothing stays behind
whichever way the ranks end. Room is taken page by page, when a page is written for the first time; MPICH promises more than there is, and
the rank that touches the first page too many dies of SIGBUS. Therefore it is asked for here, before anything is made.
"""

import ctypes
from collections.abc import Sequence
from typing import Any

from hpczero import machine
from hpczero.errors import InputError

PAGE = 4096


class SharedBlocks:
    """`.blocks[i]` is the block of rank i of the communicator, of the size that it asked for, beginning at a page. It costs nothing until
    it is written; nobody may rely on what is in it before.
    """

    def __init__(self, mpi: Any, communicator: Any, name: str, size: int, cleared: int, others: Sequence["SharedBlocks"]) -> None:
        """Collective over the communicator. The first `cleared` bytes of every block are 0. `others` are open in this process: the rest
        of what they were promised is not free.
        """
        facts = [size, _free(others)]
        every = bytearray(16 * communicator.size)
        communicator.Allgather([b"".join(fact.to_bytes(8, "little") for fact in facts), mpi.BYTE], [every, mpi.BYTE])
        sizes, free = ([int.from_bytes(every[at : at + 8], "little") for at in range(first, len(every), 16)] for first in (0, 8))
        self.size = sum(map(_up, sizes)) + PAGE
        self._is_private = communicator.size == 1  # and not in /dev/shm
        problem = None if self._is_private else shortage(name, self.size, min(free))
        if problem:
            raise InputError(problem)
        self._window = mpi.Win.Allocate_shared(self.size if communicator.rank == 0 else 0, 1, comm=communicator)
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
        if ctypes.CDLL(None).mincore(ctypes.c_void_p(begin - begin % PAGE), ctypes.c_size_t(self.size + begin % PAGE), resident):
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
