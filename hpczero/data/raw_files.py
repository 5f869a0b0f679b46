"""Files that are being written: values appended to a raw file, a finished file put in its place; errors say where and how much."""

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash

from hpczero.errors import HpczeroError, InputError
from hpczero.safe_files import create, open_for_writing, place_of, remove, rename, sync

# The tokens of a split in their file, each block of them held against its checksum when it is read
# for the first time.
BLOCK = 1 << 16  # bytes of tokens that have a checksum: little more than a window is read for it


def checksum(block: bytes) -> int:
    return xxhash.xxh3_64_intdigest(block)


def blocks_of(size: int) -> int:
    """How many blocks so many bytes have; the last one may be shorter."""
    return -(-size // BLOCK)


@dataclass(frozen=True)
class Looked:
    """Blocks that follow each other, and what is wrong with them."""

    content: bytes
    damaged: list[str]


class Blocks:
    """`checksums`: of each block; None: the file has none, and is read as it is.

    What is read does not go through mapped memory: that of a file which somebody cuts short
    meanwhile ends the process without a word (SIGBUS). For any number of threads.
    """

    def __init__(self, path: Path, split: str, tokens: np.ndarray, checksums: np.ndarray | None):
        assert isinstance(tokens, np.memmap) or not len(tokens), type(tokens)
        self._path, self._split, self._tokens, self._checksums = path, split, tokens, checksums
        self._place = tokens.offset if isinstance(tokens, np.memmap) else 0
        self._file = open(path, "rb", buffering=0)  # noqa: SIM115 (as long as there is this)
        self._good = np.zeros(blocks_of(tokens.nbytes), bool)

    def read(self, start: int, stop: int) -> np.ndarray:
        """Tokens start .. stop - 1. InputError: they are not what was written."""
        width, size = self._tokens.itemsize, self._tokens.nbytes
        begin, end = start * width, stop * width
        first, last = begin // BLOCK, blocks_of(end)
        if self._checksums is None or self._good[first:last].all():
            return np.frombuffer(self._bytes(begin, end), self._tokens.dtype)
        whole = self._bytes(first * BLOCK, min(last * BLOCK, size))
        for number in range(first, last):
            at = (number - first) * BLOCK
            if not self._good[number] and self._differs(number, whole[at : at + BLOCK]):
                raise InputError(
                    f"{self._path} is damaged: {self.place_of(number)}: build or copy it again "
                    "(`hpczero data verify` finds all that is damaged)"
                )
            self._good[number] = True
        inside = memoryview(whole)[begin - first * BLOCK : end - first * BLOCK]
        return np.frombuffer(inside, self._tokens.dtype)

    def damaged(self, together: int) -> Iterator[Looked]:
        """All blocks in their order, so many together, with what is wrong with them."""
        size = self._tokens.nbytes
        for first in range(0, blocks_of(size), together):
            begin = first * BLOCK
            content = self._bytes(begin, min(begin + together * BLOCK, size))
            wrong = []
            for number in range(first, first + blocks_of(len(content))):
                at = (number - first) * BLOCK
                if self._checksums is not None and self._differs(number, content[at : at + BLOCK]):
                    wrong.append(self.place_of(number))
            yield Looked(content, wrong)

    def place_of(self, number: int) -> str:
        size, width = self._tokens.nbytes, self._tokens.itemsize
        begin, end = number * BLOCK, min((number + 1) * BLOCK, size)
        tokens = f"{self._split} tokens {begin // width:,} to {end // width - 1:,}"
        return (
            f"{tokens}, bytes {self._place + begin} to {self._place + end - 1}, are not as written"
        )

    def close(self) -> None:
        self._file.close()

    def _differs(self, number: int, block: bytes) -> bool:
        assert self._checksums is not None
        return checksum(block) != int(self._checksums[number])

    def _bytes(self, begin: int, end: int) -> bytes:
        first, size = self._place + begin, end - begin
        read = os.pread(self._file.fileno(), size, first)
        if len(read) < size:
            raise InputError(
                f"{self._path} was cut short while it was in use: "
                f"it ends before byte {first + size}; build or copy it again"
            )
        return read


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
