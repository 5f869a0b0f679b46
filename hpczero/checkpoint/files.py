"""Files as checkpoints need them: read only if they are plain ones of the folder itself (a stranger may have made it); written whole or not."""

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from hpczero.errors import HpczeroError


class Damaged(HpczeroError):
    """A checkpoint that is not what was written."""


def open_plain(path: Path) -> int:
    """A descriptor to read from. Damaged: the file is missing, cannot be read, or is a link, a pipe, a device or a folder."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise Damaged(f"{path}: {'it is a link' if path.is_symlink() else error.strerror}") from error
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise Damaged(f"{path}: it is no plain file")
    return file


@contextlib.contextmanager
def written_durably(path: Path) -> Iterator[BinaryIO]:
    """All that is written inside gets this name once it is on the disk; whatever fails before, what had the name keeps it."""
    temporary = path.with_name(path.name + ".new")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(path)
        sync(path.parent)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def sync(folder: Path) -> None:
    """What a folder lists is on the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
