"""The files of a checkpoint, which a stranger may have made: opened only if they are plain files of the folder itself."""

import os
import stat
from pathlib import Path

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


def write_durably(path: Path, text: str) -> None:
    """The file has all of the text or does not exist under this name, whatever happens; the folder's own change is not yet on the disk."""
    temporary = path.with_name(path.name + ".new")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(path)


def sync(folder: Path) -> None:
    """What a folder lists is on the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
