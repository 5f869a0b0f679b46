"""Files that are being written: values appended to a raw file, a finished file put in its place; errors say where and how much."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from hpczero.errors import HpczeroError
from hpczero.safe_files import create, open_for_writing, place_of, remove, rename, sync

_BUFFER = 2**20  # bytes


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turns a failure to write (no room, no right, quota) into an error that names the file and what it holds so far."""
    try:
        yield
    except OSError as error:
        held = path.stat().st_size if path.is_file() else 0
        reason = f"{error.strerror or error}; {_free(path)} bytes are free there"
        raise HpczeroError(
            f"{path} cannot be written ({held} bytes so far): {reason}; once that is mended, the same command goes on where it was"
        ) from error


def _free(path: Path) -> int:
    folder = next((folder for folder in path.absolute().parents if folder.is_dir()), Path("/"))
    state = os.statvfs(folder)
    return state.f_bavail * state.f_frsize


class RawFile:
    """An array on disk that grows at its end, and nothing else; `length` counts its values."""

    def __init__(self, path: Path, dtype: np.dtype, length: int, file: int | None = None) -> None:
        """Goes on after the first `length` values; what follows them is cut off.

        `file`: an empty one that is open already, and `path` is where its room comes from.
        """
        self.path, self.dtype, self.length = path, dtype, length
        self._where = path
        self._pending = bytearray()
        with writing(path):
            if file is None:
                if not length:
                    remove(path)
                file = open_for_writing(path) if length else create(path)
            else:
                self.path = place_of(file)
            self._file = os.fdopen(file, "wb", buffering=0)
            self._file.truncate(length * dtype.itemsize)
            self._file.seek(0, os.SEEK_END)

    def append(self, values: np.ndarray) -> None:
        self._pending += values.astype(self.dtype).tobytes()
        self.length += len(values)
        if len(self._pending) >= _BUFFER:
            self._flush()

    def commit(self) -> None:
        """On return, everything is on the disk."""
        self._flush()
        with writing(self._where):
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """What was not committed may be lost."""
        self._file.close()

    def _flush(self) -> None:
        left = memoryview(self._pending)
        with writing(self._where):
            while left:
                left = left[self._file.write(left) :]
        self._pending = bytearray()


def replace_file(temporary: Path, final: Path) -> None:
    """Puts the finished file in its place, so that even after a power failure there is all of it or none."""
    with writing(final):
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        rename(temporary, final)
        sync(final.parent)
