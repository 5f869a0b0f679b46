"""Files of checkpoints: a stranger may have made them; only plain ones of the folder are read."""

import errno
import os
import stat
from pathlib import Path

from hpczero.errors import HpczeroError, InputError

_MISSING = {errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO}


class Damaged(HpczeroError):
    """A checkpoint that is not what was written: bytes differ, or are missing."""


class Unreadable(InputError):
    """A checkpoint that may be whole, and that this process cannot read now: no permission, a disk's error, too many open files."""


class Newer(Unreadable):
    """A checkpoint of a format that this version does not know."""


def not_read(path: Path, error: OSError, more: str = "") -> HpczeroError:
    """What it says of a checkpoint that this happened while it was read."""
    text = f"{path}: {error.strerror or error}{more}"
    return Damaged(text) if error.errno in _MISSING else Unreadable(f"{text}: it cannot be told whether this checkpoint is damaged")


def open_plain(path: Path) -> int:
    """A descriptor to read from. Damaged: the file is missing, or is a link, a pipe, a device or a folder; Unreadable: it cannot be opened."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise (Damaged(f"{path}: it is a link") if error.errno == errno.ELOOP else not_read(path, error)) from error
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise Damaged(f"{path}: it is no plain file")
    return file
