"""HDF5 files as images: made in memory, then brought to the disk by plain writes.

The HDF5 library may end the process when the disk fills up while it writes a file's structure.
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


class ImagePages(io.RawIOBase):
    """An image of a file, which keeps only the pages that were written.

    What lies between (data that has a place and no values yet) reads as zeros and takes no memory.
    """

    def __init__(self) -> None:
        self._pages: dict[int, bytearray] = {}
        self._position = self._size = 0

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        origins = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size}
        self._position = offset + origins[whence]
        return self._position

    def tell(self) -> int:
        return self._position

    def truncate(self, size: int | None = None) -> int:
        self._size = self._position if size is None else size
        return self._size

    def write(self, data: Any) -> int:
        for part, number, begin, end in self._parts(memoryview(data).cast("B")):
            self._pages.setdefault(number, bytearray(_PAGE))[begin:end] = part
        self._size = max(self._size, self._position)
        return len(data)

    def readinto(self, room: Any) -> int:
        for part, number, begin, end in self._parts(memoryview(room).cast("B")):
            page = self._pages.get(number)
            part[:] = page[begin:end] if page else bytes(end - begin)
        return len(room)

    def readable(self) -> bool:
        return True

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def save(self, path: Path) -> None:
        """Write a new file. OSError: it cannot be written; what is there of it is left."""
        file = safe_files.create(path)
        try:
            self.write_to(file)
        finally:
            os.close(file)

    def write_to(self, file: int, but: Sequence[tuple[int, int]] = ()) -> None:
        """Write the pages to a file; what lies between, and in the ranges `but`, stays as it is.

        OSError: it cannot be written.
        """
        for number, page in sorted(self._pages.items()):
            first = number * _PAGE
            for begin, end in _outside(first, first + _PAGE, sorted(but)):
                write_all(file, memoryview(page)[begin - first : end - first], begin)
        os.ftruncate(file, self._size)

    def _parts(self, data: memoryview) -> Iterator[tuple[memoryview, int, int, int]]:
        """Yield parts of the data, each with the page that it belongs to and begin and end there.

        The position moves to the end of the data.
        """
        while data:
            number, begin = divmod(self._position, _PAGE)
            end = min(_PAGE, begin + len(data))
            yield data[: end - begin], number, begin, end
            data = data[end - begin :]
            self._position += end - begin


@contextmanager
def hdf5_image(path: Path, **arguments: Any) -> Iterator[h5py.File]:
    """Give an HDF5 file to fill; it is at this path, which must be new, after the block."""
    pages = ImagePages()
    with h5py.File(pages, "w", libver=("earliest", "v110"), **arguments) as file:
        yield file
    pages.save(path)


def _outside(begin: int, end: int, ranges: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Yield the parts of begin .. end that are in none of the ranges."""
    for low, high in ranges:
        if low < end and high > begin:
            if begin < low:
                yield begin, low
            begin = max(begin, high)
    if begin < end:
        yield begin, end


def write_all(file: int, data: memoryview, offset: int) -> None:
    while data:
        written = os.pwrite(file, data, offset)
        data, offset = data[written:], offset + written
