"""Finding the files of a corpus, and what is read of them.

A *document* is a whole .txt, .md or .py file, or the "text" (or another field) of a line of a
.jsonl file or a row of a table (.parquet, .arrow). Text and lines may be compressed.
"""

import glob
import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from hpczero.errors import InputError

TABLES = (".parquet", ".arrow")
COMPRESSIONS = (".gz", ".zst")  # of the others: .txt.gz
SUFFIXES = (".txt", ".md", ".py", ".jsonl", *TABLES)
FIELD = "text"  # of a line or row
MOST_BYTES = 64 * 2**20  # of a line or row


@dataclass(frozen=True)
class Input:
    """A file to read. `name` is its path relative to the folder that the user gave."""

    path: Path
    name: str
    size: int
    changed: int  # modification time, nanoseconds


@dataclass(frozen=True)
class Place:
    """A place in a file: the uncompressed bytes, or the rows, and the lines or rows before it."""

    position: int = 0
    number: int = 0


@dataclass(frozen=True)
class Record:
    """A piece of a text, a line of .jsonl, or the value of a table's row.

    `problem` says why the content is not there. A build is resumed behind any record.
    """

    form: Literal["piece", "line", "row"]
    content: bytes | None
    after: Place
    read: int  # bytes of the file as it lies on the disk
    ends_document: bool = True
    is_first: bool = False  # piece of a text
    problem: str = ""


@dataclass(frozen=True)
class InputPart:
    """A record of an input, or the input's end."""

    source: Input
    record: Record | None = None
    unreadable: str = ""  # why the input could not be opened


@dataclass
class Corpus:
    inputs: list[Input] = field(default_factory=list)
    unreadable: list[Path] = field(default_factory=list)
    others: int = 0  # files of other kinds inside the folders, left out
    _seen: set[tuple[int, int]] = field(default_factory=set)  # (device, inode)

    def first_time(self, status: os.stat_result) -> bool:
        """Return False for a file or folder that came before: links may run in circles."""
        identity = (status.st_dev, status.st_ino)
        new = identity not in self._seen
        self._seen.add(identity)
        return new


def find(paths: Sequence[str], leave_out: frozenset[str] = frozenset()) -> Corpus:
    """Find the files under `paths` (files, folders, globs) in the order given, sorted inside each.

    Hidden files and folders inside folders are skipped, as are folders named in `leave_out`.
    """
    corpus = Corpus()
    for given in paths:
        matches = [given] if os.path.lexists(given) else sorted(glob.glob(given, recursive=True))
        if not matches:
            raise InputError(
                f"{given}: no such file or folder, and nothing matches it as a pattern"
            )
        for match in map(Path, matches):
            if match.is_dir():
                _walk(match, "", leave_out, corpus)
            elif kind(match) in SUFFIXES:
                _add(match, match.name, corpus)
            elif len(matches) == 1:
                raise InputError(
                    f"{match}: files of this kind are not read; "
                    f"hpczero reads {' '.join(SUFFIXES)}, text and lines also as .gz and .zst"
                )
            else:
                corpus.others += 1
    if not corpus.inputs:
        left = f"{corpus.others} files of other kinds, {len(corpus.unreadable)} that cannot be read"
        raise InputError(
            f"nothing to read in {', '.join(paths)}: no {' '.join(SUFFIXES)} files ({left})"
        )
    return corpus


def _walk(folder: Path, name: str, leave_out: frozenset[str], corpus: Corpus) -> None:
    """Add the folder's files, then the content of its folders, each sorted by name."""
    try:
        if not corpus.first_time(folder.stat()):
            return
        visible = [entry for entry in folder.iterdir() if not entry.name.startswith(".")]
        entries = [(entry, entry.is_dir()) for entry in sorted(visible, key=os.fsencode)]
    except OSError:
        corpus.unreadable.append(folder)
        return
    for entry in (entry for entry, is_folder in entries if not is_folder):
        if kind(entry) in SUFFIXES:
            _add(entry, name + entry.name, corpus)
        else:
            corpus.others += 1
    for entry in (entry for entry, is_folder in entries if is_folder):
        if entry.name not in leave_out:
            _walk(entry, f"{name}{entry.name}/", leave_out, corpus)


def _add(path: Path, name: str, corpus: Corpus) -> None:
    try:
        status = path.stat()
    except OSError:
        corpus.unreadable.append(path)
        return
    if not stat.S_ISREG(status.st_mode):
        corpus.others += 1
    elif corpus.first_time(status):
        corpus.inputs.append(Input(path, name, status.st_size, status.st_mtime_ns))


def kind(path: Path) -> str:
    """Return ".txt" for a.txt and for a.txt.gz; "" for a table that is compressed once more."""
    if not compression(path):
        return path.suffix.lower()
    inner = path.with_suffix("").suffix.lower()
    return "" if inner in TABLES else inner


def compression(path: Path) -> str:
    """Return ".gz" or ".zst", or "" for a file that is neither."""
    suffix = path.suffix.lower()
    return suffix if suffix in COMPRESSIONS else ""
