"""Files that are being written: values appended to a raw file, a finished file put in its place; errors say where and how much."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from hpczero.errors import HpczeroError

_BUFFER = 2**20  # bytes


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turns a failure to write (no room, no right, quota) into an error that names the file and what it holds so far."""
    try:
        yield
    except OSError as error:
        held = path.stat().st_size if path.is_file() else 0
        raise HpczeroError(f"{path} cannot be written ({held} bytes so far): {error.strerror or error}; {_room(path)}") from error


def _room(path: Path) -> str:
    folder = next((folder for folder in path.absolute().parents if folder.is_dir()), Path("/"))
    state = os.statvfs(folder)
    return f"{state.f_bavail * state.f_frsize} bytes are free there"


class RawFile:
    """An array on disk that grows at its end, and nothing else; `length` counts its values."""

    def __init__(self, path: Path, dtype: np.dtype, length: int) -> None:
        """Goes on after the first `length` values; what follows them is cut off."""
        self.path, self.dtype, self.length = path, dtype, length
        self._pending: list[np.ndarray] = []
        self._pending_bytes = 0
        with writing(path):
            self._file = open(path, "r+b" if length else "wb", buffering=0)  # noqa: SIM115 (closed by `close`)
            self._file.truncate(length * dtype.itemsize)
            self._file.seek(0, os.SEEK_END)

    def append(self, values: np.ndarray) -> None:
        self._pending.append(values.astype(self.dtype))
        self._pending_bytes += self._pending[-1].nbytes
        self.length += len(values)
        if self._pending_bytes >= _BUFFER:
            self._flush()

    def commit(self) -> None:
        """On return, everything is on the disk."""
        self._flush()
        with writing(self.path):
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """What was not committed may be lost."""
        self._file.close()

    def _flush(self) -> None:
        if not self._pending:
            return
        left = memoryview(np.concatenate(self._pending)).cast("B")
        with writing(self.path):
            while left:
                left = left[self._file.write(left) :]
        self._pending, self._pending_bytes = [], 0


def replace_file(temporary: Path, final: Path) -> None:
    """Puts the finished file in its place, so that even after a power failure there is all of it or none."""
    with writing(final):
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, final)
        folder = os.open(final.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
