"""Texts of a corpus in sections, of which each is encoded by itself.

A document longer than 256 KiB is taken in *sections* of about 64 KiB that end with a line. So a
large file is streamed, has a share in both splits, and can be resumed inside.
"""

import io
import json
import os
from collections.abc import Iterator
from typing import BinaryIO

from hpczero.data.corpus import Record
from hpczero.text import printable

LONG_DOCUMENT = 256 * 1024
SECTION = 64 * 1024
_BYTE_ORDER_MARK = "\ufeff"


def cut(file: BinaryIO, size: int) -> Iterator[tuple[bytes, bool]]:
    """Yield the sections of a document of `size` bytes from the file's position on.

    Each comes with True if it is the last one; an empty document has none.
    """
    is_short = size <= LONG_DOCUMENT
    following = file.read(LONG_DOCUMENT if is_short else SECTION)
    while following:
        piece = following if is_short else _to_line_end(following, file)
        following = file.read(SECTION)
        yield piece, not following


def _to_line_end(piece: bytes, file: BinaryIO) -> bytes:
    """Extend `piece` to the end of its last line, or of its last character if that line is long."""
    if not piece.endswith(b"\n"):
        piece += file.readline(LONG_DOCUMENT - SECTION)
    if not piece.endswith(b"\n"):
        # A character continues with at most three bytes of the form 10xxxxxx.
        following = file.read(3)
        starts = (index for index, byte in enumerate(following) if byte & 0xC0 != 0x80)
        end = next(starts, len(following))
        file.seek(end - len(following), os.SEEK_CUR)
        piece += following[:end]
    return piece


def text_of_piece(content: bytes, is_first: bool) -> tuple[str, bool]:
    """Return a section of a text file, and True if bytes of it were no text: they are U+FFFD."""
    try:
        text, damaged = content.decode("utf-8"), False
    except UnicodeDecodeError:
        text, damaged = content.decode("utf-8", errors="replace"), True
    return text.removeprefix(_BYTE_ORDER_MARK) if is_first else text, damaged


def texts_of_line(line: bytes, field: str) -> tuple[list[str], bool]:
    """Return the sections of a line of .jsonl, and True if half characters of it are now "?".

    ValueError says what is wrong with the line.
    """
    try:
        record = json.loads(line.decode("utf-8").removeprefix(_BYTE_ORDER_MARK))
    except UnicodeDecodeError as error:
        raise ValueError(f"the line is not UTF-8 ({_place_in(error)})") from error
    except (ValueError, RecursionError) as error:
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
    damaged = len(content) != len(text.encode("utf-8", errors="surrogatepass"))
    return _texts(content), damaged


def texts_of_row(content: bytes | None) -> list[str]:
    """Return the sections of a table's value; ValueError says what is wrong with it."""
    if content is None:
        raise ValueError("the value is null")
    try:
        return _texts(content)
    except UnicodeDecodeError as error:
        raise ValueError(f"the value is not UTF-8 ({_place_in(error)})") from error


def _texts(content: bytes) -> list[str]:
    content.decode("utf-8")  # not in sections, at whose ends a wrong byte may be taken for half one
    texts = [piece.decode("utf-8") for piece, _ in cut(io.BytesIO(content), len(content))]
    if texts:
        texts[0] = texts[0].removeprefix(_BYTE_ORDER_MARK)
    return texts


def _place_in(error: UnicodeDecodeError) -> str:
    return f"byte {error.start + 1:,} is 0x{error.object[error.start]:02x}"


def texts_of(record: Record, field: str) -> tuple[list[str], bool]:
    """Return the record's sections, and True if bytes of it were no text.

    ValueError says what is wrong with the record.
    """
    if record.problem:
        raise ValueError(record.problem)
    if record.form == "row":
        return texts_of_row(record.content), False
    assert record.content is not None, record
    if record.form == "line":
        return texts_of_line(record.content, field)
    text, damaged = text_of_piece(record.content, record.is_first)
    return [text], damaged
