"""Files of a build: append values, rename durably, verify checksums of blocks when they are read.

Errors name the file and its size. Every block of a split's tokens is compared with its checksum
when it is read for the first time.
"""

import contextlib
import fcntl
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash

from hpczero.errors import HpczeroError, InputError
from hpczero.safe_files import (
    create,
    free_bytes,
    open_for_writing,
    open_lock,
    proc_path,
    remove,
    rename,
    sync,
)

BLOCK = 1 << 16  # bytes of tokens that have a checksum: little more than a window is read for it
_BUFFER = 2**20  # bytes


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn a failed write (no space, no permission, quota) into an error with path and size."""
    try:
        yield
    except OSError as error:
        size = path.stat().st_size if path.is_file() else 0
        reason = f"{error.strerror or error}; {free_bytes(path.absolute())} bytes are free there"
        raise HpczeroError(
            f"{path} cannot be written ({size} bytes so far): {reason}; "
            "once that is mended, the same command goes on where it was"
        ) from error


@contextlib.contextmanager
def only_builder(work: Path, output: Path, warn: Callable[[str], None]) -> Iterator[None]:
    """Hold the work folder's lock; the kernel frees it when its holder ends, however it ends."""
    path = work / "lock"
    with writing(path):
        file = os.fdopen(open_lock(path), "wb")
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError(
                f"another process is building {output} (it holds {path}): "
                "wait for it, or choose another output"
            ) from None
        except OSError as error:  # some parallel file systems are mounted without locks
            warn(
                f"WARN {path} cannot be locked ({error.strerror}): "
                f"nothing keeps a second builder of {output} away"
            )
        # A builder that ended between our open and our lock has removed this file.
        if not path.exists() or not os.path.samestat(os.fstat(file.fileno()), path.stat()):
            raise InputError(f"another process has just built {output}")
        yield


class RawFile:
    """An array on disk that grows at its end; `length` counts its values."""

    def __init__(self, path: Path, dtype: np.dtype, length: int, file: int | None = None) -> None:
        """Continue after the first `length` values; the file is truncated there.

        `file`: descriptor of an empty file without a name; `path` is then its folder, for messages.
        """
        self.path = path
        self.dtype = dtype
        self.length = length
        self._shown_path = path
        self._pending = bytearray()
        with writing(path):
            if file is None:
                if not length:
                    remove(path)
                file = open_for_writing(path) if length else create(path)
            else:
                self.path = proc_path(file)
            self._file = os.fdopen(file, "wb", buffering=0)
            self._file.truncate(length * dtype.itemsize)
            self._file.seek(0, os.SEEK_END)

    def append(self, values: np.ndarray) -> None:
        self._pending += values.astype(self.dtype).tobytes()
        self.length += len(values)
        if len(self._pending) >= _BUFFER:
            self._flush()

    def commit(self) -> None:
        """Write everything to the disk."""
        self._flush()
        with writing(self._shown_path):
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file; values that were not committed may be lost."""
        self._file.close()

    def _flush(self) -> None:
        left = memoryview(self._pending)
        with writing(self._shown_path):
            while left:
                left = left[self._file.write(left) :]
        self._pending = bytearray()


def replace_file(temporary: Path, final: Path) -> None:
    """Rename the finished file durably: after a power failure there is all of it or none."""
    with writing(final):
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        rename(temporary, final)
        sync(final.parent)


# Blocks of tokens in a token file, and their checksums.


def checksum(block: bytes) -> int:
    return xxhash.xxh3_64_intdigest(block)


def blocks_of(size: int) -> int:
    """Return the number of blocks in so many bytes; the last one may be shorter."""
    return -(-size // BLOCK)


@dataclass(frozen=True)
class VerifiedBlocks:
    """Consecutive blocks, and a line for each that is damaged."""

    content: bytes
    damaged: list[str]


class Blocks:
    """Tokens of a split, verified when read, by any number of threads.

    `checksums`: of each block; None: the file has none, and nothing is verified. Reads do not go
    through mapped memory, which raises SIGBUS when somebody truncates the file meanwhile.
    """

    def __init__(self, path: Path, split: str, tokens: np.ndarray, checksums: np.ndarray | None):
        assert isinstance(tokens, np.memmap) or not len(tokens), type(tokens)
        self._path = path
        self._split = split
        self._tokens = tokens
        self._checksums = checksums
        self._offset = tokens.offset if isinstance(tokens, np.memmap) else 0
        self._file = open(path, "rb", buffering=0)  # noqa: SIM115 (closed by `close`)
        self._good = np.zeros(blocks_of(tokens.nbytes), bool)

    def read(self, start: int, stop: int) -> np.ndarray:
        """Return tokens start .. stop - 1; InputError if they are damaged."""
        width = self._tokens.itemsize
        begin, end = start * width, stop * width
        first, last = begin // BLOCK, blocks_of(end)
        if self._checksums is None or self._good[first:last].all():
            return np.frombuffer(self._bytes(begin, end), self._tokens.dtype)
        blocks = self._bytes(first * BLOCK, min(last * BLOCK, self._tokens.nbytes))
        for number in range(first, last):
            at = (number - first) * BLOCK
            if not self._good[number] and self._differs(number, blocks[at : at + BLOCK]):
                raise InputError(
                    f"{self._path} is damaged: {self.place_of(number)}: build or copy it again "
                    "(`hpczero data verify` finds all that is damaged)"
                )
            self._good[number] = True
        wanted = memoryview(blocks)[begin - first * BLOCK : end - first * BLOCK]
        return np.frombuffer(wanted, self._tokens.dtype)

    def verify(self, together: int) -> Iterator[VerifiedBlocks]:
        """Yield all blocks in order, so many together, each verified."""
        size = self._tokens.nbytes
        for first in range(0, blocks_of(size), together):
            begin = first * BLOCK
            content = self._bytes(begin, min(begin + together * BLOCK, size))
            wrong = []
            for number in range(first, first + blocks_of(len(content))):
                at = (number - first) * BLOCK
                if self._checksums is not None and self._differs(number, content[at : at + BLOCK]):
                    wrong.append(self.place_of(number))
            yield VerifiedBlocks(content, wrong)

    def place_of(self, number: int) -> str:
        size = self._tokens.nbytes
        width = self._tokens.itemsize
        begin, end = number * BLOCK, min((number + 1) * BLOCK, size)
        tokens = f"{self._split} tokens {begin // width:,} to {end // width - 1:,}"
        place = f"bytes {self._offset + begin} to {self._offset + end - 1}"
        return f"{tokens}, {place}, are not as written"

    def close(self) -> None:
        self._file.close()

    def _differs(self, number: int, block: bytes) -> bool:
        assert self._checksums is not None
        return checksum(block) != int(self._checksums[number])

    def _bytes(self, begin: int, end: int) -> bytes:
        first = self._offset + begin
        size = end - begin
        read = os.pread(self._file.fileno(), size, first)
        if len(read) < size:
            raise InputError(
                f"{self._path} was cut short while it was in use: "
                f"it ends before byte {first + size}; build or copy it again"
            )
        return read
