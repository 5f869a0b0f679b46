"""A folder that is on a slow disk for one command: `python -m tests.support.slow_disk …`.

The command runs in a mount namespace of its own, where a FUSE file system lies over the folder. It
passes everything on to what lies beneath, and takes so many seconds longer for each read, and each
write or sync, once the file SLOW is there. All other processes see the folder as it was.
"""

import argparse
import ctypes
import errno
import importlib
import os
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

_NEW_NAMESPACE = 0x00020000  # CLONE_NEWNS
_PRIVATE = 0x44000  # MS_REC | MS_PRIVATE
_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG
_MOUNTED = 20.0  # seconds


def command(
    folder: Path, slow: Path, words: Sequence[str], read: float = 0.0, write: float = 0.0
) -> list[str]:
    """Return the words with this folder on a slow disk; skip the test where that cannot be."""
    try:
        importlib.import_module("mfusepy")
    except (ImportError, OSError) as error:  # the latter: libfuse is not there
        pytest.skip(f"a slow disk needs mfusepy and libfuse: {error}")
    if os.geteuid() or not os.access("/dev/fuse", os.W_OK):
        pytest.skip("a slow disk needs root, to mount it, and /dev/fuse")
    options = ["--read", str(read), "--write", str(write)]
    module = [sys.executable, "-m", "tests.support.slow_disk"]
    return [*module, *options, str(folder), str(slow), "--", *words]


class Beneath:
    """The operations of a file system that passes on to the folder with the descriptor `root`."""

    use_ns = True

    def __init__(self, root: int, delays: argparse.Namespace) -> None:
        self._root = root
        self._delays = delays

    def _at(self, path: str) -> str:
        return f"/proc/self/fd/{self._root}/{path.lstrip('/')}"

    def _rest(self, seconds: float) -> None:
        if seconds and self._delays.slow.exists():
            time.sleep(seconds)

    def getattr(self, path: str, fh: int | None = None) -> dict[str, Any]:
        found = os.lstat(self._at(path))
        names = ("mode", "nlink", "size", "uid", "gid", "ino", "blocks")
        facts = {f"st_{name}": getattr(found, f"st_{name}") for name in names}
        times = ("st_atime", "st_mtime", "st_ctime")
        return facts | {name: getattr(found, f"{name}_ns") for name in times}

    def readdir(self, path: str, fh: int) -> list[str]:
        return [".", "..", *os.listdir(self._at(path))]

    def readlink(self, path: str) -> str:
        return os.readlink(self._at(path))

    def statfs(self, path: str) -> dict[str, int]:
        found = os.statvfs(self._at(path))
        return {name: getattr(found, name) for name in dir(found) if name.startswith("f_b")}

    def open(self, path: str, info: Any) -> int:
        """Open it such that every read and write comes here, past the kernel's cache."""
        info.fh = os.open(self._at(path), info.flags & ~(os.O_DIRECT | os.O_APPEND))
        info.direct_io = 1
        return 0

    def create(self, path: str, mode: int, info: Any) -> int:
        flags = info.flags & ~(os.O_DIRECT | os.O_APPEND) | os.O_CREAT
        info.fh = os.open(self._at(path), flags, mode)
        info.direct_io = 1
        return 0

    def read(self, path: str, size: int, offset: int, info: Any) -> bytes:
        self._rest(self._delays.read)
        return os.pread(info.fh, size, offset)

    def write(self, path: str, data: bytes, offset: int, info: Any) -> int:
        self._rest(self._delays.write)
        return os.pwrite(info.fh, data, offset)

    def fsync(self, path: str, datasync: int, info: Any) -> None:
        self._rest(self._delays.write)
        os.fsync(info.fh)

    def flush(self, path: str, info: Any) -> None:
        pass

    def fsyncdir(self, path: str, datasync: int, info: Any) -> None:
        pass

    def release(self, path: str, info: Any) -> None:
        os.close(info.fh)

    def truncate(self, path: str, length: int, info: Any = None) -> None:
        os.truncate(self._at(path), length)

    def mkdir(self, path: str, mode: int) -> None:
        os.mkdir(self._at(path), mode)

    def rmdir(self, path: str) -> None:
        os.rmdir(self._at(path))

    def unlink(self, path: str) -> None:
        os.unlink(self._at(path))

    def rename(self, old: str, new: str) -> None:
        os.rename(self._at(old), self._at(new))

    def chmod(self, path: str, mode: int) -> None:
        os.chmod(self._at(path), mode)

    def utimens(self, path: str, times: tuple[int, int] | None = None) -> None:
        os.utime(self._at(path), ns=times)

    def access(self, path: str, mode: int) -> None:
        if not os.access(self._at(path), mode):
            raise OSError(errno.EACCES, path)


def _serve(folder: Path, delays: argparse.Namespace) -> None:
    """Be the file system, until the process that has started this one ends."""
    from mfusepy import FUSE, Operations, fuse_version_major

    ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
    root = os.open(folder, os.O_PATH | os.O_DIRECTORY)
    options = {"attr_timeout": 0, "entry_timeout": 0, "negative_timeout": 0}
    if fuse_version_major == 2:
        options["nonempty"] = True  # later versions ask for nothing
    passing_on = type("PassingOn", (Beneath, Operations), {})(root, delays)
    FUSE(passing_on, str(folder), foreground=True, raw_fi=True, **options)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--read", type=float, default=0.0)
    parser.add_argument("--write", type=float, default=0.0)
    parser.add_argument("folder", type=Path)
    parser.add_argument("slow", type=Path)
    parser.add_argument("command", nargs="+")
    options = parser.parse_args()
    library = ctypes.CDLL(None, use_errno=True)
    if library.unshare(_NEW_NAMESPACE) or library.mount(None, b"/", None, _PRIVATE, None):
        raise OSError(ctypes.get_errno(), "no mount namespace")
    device = options.folder.stat().st_dev
    if not os.fork():
        _serve(options.folder, options)
        os._exit(0)
    deadline = time.monotonic() + _MOUNTED
    while options.folder.stat().st_dev == device:
        assert time.monotonic() < deadline, f"{options.folder} was not mounted"
        time.sleep(0.05)
    program = shutil.which(options.command[0])
    assert program, options.command
    os.execv(program, options.command)


if __name__ == "__main__":
    main()
