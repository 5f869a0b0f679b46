"""A file that HDF5 makes in memory, and that plain writes then bring to the disk: HDF5 that meets a full disk while it writes its structure may
end the process.
"""

import io
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import h5py

from hpczero import safe_files

_PAGE = 4096  # bytes


class Pages(io.RawIOBase):
    """The stretches of a file that were written. What lies between (data that has a place and no values yet) reads as zeros and takes no memory."""

    def __init__(self) -> None:
        self._pages: dict[int, bytearray] = {}
        self._place = self._size = 0

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._place = (
            offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._place, os.SEEK_END: self._size}[whence]
        )
        return self._place

    def tell(self) -> int:
        return self._place

    def truncate(self, size: int | None = None) -> int:
        self._size = self._place if size is None else size
        return self._size

    def write(self, data: Any) -> int:
        for inside, number, begin, end in self._parts(memoryview(data).cast("B")):
            self._pages.setdefault(number, bytearray(_PAGE))[begin:end] = inside
        self._size = max(self._size, self._place)
        return len(data)

    def readinto(self, room: Any) -> int:
        for inside, number, begin, end in self._parts(memoryview(room).cast("B")):
            inside[:] = (
                self._pages[number][begin:end] if number in self._pages else bytes(end - begin)
            )
        return len(room)

    def readable(self) -> bool:
        return True

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def save(self, path: Path) -> None:
        """A new file. OSError: it cannot be written; what is there of it is left."""
        file = safe_files.create(path)
        try:
            self.write_to(file)
        finally:
            os.close(file)

    def write_to(self, file: int, but: Sequence[tuple[int, int]] = ()) -> None:
        """Write what was written here; what lies between, and in the ranges `but`, stays as it is.

        OSError: it cannot be written.
        """
        for number, page in sorted(self._pages.items()):
            first = number * _PAGE
            for begin, end in _outside(first, first + _PAGE, sorted(but)):
                write_all(file, memoryview(page)[begin - first : end - first], begin)
        os.ftruncate(file, self._size)

    def _parts(self, data: memoryview) -> Iterator[tuple[memoryview, int, int, int]]:
        """From the place on: a part of the data, the page that it belongs to, where in that."""
        while data:
            number, begin = divmod(self._place, _PAGE)
            end = min(_PAGE, begin + len(data))
            yield data[: end - begin], number, begin, end
            data, self._place = data[end - begin :], self._place + end - begin


@contextmanager
def made_in_memory(path: Path, **arguments: Any) -> Iterator[h5py.File]:
    """An HDF5 file that is at this path, which is new, once all inside was done."""
    pages = Pages()
    with h5py.File(pages, "w", libver=("earliest", "v110"), **arguments) as file:
        yield file
    pages.save(path)


def _outside(begin: int, end: int, ranges: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """The parts of begin .. end that are in none of the ranges."""
    for low, high in ranges:
        if low < end and high > begin:
            if begin < low:
                yield begin, low
            begin = max(begin, high)
    if begin < end:
        yield begin, end


def write_all(file: int, data: memoryview, place: int) -> None:
    while data:
        written = os.pwrite(file, data, place)
        data, place = data[written:], place + written
