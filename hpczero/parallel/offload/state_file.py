"""Model states in a file: for numbers that are needed once a step, memory is a waste.

Each rank has one file, without a name: whatever ends its process, nothing is left to clean. It is
mapped, so that a unit's master weights and moments are tensors as they ever are to all who rarely
use them (initial values, checkpoints): the kernel brings their pages and takes them away.

The step, which uses all of them, reads and writes the file itself, past the page cache where the
file system can (`stream`). So do copies for checkpoints (`copy_of`): a device that fails under the
map would end the process with a signal. All ways see the same bytes, if they are taken in turns.
"""

import mmap
import os
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from hpczero import safe_files
from hpczero.errors import HpczeroError
from hpczero.parallel.states import PAGE
from hpczero.text import format_bytes


class StorageFailed(HpczeroError):
    """The storage of states could not be read or written: this run cannot go on."""


class StateFile:
    """A file with one block for each kind of states."""

    def __init__(self, folder: Path, sizes: Mapping[str, int]) -> None:
        """StorageFailed: there is no room for so many bytes."""
        self.folder = folder
        self.size = sum(sizes.values())
        self.bytes_read = self.bytes_written = 0  # by `read` and `write`
        self._counts = threading.Lock()
        try:
            safe_files.make_own_folder(folder, 0o700)
            self._file = safe_files.create_for_scratch(folder, self.size)
        except OSError as error:
            free = ""
            with suppress(OSError):
                free = f", and {format_bytes(safe_files.free_bytes(folder))} are free there"
            raise StorageFailed(
                f"zero.offload: {folder} does not take the {format_bytes(self.size)} of this rank's"
                f" states: {error.strerror}{free}; free some, or name another folder"
            ) from error
        self._direct = self._past_cache()
        self._map = mmap.mmap(self._file, self.size)
        whole = torch.frombuffer(self._map, dtype=torch.uint8)
        self._address = whole.data_ptr()
        blocks = whole.split(list(sizes.values()))
        self.blocks: dict[str, Tensor] = dict(zip(sizes, blocks, strict=True))

    def _past_cache(self) -> int | None:
        """Open the file once more for direct I/O; None where reading so fails, or that itself."""
        direct = safe_files.open_past_cache(self._file)
        if direct is not None:
            try:
                safe_files.read_at(direct, memoryview(mmap.mmap(-1, PAGE)), 0)
            except OSError:  # some file systems take the flag, and fail then
                os.close(direct)
                return None
        return direct

    @property
    def is_direct(self) -> bool:
        """True if reads and writes go past the page cache."""
        return self._direct is not None

    def place_of(self, tensor: Tensor) -> int:
        """Return the byte of the file at which a tensor in one of its blocks begins."""
        return tensor.data_ptr() - self._address

    def holds(self, tensor: Tensor) -> bool:
        """Return True for a tensor in one of its blocks."""
        return tensor.device.type == "cpu" and 0 <= self.place_of(tensor) < self.size

    def copy_of(self, tensor: Tensor) -> Tensor:
        """Return a copy of a tensor in one of its blocks."""
        copy = torch.empty_like(tensor)
        place = self.place_of(tensor)
        self._fill(self._file, place, copy.view(torch.uint8).numpy().data)
        self._let_cache_go(place, copy.nbytes)
        return copy

    def read(self, place: int, room: memoryview) -> None:
        """Fill `room`; it, and the place in the file, are whole pages."""
        self._fill(self._descriptor, place, room)
        with self._counts:
            self.bytes_read += len(room)

    def _fill(self, descriptor: int, place: int, room: memoryview) -> None:
        try:
            count = safe_files.read_at(descriptor, room, place)
            if count < len(room):
                raise OSError(0, f"it ends at byte {place + count:,}")
        except OSError as error:
            raise self._failed("read", place, len(room), error) from error

    def write(self, place: int, content: memoryview) -> None:
        try:
            safe_files.write_at(self._descriptor, content, place)
        except OSError as error:
            raise self._failed("written", place, len(content), error) from error
        with self._counts:
            self.bytes_written += len(content)

    @property
    def _descriptor(self) -> int:
        return self._file if self._direct is None else self._direct

    def _failed(self, what: str, place: int, size: int, error: OSError) -> StorageFailed:
        return StorageFailed(
            f"zero.offload: {size:,} bytes at {place:,} of this rank's states in {self.folder}"
            f" could not be {what}: {error.strerror}. The states are lost; the"
            " checkpoints are what they were: resume from the newest, with another folder, or"
            " without zero.offload"
        )

    def let_pages_go(self) -> None:
        """Give back the memory of pages that were used through the map; their content stays."""
        self._map.madvise(mmap.MADV_DONTNEED)
        self._let_cache_go(0, self.size)

    def _let_cache_go(self, place: int, size: int) -> None:
        """Empty the page cache, if the step does not go through it: a small cgroup stays so."""
        if self.is_direct:
            os.posix_fadvise(self._file, place, size, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        """Close the file; its room is free again once no tensor of it is left."""
        for descriptor in (self._direct, self._file):
            if descriptor is not None:
                os.close(descriptor)
