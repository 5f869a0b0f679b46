"""Finding the files of a corpus and cutting them into documents, sections and tokens.

A *document* is a whole .txt, .md or .py file, or the "text" (or another field) of a line of a
.jsonl file. Each file may be compressed by gzip; positions then count uncompressed bytes.

A document longer than 256 KiB is read in *sections* of about 64 KiB that end with a line. So a
large file is streamed, has a share in both splits, and can be resumed inside: reading from a
section's `resume` gives the sections that follow it.
"""

import glob
import gzip
import io
import json
import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, cast

import numpy as np

from hpczero.errors import InputError
from hpczero.text import printable

SUFFIXES = (".txt", ".md", ".py", ".jsonl")  # also compressed: .txt.gz
FIELD = "text"  # of a line of .jsonl
LONG_DOCUMENT = 256 * 1024
_SECTION = 64 * 1024
_LONGEST_LINE = 2**30
_BYTE_ORDER_MARK = "\ufeff"


@dataclass(frozen=True)
class Input:
    """A file to read. `name` is its path relative to the folder that the user gave."""

    path: Path
    name: str
    size: int
    changed: int  # modification time, nanoseconds


@dataclass(frozen=True)
class Section:
    text: str
    ends_document: bool
    resume: int | None  # byte of the file where the next one begins; None inside a line of .jsonl
    damaged: bool = False  # was not UTF-8; undecodable bytes are now U+FFFD


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
                    f"hpczero reads {' '.join(SUFFIXES)}, also as .gz"
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
    """Return ".txt" for a.txt and for a.txt.gz."""
    return (path.with_suffix("") if _is_compressed(path) else path).suffix.lower()


def open_text(source: Input) -> BinaryIO:
    """Open the file, uncompressed.

    OSError or EOFError, now or when it is read, if it is not in the format that its name says.
    """
    if _is_compressed(source.path):
        return cast(BinaryIO, gzip.open(source.path, "rb"))
    return open(source.path, "rb")


def _is_compressed(path: Path) -> bool:
    return path.suffix.lower() == ".gz"


def sections(
    source: Input, file: BinaryIO, start: int = 0, field: str = FIELD
) -> Iterator[Section]:
    """Yield the sections from byte `start` of the file; InputError for a bad line of .jsonl."""
    if kind(source.path) == ".jsonl":
        file.seek(start)
        return _lines(source, file, field)
    size = source.size
    if _is_compressed(source.path):  # `_cut` asks only if the document is long
        file.seek(0)
        size = len(file.read(LONG_DOCUMENT + 1))
    file.seek(start)
    return _cut(file, size, start)


def _cut(file: BinaryIO, size: int, start: int = 0) -> Iterator[Section]:
    """Cut a document of `size` bytes, from byte `start` on; an empty one has no section."""
    is_short = size <= LONG_DOCUMENT
    position = start
    following = file.read(LONG_DOCUMENT if is_short else _SECTION)
    while following:
        piece = following if is_short else _to_line_end(following, file)
        following = file.read(_SECTION)
        text, damaged = _decode(piece)
        if position == 0:
            text = text.removeprefix(_BYTE_ORDER_MARK)
        position += len(piece)
        yield Section(text, ends_document=not following, resume=position, damaged=damaged)


def _to_line_end(piece: bytes, file: BinaryIO) -> bytes:
    """Extend `piece` to the end of its last line, or of its last character if that line is long."""
    if not piece.endswith(b"\n"):
        piece += file.readline(LONG_DOCUMENT - _SECTION)
    if not piece.endswith(b"\n"):
        # A character continues with at most three bytes of the form 10xxxxxx.
        following = file.read(3)
        starts = (index for index, byte in enumerate(following) if byte & 0xC0 != 0x80)
        end = next(starts, len(following))
        file.seek(end - len(following), os.SEEK_CUR)
        piece += following[:end]
    return piece


def _lines(source: Input, file: BinaryIO, field: str) -> Iterator[Section]:
    """Yield the documents of a .jsonl file from its position on; an empty line is skipped."""
    after = file.tell()
    while line := file.readline(_LONGEST_LINE):
        before = after
        after += len(line)
        if not line.strip():
            continue
        try:
            content, damaged = _content(line, field)
        except (ValueError, RecursionError) as error:
            raise InputError(f"{source.path}:{_line_number(file, before)}: {error}") from error
        for section in _cut(io.BytesIO(content), len(content)):
            resume = after if section.ends_document else None
            yield Section(section.text, section.ends_document, resume, damaged)


def _content(line: bytes, field: str) -> tuple[bytes, bool]:
    """Return the field of a line of .jsonl, and True if bytes of it were not text.

    ValueError tells what is wrong with the line.
    """
    if len(line) == _LONGEST_LINE:
        raise ValueError(f"the line is longer than {_LONGEST_LINE} bytes")
    decoded, damaged = _decode(line)
    try:
        record = json.loads(decoded.removeprefix(_BYTE_ORDER_MARK))
    except ValueError as error:
        raise ValueError(f"the line is not JSON ({error})") from error
    if not isinstance(record, dict) or not isinstance(record.get(field), str):
        has = f"is a {type(record).__name__}"
        if isinstance(record, dict):
            keys = ", ".join(printable(key, 60) for key in sorted(record)[:8])
            has = f"has the keys {keys or '(none)'}"
        raise ValueError(
            f'every line must be an object with a string "{field}"; '
            f"this one {has} (--field names another)"
        )
    text = str(record[field])
    content = text.encode("utf-8", errors="replace")  # "\ud800" alone is no character
    return content, damaged or len(content) != len(text.encode("utf-8", errors="surrogatepass"))


def _line_number(file: BinaryIO, position: int) -> int:
    """Return the number, from 1, of the line that begins at byte `position`."""
    file.seek(0)
    number = 1
    while position > 0 and (block := file.read(min(position, _SECTION))):
        number += block.count(b"\n")
        position -= len(block)
    return number


def _decode(piece: bytes) -> tuple[str, bool]:
    try:
        return piece.decode("utf-8"), False
    except UnicodeDecodeError:
        return piece.decode("utf-8", errors="replace"), True


def token_dtype(vocabulary: int) -> np.dtype:
    """Return the smallest unsigned integer type (little-endian) that holds every id."""
    for code in ("<u1", "<u2", "<u4"):
        if vocabulary <= 2 ** (8 * np.dtype(code).itemsize):
            return np.dtype(code)
    raise InputError(f"a vocabulary of {vocabulary} ids is more than a token file holds (2**32)")
