"""Measured disk: what one rank of a node writes to a folder and reads again, past the page cache.

The file has no name and disappears with its process. It is written until the time or the room that
it may take is used up, and flushed to the disk before the clock is read.
"""

import mmap
import os
import time
from contextlib import suppress
from pathlib import Path

from hpczero import machine, safe_files
from hpczero.calibrate.findings import DiskRates
from hpczero.errors import InputError, escaped

_PIECE = 8 << 20  # bytes that are written at a time
_LARGEST = 1 << 30


def check(folder: Path) -> None:
    """Refuse a folder that is missing or takes no file (InputError)."""
    try:
        os.close(safe_files.create_for_scratch(folder, mmap.PAGESIZE))
    except OSError as error:
        raise InputError(
            f"--folder {escaped(str(folder))}: no file can be written there: {error.strerror}; "
            "name a folder of the file system where runs are to lie"
        ) from error


def file_system(folder: Path) -> str:
    """Return the type of the folder's file system, as in "ext4"."""
    return machine.file_system_type(folder) or "unknown file system"


def measure(folder: Path, seconds: float) -> DiskRates | None:
    """Write for half of the time and read what was written; None if there is no room."""
    try:
        room = min(_LARGEST, safe_files.free_bytes(folder) // 4) // _PIECE * _PIECE
        if not room:
            return None
        file = safe_files.create_for_scratch(folder, room)
        try:
            return _measure(file, room, seconds / 2)
        finally:
            os.close(file)
    except OSError as error:
        raise InputError(f"--folder {escaped(str(folder))}: {error.strerror}") from error


def _measure(file: int, room: int, seconds: float) -> DiskRates:
    past_cache = safe_files.open_past_cache(file)
    piece = memoryview(mmap.mmap(-1, _PIECE))
    piece[:] = os.urandom(mmap.PAGESIZE) * (_PIECE // mmap.PAGESIZE)  # some disks compress
    if past_cache is not None:
        try:
            safe_files.write_at(past_cache, piece, 0)
        except OSError:  # some file systems take the flag, and fail then
            os.close(past_cache)
            past_cache = None
    descriptor = file if past_cache is None else past_cache
    try:
        began = time.perf_counter()
        written = 0
        while written < room and (not written or time.perf_counter() - began < seconds):
            safe_files.write_at(descriptor, piece, written)
            written += _PIECE
        os.fsync(file)
        write = written / (time.perf_counter() - began)
        with suppress(OSError):
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        began = time.perf_counter()
        read = 0
        while read < written and (not read or time.perf_counter() - began < seconds):
            read += safe_files.read_at(descriptor, piece, read)
        return DiskRates(
            write, read / (time.perf_counter() - began), past_cache is not None, written
        )
    finally:
        if past_cache is not None:
            os.close(past_cache)
