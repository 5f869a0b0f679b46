"""Documents in the windows that a run reads: `data.documents`.

packed   windows of seq_len + 1 tokens, one after the other, over the ends of documents
masked   the same windows; a document's tokens count their positions from its beginning, see
         nothing of others, and its last token has no target
padded   a window is a document or a piece of it: of a document of n tokens, the n - 1 targets are
         cut into pieces of seq_len; what is left of the last window has no targets
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hpczero.data.raw_files import Blocks
from hpczero.data.token_file import Split, TokenFile
from hpczero.errors import InputError

_TOGETHER = 4096  # documents of which the index knows the sum


@dataclass(frozen=True)
class Cut:
    """The documents of a window: where each begins but the first, and positions without target."""

    begins: Sequence[int]
    silent: Sequence[int]


def cut_after(tokens: np.ndarray, last: int) -> Cut:
    """Return the cut of a window of seq_len + 1 tokens in which documents end with token `last`."""
    ends = np.flatnonzero(tokens[:-1] == last)
    return Cut([begin for begin in (ends + 1).tolist() if begin < len(tokens) - 1], ends.tolist())


class Pieces:
    """The windows of "padded": pieces of the documents of a split.

    The file's index of documents is read once to count the pieces, and then where it is needed;
    reads do not go through mapped memory, which raises SIGBUS when somebody truncates the file.
    """

    def __init__(self, file: TokenFile, split: Split, name: str, seq_len: int) -> None:
        self._path = file.path
        self._name = name
        self._seq_len = seq_len
        self._documents = split.documents
        self._tokens = len(split.tokens)
        self._offset = split.ends.offset if isinstance(split.ends, np.memmap) else 0
        self._file = open(file.path, "rb", buffering=0)  # noqa: SIM115 (open as long as the run)
        sums = [0]
        self.targets = 0
        for first in range(0, self._documents, _TOGETHER):
            ends = self._ends(first)
            sums.append(sums[-1] + int(self._counts(ends).sum()))
            self.targets += int(ends[-1] - ends[0]) - (len(ends) - 1)
        self._before = np.array(sums)  # pieces before each group of documents

    def __len__(self) -> int:
        return int(self._before[-1])

    def __getitem__(self, number: int) -> tuple[int, int]:
        """Return the first token of a piece, and the one after its last target."""
        group = int(np.searchsorted(self._before, number, side="right")) - 1
        ends = self._ends(group * _TOGETHER)
        sums = np.cumsum(self._counts(ends))
        rest = number - int(self._before[group])
        document = int(np.searchsorted(sums, rest, side="right"))
        piece = rest - (int(sums[document - 1]) if document else 0)
        start = int(ends[document]) + piece * self._seq_len
        return start, min(start + self._seq_len + 1, int(ends[document + 1]))

    def _counts(self, ends: np.ndarray) -> np.ndarray:
        """Return the number of pieces of each document; one of a single token has no target."""
        return -(-(np.diff(ends) - 1) // self._seq_len)

    def _ends(self, first: int) -> np.ndarray:
        """Return where the documents first, first + 1, ... of a group begin, and the last ends."""
        size = 8 * (min(_TOGETHER, self._documents - first) + 1)
        read = os.pread(self._file.fileno(), size, self._offset + 8 * first)
        ends = np.frombuffer(read, "<i8") if len(read) == size else np.zeros(2, np.int64)
        if (ends[1:] <= ends[:-1]).any() or ends[0] < 0 or ends[-1] > self._tokens:
            raise InputError(
                f"{self._path} is damaged: the ends of its {self._name} documents do not grow: "
                "build or copy it again"
            )
        return ends


def read_piece(blocks: Blocks, piece: tuple[int, int], padding: int, out: np.ndarray) -> Cut:
    """Write a piece's tokens into `out`, filled up with a token; return the window's cut."""
    start, stop = piece
    out[: stop - start] = blocks.read(start, stop)
    out[stop - start :] = padding
    targets = stop - start - 1
    silent = range(targets, len(out) - 1)
    return Cut(silent[:1], silent)
