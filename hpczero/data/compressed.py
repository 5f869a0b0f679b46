"""Opening files that may be compressed by gzip or Zstandard, however many parts they consist of."""

import gzip
import importlib
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import BinaryIO, cast

from hpczero.data.corpus import compression
from hpczero.data.tokenizer import library

_ZSTANDARD = "compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd"


@contextmanager
def uncompressed(path: Path) -> Iterator[tuple[BinaryIO, BinaryIO]]:
    """Yield the file as text, and as it lies on the disk: the position there is what was read.

    `damage()` is raised, now or later, if it is not in the format that its name says.
    """
    with open(path, "rb") as raw:
        if compression(path) == ".gz":
            with gzip.GzipFile(fileobj=raw, mode="rb") as text:
                yield cast(BinaryIO, text), raw
        elif compression(path) == ".zst":
            with _zstandard().ZstdFile(raw, "rb") as text:
                yield cast(BinaryIO, text), raw
        else:
            yield raw, raw


def damage() -> tuple[type[Exception], ...]:
    """Return the errors that reading a damaged file may raise."""
    errors: tuple[type[Exception], ...] = (OSError, EOFError, zlib.error)
    if _ZSTANDARD in sys.modules:
        errors = (*errors, _zstandard().ZstdError)
    return errors


def _zstandard() -> ModuleType:
    if _ZSTANDARD in sys.modules:
        return sys.modules[_ZSTANDARD]
    if sys.version_info >= (3, 14):
        return importlib.import_module(_ZSTANDARD)
    return library(_ZSTANDARD)
