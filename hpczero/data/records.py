"""Reading the files of a corpus: pieces of text, lines of .jsonl, rows of tables."""

from collections.abc import Iterator
from typing import BinaryIO

from hpczero.data.compressed import damage, uncompressed
from hpczero.data.corpus import MOST_BYTES, TABLES, Input, Place, Record, compression, kind
from hpczero.data.sections import LONG_DOCUMENT, SECTION, cut
from hpczero.data.tables import rows
from hpczero.errors import HpczeroError


def records(source: Input, start: Place, field: str) -> Iterator[Record]:
    """Yield the records behind a place; HpczeroError if the file is damaged."""
    if not source.size:
        return
    reached = start
    try:
        for record in _records(source, start, field):
            yield record
            reached = record.after
    except damage() as error:
        raise HpczeroError(
            f"{source.path} {_cannot_be_read(source, reached)}: "
            f"{getattr(error, 'strerror', None) or error}"
        ) from error


def _records(source: Input, start: Place, field: str) -> Iterator[Record]:
    if kind(source.path) in TABLES:
        yield from rows(source, start, field)
        return
    with uncompressed(source.path) as (text, raw):
        if kind(source.path) == ".jsonl":
            yield from _lines(text, raw, start)
        else:
            yield from _pieces(source, text, raw, start)


def _cannot_be_read(source: Input, reached: Place) -> str:
    if kind(source.path) in TABLES:
        return f"cannot be read past row {reached.number:,}"
    where = f"byte {reached.position:,}"
    if compression(source.path):
        where += " of its text"
    return f"cannot be read past {where}" + (f", line {reached.number:,}" if reached.number else "")


def _pieces(source: Input, text: BinaryIO, raw: BinaryIO, start: Place) -> Iterator[Record]:
    size = source.size
    if compression(source.path):  # `cut` asks only if the document is long
        size = len(text.read(LONG_DOCUMENT + 1))
    position = start.position
    text.seek(position)
    for piece, is_last in cut(text, size):
        is_first = not position
        position += len(piece)
        yield Record("piece", piece, Place(position), raw.tell(), is_last, is_first)


def _lines(text: BinaryIO, raw: BinaryIO, start: Place) -> Iterator[Record]:
    """Yield the lines, without those that have nothing in them."""
    text.seek(start.position)
    position, number = start.position, start.number
    while line := text.readline(MOST_BYTES + 1):
        number += 1
        size = len(line)
        problem = ""
        if size > MOST_BYTES:
            size += _rest_of_line(text, line)
            line = b""
            problem = f"the line has {size:,} bytes, and a record at most {MOST_BYTES:,}"
        position += size
        if problem or line.strip():
            yield Record("line", line, Place(position, number), raw.tell(), problem=problem)


def _rest_of_line(text: BinaryIO, line: bytes) -> int:
    """Read to the end of the line; return the number of bytes."""
    size = 0
    while not line.endswith(b"\n") and (line := text.readline(SECTION)):
        size += len(line)
    return size
