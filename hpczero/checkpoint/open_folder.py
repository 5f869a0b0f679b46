"""A checkpoint's folder while files in it are removed, whoever puts another in its place."""

import contextlib
import errno
import os
from collections.abc import Callable
from pathlib import Path

Identity = tuple[int, int]  # device and inode


def identity(path: Path) -> Identity:
    """Return the identity of a file, folder or link: another one of the same name differs."""
    facts = os.lstat(path)
    return facts.st_dev, facts.st_ino


class OpenFolder:
    """A folder held by a descriptor: another folder that gets its name is not read or changed."""

    def __init__(self, path: Path, known_as: Identity | None = None) -> None:
        """Open the folder; OSError if it is a link, no folder, or not the one of this identity."""
        self.path = path
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        self._descriptor = os.open(path, flags)
        facts = os.fstat(self._descriptor)
        if known_as not in (None, (facts.st_dev, facts.st_ino)):
            os.close(self._descriptor)
            raise OSError(errno.ESTALE, "another folder has got its name meanwhile", str(path))

    def holds(self, name: str) -> bool:
        """Return True if a file, folder or link in it has this name."""
        try:
            os.stat(name, dir_fd=self._descriptor, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return True

    def remove_files(self, first: str, is_known: Callable[[str], object]) -> None:
        """Remove `first`, durably, then the files of known names, then the folder if empty."""
        if self.holds(first):
            os.unlink(first, dir_fd=self._descriptor)
            os.fsync(self._descriptor)
        for name in os.listdir(self._descriptor):
            if is_known(name):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(name, dir_fd=self._descriptor)
        with contextlib.suppress(OSError):
            os.rmdir(self.path)

    def __enter__(self) -> "OpenFolder":
        return self

    def __exit__(self, *error: object) -> None:
        os.close(self._descriptor)
