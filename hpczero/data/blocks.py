"""The tokens of a split in their file, each block of them held against its checksum when it is read
for the first time.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash

from hpczero.errors import InputError

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
        return f"{tokens}, bytes {self._place + begin} to {self._place + end - 1}, are not as written"

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
