"""Rows of Parquet and Arrow files, by pyarrow, a few of them in memory at a time."""

import importlib
from collections.abc import Iterator
from typing import Any

from hpczero.data.corpus import MOST_BYTES, Input, Place, Record, kind
from hpczero.data.tokenizer import library
from hpczero.errors import HpczeroError, InputError
from hpczero.text import printable

_ROWS = 64  # most that are decoded at once
_DECODED = 4 << 20  # bytes of them, as far as the file says
_BUFFER = 1 << 20  # bytes
_FILE = b"ARROW1"  # an Arrow file begins with it, a stream (as of Hugging Face's datasets) does not
_SHOWN = 8  # names of columns


def rows(source: Input, start: Place, field: str) -> Iterator[Record]:
    """Yield the values of a column from a row on; HpczeroError if the file is damaged."""
    arrow = library("pyarrow")
    reached = start.number
    try:
        find = _of_parquet if kind(source.path) == ".parquet" else _of_arrow
        for column, read in find(source, start.number, field):
            for scalar in _checked(column, arrow):
                value = scalar.as_py()
                reached += 1
                problem = ""
                if value is not None and len(value) > MOST_BYTES:
                    problem = f"the value has {len(value):,} bytes, and a record {MOST_BYTES:,}"
                    value = b""
                yield Record("row", value, Place(reached, reached), read, problem=problem)
    except arrow.ArrowException as error:
        why = printable(str(error), 200)
        raise HpczeroError(f"{source.path} cannot be read past row {reached:,}: {why}") from error


def _checked(column: Any, arrow: Any) -> Any:
    """Return the values as bytes; ArrowException where the file's offsets lead out of it."""
    plain = column.type in (arrow.string(), arrow.large_string())
    if not plain:  # a cast follows the offsets
        column.validate(full=True)
    found = column.cast(arrow.large_binary())
    found.validate(full=True)
    return found


def _of_parquet(source: Input, start: int, field: str) -> Iterator[tuple[Any, int]]:
    """Yield arrays of the column's values from a row on, and the bytes of the file read by then.

    The bytes are the share that the rows are of all.
    """
    parquet = importlib.import_module("pyarrow.parquet")
    with parquet.ParquetFile(source.path, pre_buffer=False, buffer_size=_BUFFER) as file:
        _check(source, file.schema_arrow, field)
        total = file.metadata.num_rows
        before = 0
        for group in range(file.num_row_groups):
            facts = file.metadata.row_group(group)
            here = facts.num_rows
            skipped = min(here, max(0, start - before))
            before += here
            if skipped == here:
                continue
            done = before - here
            each = facts.total_byte_size // max(1, here)
            few = max(1, min(_ROWS, _DECODED // max(1, each)))
            for batch in file.iter_batches(few, row_groups=[group], columns=[field]):
                left = batch.column(0).slice(skipped)
                skipped -= len(batch) - len(left)
                done += len(batch)
                yield left, source.size * done // max(1, total)


def _of_arrow(source: Input, start: int, field: str) -> Iterator[tuple[Any, int]]:
    """Yield arrays of the column's values from a row on, and the bytes of the file read by then."""
    arrow = library("pyarrow")
    ipc = importlib.import_module("pyarrow.ipc")
    with arrow.OSFile(str(source.path)) as file:
        is_file = file.read(len(_FILE)) == _FILE
        file.seek(0)
        reader = ipc.open_file(file) if is_file else ipc.open_stream(file)
        _check(source, reader.schema, field)
        batches = map(reader.get_batch, range(reader.num_record_batches)) if is_file else reader
        skipped = start
        for batch in batches:
            column = batch.column(batch.schema.get_field_index(field))
            left = column.slice(min(skipped, len(column)))
            skipped -= len(column) - len(left)
            for first in range(0, len(left), _ROWS):
                yield left.slice(first, _ROWS), min(file.tell(), source.size)


def _check(source: Input, schema: Any, field: str) -> None:
    """Raise InputError if the table has no column of text with this name."""
    types = importlib.import_module("pyarrow.types")
    if schema.names.count(field) != 1:
        names = [printable(name, 60) for name in schema.names[:_SHOWN]]
        more = ", …" if len(schema.names) > _SHOWN else ""
        raise InputError(
            f'{source.path} has no column "{printable(field, 60)}": it has '
            f"{', '.join(names) or 'none'}{more} (--field names another)"
        )
    found = schema.field(field).type
    is_text = types.is_string(found) or types.is_large_string(found) or types.is_string_view(found)
    if types.is_dictionary(found):
        is_text = types.is_string(found.value_type) or types.is_large_string(found.value_type)
    if not is_text:
        raise InputError(
            f'{source.path}: its column "{printable(field, 60)}" is {printable(str(found), 60)}, '
            "no text (--field names another)"
        )
