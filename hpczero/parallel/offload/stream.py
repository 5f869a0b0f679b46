"""Pieces of a file that pass through memory in turn: read ahead, changed, and written behind.

There is memory for `SETS` pieces, whatever the size of the file: one is worked on, while the next
one is read and the one before is written. What is read and written at a time are the parts of a
piece, each somewhere else in the file, by as many threads.
"""

import mmap
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from hpczero.parallel.offload.state_file import StateFile
from hpczero.parallel.states import PAGE, SETS, whole_pages


@dataclass(frozen=True)
class Piece:
    """Parts of one size, at these places of the file."""

    places: tuple[int, ...]
    size: int  # bytes of a part

    @property
    def room(self) -> int:
        """Bytes of a part in whole pages."""
        return whole_pages(self.size)


class Stream:
    """One pass after another over pieces of a file."""

    def __init__(self, file: StateFile, parts: int, size: int) -> None:
        """The pieces have so many parts, of at most this size."""
        self._file = file
        # from the kernel, so that they begin at a page
        room = whole_pages(size)
        self.size = SETS * parts * room  # of its memory
        whole = memoryview(mmap.mmap(-1, max(PAGE, self.size)))
        rooms = [whole[start : start + room] for start in range(0, self.size, room)]
        self._sets = [rooms[first::SETS] for first in range(SETS)]
        self._threads = ThreadPoolExecutor(SETS * max(1, parts), "hpczero-offload")
        self._pieces: Sequence[Piece] = ()
        self._asked = self._taken = 0  # pieces of this pass: that are being read, that came
        self._reads: deque[list[Future[None]]] = deque()
        self._writes: dict[int, list[Future[None]]] = {}  # by the number of their set

    def begin(self, pieces: Sequence[Piece]) -> None:
        """Begin a pass; the one before has come to its end."""
        assert self._taken == len(self._pieces)
        self._pieces = pieces
        self._asked = self._taken = 0
        self._read_ahead()

    def _read_ahead(self) -> None:
        while self._asked < min(len(self._pieces), self._taken + SETS - 1):
            number = self._asked % SETS
            self._wait_for(number)
            piece = self._pieces[self._asked]
            rooms = [room[: piece.room] for room in self._sets[number]]
            self._reads.append(
                [
                    self._threads.submit(self._file.read, place, room)
                    for place, room in zip(piece.places, rooms, strict=True)
                ]
            )
            self._asked += 1

    def take(self) -> list[Tensor]:
        """Return the parts of the next piece, as bytes; `put_back` says that they are changed."""
        for read in self._reads.popleft():
            read.result()
        size = self._pieces[self._taken].size
        rooms = self._sets[self._taken % SETS]
        return [torch.frombuffer(room, dtype=torch.uint8)[:size] for room in rooms]

    def put_back(self) -> None:
        number = self._taken % SETS
        piece = self._pieces[self._taken]
        rooms = [room[: piece.room] for room in self._sets[number]]
        self._writes[number] = [
            self._threads.submit(self._file.write, place, room)
            for place, room in zip(piece.places, rooms, strict=True)
        ]
        self._taken += 1
        self._read_ahead()

    def finish(self) -> None:
        """Wait until all is written."""
        for number in list(self._writes):
            self._wait_for(number)

    def _wait_for(self, number: int) -> None:
        for write in self._writes.pop(number, ()):
            write.result()

    def close(self) -> None:
        self._threads.shutdown()
