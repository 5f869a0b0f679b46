"""From paths to text: which files a corpus is made of, and how each is cut into documents and sections.

A *document* is a whole .txt, .md or .py file, or the "text" (or another field) of a line of a .jsonl file; each may be compressed
by gzip, and its bytes are then counted as they are without. A document longer than 256 KiB is read in
*sections* of about 64 KiB that end with a line, so that one large file is streamed, has a part in either split, and can be
resumed inside. The position after a section is its `resume`: reading from there gives the sections that follow.
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
from typing import BinaryIO, Protocol, cast

import numpy as np

from hpczero.errors import InputError
from hpczero.text import printable


# How text becomes tokens. Today: bytes. Others have their place in `tokenizer` below.
class Tokenizer(Protocol):
    """Encodes text piece by piece: a long document comes in several, each ending with a line, and no token spans two of them."""

    name: str
    vocabulary: int  # ids are 0 .. vocabulary - 1
    end_of_document: int

    def encode(self, text: str) -> np.ndarray: ...


class ByteTokenizer:
    """Ids 0–255 are the bytes of the text in UTF-8, 256 ends a document."""

    name = "byte"
    vocabulary = 257
    end_of_document = 256

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode("utf-8", errors="replace"), dtype=np.uint8)


_TOKENIZERS = {"byte": ByteTokenizer}


def tokenizer(name: str) -> Tokenizer:
    if name not in _TOKENIZERS:
        raise InputError(f"there is no tokenizer '{name}'; there is: {', '.join(_TOKENIZERS)}")
    return _TOKENIZERS[name]()


def token_dtype(vocabulary: int) -> np.dtype:
    """The smallest unsigned integer (little-endian) that holds every id."""
    for code in ("<u1", "<u2", "<u4"):
        if vocabulary <= 2 ** (8 * np.dtype(code).itemsize):
            return np.dtype(code)
    raise InputError(f"a vocabulary of {vocabulary} ids is more than a token file holds (2**32)")


SUFFIXES = (".txt", ".md", ".py", ".jsonl")  # also compressed: .txt.gz
FIELD = "text"  # of a line of .jsonl
LONG_DOCUMENT = 256 * 1024
_SECTION = 64 * 1024
_LONGEST_LINE = 2**30
_BYTE_ORDER_MARK = "\ufeff"


@dataclass(frozen=True)
class Input:
    """A file to read. `name` is its place under the path that was given: it does not depend on where the corpus lies."""

    path: Path
    name: str
    size: int
    changed: int  # modification time, nanoseconds


@dataclass(frozen=True)
class Section:
    text: str
    ends_document: bool
    resume: (
        int | None
    )  # byte of the file to go on from; None inside a line of .jsonl, where one cannot
    damaged: bool = False  # was not UTF-8; what did not decode is now U+FFFD


@dataclass
class FoundText:
    inputs: list[Input] = field(default_factory=list)
    unreadable: list[Path] = field(default_factory=list)
    others: int = 0  # files of other kinds inside the folders, left out
    _seen: set[tuple[int, int]] = field(
        default_factory=set
    )  # (device, inode): each file and folder once; links may run in circles

    def first_time(self, status: os.stat_result) -> bool:
        identity = (status.st_dev, status.st_ino)
        new = identity not in self._seen
        self._seen.add(identity)
        return new


def find(paths: Sequence[str], leave_out: frozenset[str] = frozenset()) -> FoundText:
    """The files under `paths` (files, folders, globs) in the order given, sorted inside each.

    Hidden files and folders inside folders are left out, and so are folders with a name in `leave_out`.
    """
    found = FoundText()
    for given in paths:
        matches = [given] if os.path.lexists(given) else sorted(glob.glob(given, recursive=True))
        if not matches:
            raise InputError(
                f"{given}: no such file or folder, and nothing matches it as a pattern"
            )
        for match in map(Path, matches):
            if match.is_dir():
                _walk(match, "", leave_out, found)
            elif kind(match) in SUFFIXES:
                _add(match, match.name, found)
            elif len(matches) == 1:
                raise InputError(
                    f"{match}: files of this kind are not read; hpczero reads {' '.join(SUFFIXES)}, also as .gz"
                )
            else:
                found.others += 1
    if not found.inputs:
        left = f"{found.others} files of other kinds, {len(found.unreadable)} that cannot be read"
        raise InputError(
            f"nothing to read in {', '.join(paths)}: no {' '.join(SUFFIXES)} files ({left})"
        )
    return found


def _walk(folder: Path, name: str, leave_out: frozenset[str], found: FoundText) -> None:
    """Adds the folder's files, then what is in its folders, each sorted by name."""
    try:
        if not found.first_time(folder.stat()):
            return
        entries = sorted(
            (entry for entry in folder.iterdir() if not entry.name.startswith(".")), key=os.fsencode
        )
        kinds = [(entry, entry.is_dir()) for entry in entries]
    except OSError:
        found.unreadable.append(folder)
        return
    for entry in (entry for entry, is_folder in kinds if not is_folder):
        if kind(entry) in SUFFIXES:
            _add(entry, name + entry.name, found)
        else:
            found.others += 1
    for entry in (entry for entry, is_folder in kinds if is_folder):
        if entry.name not in leave_out:
            _walk(entry, f"{name}{entry.name}/", leave_out, found)


def _add(path: Path, name: str, found: FoundText) -> None:
    try:
        status = path.stat()
    except OSError:
        found.unreadable.append(path)
        return
    if not stat.S_ISREG(status.st_mode):
        found.others += 1
    elif found.first_time(status):
        found.inputs.append(Input(path, name, status.st_size, status.st_mtime_ns))


def kind(path: Path) -> str:
    """ ".txt" of a.txt and of a.txt.gz"""
    return (path.with_suffix("") if _is_compressed(path) else path).suffix.lower()


def open_text(source: Input) -> BinaryIO:
    """Its bytes, as they were before they were compressed. OSError or EOFError, now or later, if it is not what its name says."""
    return (
        cast(BinaryIO, gzip.open(source.path, "rb"))
        if _is_compressed(source.path)
        else open(source.path, "rb")
    )


def _is_compressed(path: Path) -> bool:
    return path.suffix.lower() == ".gz"


def sections(
    source: Input, file: BinaryIO, start: int = 0, field: str = FIELD
) -> Iterator[Section]:
    """The sections from byte `start` of the opened file on; InputError where a line of .jsonl is not what it should be."""
    if kind(source.path) == ".jsonl":
        file.seek(start)
        return _lines(source, file, field)
    size = source.size
    if _is_compressed(source.path):  # what counts is whether it is a long one
        file.seek(0)
        size = len(file.read(LONG_DOCUMENT + 1))
    file.seek(start)
    return _cut(file, size, start)


def _cut(file: BinaryIO, size: int, start: int = 0) -> Iterator[Section]:
    """One document of `size` bytes, from byte `start` on; an empty one has no section."""
    whole = size <= LONG_DOCUMENT
    position = start
    held = file.read(LONG_DOCUMENT if whole else _SECTION)
    while held:
        piece = held if whole else _to_line_end(held, file)
        held = file.read(_SECTION)
        text, damaged = _decode(piece)
        if position == 0:
            text = text.removeprefix(_BYTE_ORDER_MARK)
        position += len(piece)
        yield Section(text, ends_document=not held, resume=position, damaged=damaged)


def _to_line_end(piece: bytes, file: BinaryIO) -> bytes:
    """`piece` and the rest of its last line; where the line has no end for long, up to the end of a character."""
    if not piece.endswith(b"\n"):
        piece += file.readline(LONG_DOCUMENT - _SECTION)
    if not piece.endswith(b"\n"):
        following = file.read(
            3
        )  # a character continues with three bytes of the form 10xxxxxx at most
        rest = next(
            (count for count, byte in enumerate(following) if byte & 0xC0 != 0x80), len(following)
        )
        file.seek(rest - len(following), os.SEEK_CUR)
        piece += following[:rest]
    return piece


def _lines(source: Input, file: BinaryIO, field: str) -> Iterator[Section]:
    """The documents of a .jsonl file from where it stands; an empty line is none."""
    after = file.tell()
    while line := file.readline(_LONGEST_LINE):
        before, after = after, after + len(line)
        if not line.strip():
            continue
        try:
            content, damaged = _content(line, field)
        except (ValueError, RecursionError) as error:
            raise InputError(f"{source.path}:{_line_number(file, before)}: {error}") from error
        for section in _cut(io.BytesIO(content), len(content)):
            yield Section(
                section.text,
                section.ends_document,
                after if section.ends_document else None,
                damaged,
            )


def _content(line: bytes, field: str) -> tuple[bytes, bool]:
    """The field of a line of .jsonl, and whether something in it was not text; ValueError says what is wrong with the line."""
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
            f'every line must be an object with a string "{field}"; this one {has} (--field names another)'
        )
    text = str(record[field])
    content = text.encode("utf-8", errors="replace")  # "\ud800" alone is no character
    return content, damaged or len(content) != len(text.encode("utf-8", errors="surrogatepass"))


def _line_number(file: BinaryIO, position: int) -> int:
    """The number, from 1, of the line that begins at byte `position`."""
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
