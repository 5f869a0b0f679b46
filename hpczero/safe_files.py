"""The only module that opens files for writing, and makes, renames and removes files and folders.

Others may be able to write where runs, token files and caches lie, and the names there can be
guessed. Hence four rules:

1. No link is followed at the end of a path. What is opened is a plain file: no pipe, no device.
2. A new file is new (O_EXCL): what a predictable temporary name led to is removed, never written
   to.
3. A folder that is found where one would be made belongs to this user, or is refused.
4. What lies in a folder is removed by way of a descriptor of that folder: what is put in its place
   meanwhile stays.

`open_to_read` is here too, for files that a stranger names: a pipe or a device does not hang it.
"""

import contextlib
import errno
import os
import pwd
import secrets
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, TextIO

from hpczero.errors import InputError

Identity = tuple[int, int]  # device and inode
_NO_NAMELESS_FILES = {errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT, errno.ENOSYS}
_REFUSED = {errno.ELOOP: "it is a link", errno.ENXIO: "it is no plain file"}


# ------------------------------------------------------------------------------------- opening


def open_for_writing(path: Path, flags: int = os.O_WRONLY) -> int:
    """Return a descriptor of a plain file; OSError if there is none, or something else."""
    try:
        file = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    except OSError as error:
        if error.errno in _REFUSED:
            raise OSError(error.errno, _REFUSED[error.errno], str(path)) from error
        raise
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise OSError(errno.EINVAL, _REFUSED[errno.ENXIO], str(path))
    os.set_blocking(file, True)  # so that a pipe could not hold up the opening
    return file


def open_to_read(path: Path) -> int:
    """Return a descriptor of a plain file, also by a link; OSError at once for anything else."""
    file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise OSError(errno.EINVAL, _REFUSED[errno.ENXIO], str(path))
    return file


def is_seen(path: Path) -> bool:
    """Return True if there is such a file or folder; False also where it cannot be looked for."""
    try:
        return path.exists()
    except OSError:
        return False


def create(path: Path) -> int:
    """Return a descriptor of a file that did not exist; FileExistsError if the name is taken."""
    return open_for_writing(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)


def _open(path: str, flags: int) -> int:
    """Open as the `opener` of a file that keeps its name, for what is said of it."""
    return open_for_writing(Path(path), flags)


def open_lock(path: Path) -> int:
    """Return a descriptor for a lock: of the file that has this name, else of a new, empty one."""
    return open_for_writing(path, os.O_RDWR | os.O_CREAT)


def append_to(path: Path) -> TextIO:
    """Open a text file to write behind its end; it is made where it is missing."""
    return open(path, "a", encoding="utf-8", opener=_open)


def touch(path: Path) -> None:
    """Make an empty file where none has this name."""
    os.close(open_for_writing(path, os.O_WRONLY | os.O_CREAT))


# ------------------------------------------------------------------------------- whole or not


@contextlib.contextmanager
def written_whole(path: Path) -> Iterator[BinaryIO]:
    """Give the name to what is written inside once all of it is.

    What had the name keeps it until then.
    A link that has the name is replaced, not followed; a pipe, a device or a folder is an OSError.
    """
    with _written(path, durably=False) as file:
        yield file


@contextlib.contextmanager
def written_durably(path: Path) -> Iterator[BinaryIO]:
    """Do as `written_whole`; the name is not given before the content is on the disk."""
    with _written(path, durably=True) as file:
        yield file


@contextlib.contextmanager
def _written(path: Path, durably: bool) -> Iterator[BinaryIO]:
    temporary = path.with_name(path.name + ".new")
    _refuse_special(path)
    remove(temporary)
    descriptor = create(temporary)
    made = os.fstat(descriptor)
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
            file.flush()
            if durably:
                os.fsync(file.fileno())
        if not _has_name(made, temporary):
            raise OSError(errno.EBUSY, "another process writes it at the same time", str(path))
        os.replace(temporary, path)
        if durably:
            sync(path.parent)
    except BaseException:
        with contextlib.suppress(OSError):
            if _has_name(made, temporary):
                remove(temporary)
        raise


def _has_name(made: os.stat_result, path: Path) -> bool:
    """Return False if another file has got the name of one that this process has made."""
    try:
        return os.path.samestat(made, os.lstat(path))
    except FileNotFoundError:
        return False


def _refuse_special(path: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        mode = os.lstat(path).st_mode
        if not stat.S_ISREG(mode) and not stat.S_ISLNK(mode):
            raise OSError(errno.EINVAL, _REFUSED[errno.ENXIO], str(path))


def write_text(path: Path, text: str) -> None:
    """Write a file whole, in place of the one that has the name."""
    with written_whole(path) as file:
        file.write(text.encode())


def write_new(path: Path, text: str) -> None:
    """Write a file that did not exist; FileExistsError if the name is taken."""
    descriptor = create(path)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
    except BaseException:
        remove(path)
        raise


def nameless(folder: Path) -> int | None:
    """Return a descriptor of a new file without a name, which is gone with its process.

    None where the file system has no such files, as NFS and Lustre. `give_name` makes it stay.
    """
    try:
        return os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o666)
    except OSError as error:
        if error.errno in _NO_NAMELESS_FILES:
            return None
        raise


def give_name(file: int, path: Path) -> None:
    """Give a nameless file its name; FileExistsError if the name is taken."""
    os.link(place_of(file), path, src_dir_fd=file, follow_symlinks=True)


def place_of(file: int) -> Path:
    """Return a path that leads to an open file of this process, whatever its name is."""
    return Path(f"/proc/self/fd/{file}")


def copy(source: Path, target: Path) -> None:
    """Copy a file's content to a name that nothing has."""
    with source.open("rb") as read, os.fdopen(create(target), "wb") as written:
        shutil.copyfileobj(read, written)


def rename(source: Path, target: Path) -> None:
    """Give a file or folder another name; a file that has that name is replaced."""
    os.replace(source, target)


def sync(folder: Path) -> None:
    """Bring to the disk what a folder lists."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# ------------------------------------------------------------------------------------ folders


def make_folder(path: Path) -> None:
    """Make a folder that did not exist; FileExistsError if the name is taken."""
    os.mkdir(path)


def make_folders(path: Path) -> None:
    """Make the folder, and those above it, where it is missing; what is found may be anybody's."""
    path.mkdir(parents=True, exist_ok=True)


def own_folder(path: Path, mode: int = 0o777) -> bool:
    """Make the folder, and those above it, where it is missing; return True if it is new.

    InputError: what is there is no folder, or belongs to another user, who could change all that
    is written in it. A link counts if this user or root made it, and what it leads to as well.
    """
    make_folders(path.parent)
    try:
        os.mkdir(path, mode)
        return True
    except FileExistsError:
        found = [os.lstat(path)]
    if stat.S_ISLNK(found[0].st_mode):
        found.append(os.stat(path))
    if not stat.S_ISDIR(found[-1].st_mode):
        raise InputError(f"{path} exists and is no folder: move it away, or choose another name")
    for one in found:
        if one.st_uid not in (os.geteuid(), 0) and one.st_uid != _owner_of_what_is_made_in(path):
            what = "a link that" if stat.S_ISLNK(one.st_mode) else "a folder that"
            raise InputError(
                f"{path} exists and is {what} belongs to {_user(one.st_uid)}, not to"
                f" {_user(os.geteuid())}: nothing is written there; choose another name, or"
                " another folder"
            )
    return False


def _owner_of_what_is_made_in(folder: Path) -> int:
    """Return whose files this process makes there: file servers may know root by another number."""
    probe = folder / f".hpczero-{secrets.token_hex(8)}"
    try:
        file = create(probe)
    except OSError:
        return -1
    try:
        return os.fstat(file).st_uid
    finally:
        os.close(file)
        remove(probe)


def _user(number: int) -> str:
    try:
        return f"{pwd.getpwuid(number).pw_name} (user {number})"
    except KeyError:
        return f"user {number}"


def owner_if_another(path: Path) -> str:
    """Return who else the file, folder, or a link to it belongs to; "" for this user or root."""
    owners = {os.lstat(path).st_uid, os.stat(path).st_uid} - {os.geteuid(), 0}
    return _user(min(owners)) if owners else ""


def temporary_folder(parent: Path, prefix: str) -> Path:
    """Make a folder for this user alone, of a name that nobody can guess."""
    return Path(tempfile.mkdtemp(prefix=prefix, dir=parent))


# ----------------------------------------------------------------------------------- removing


def remove(path: Path) -> None:
    """Remove a file, or a link and not what it leads to; a name that nothing has is no error."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


def remove_empty(path: Path) -> None:
    """Remove a folder in which nothing is; OSError if something is, or it is a link."""
    os.rmdir(path)


def remove_tree(path: Path) -> None:
    """Remove a folder and all that is in it, or a link and nothing of what it leads to."""
    if path.is_symlink():
        remove(path)
    elif os.path.lexists(path):
        assert shutil.rmtree.avoids_symlink_attacks
        shutil.rmtree(path)


def identity(path: Path) -> Identity:
    """Return what tells a file or folder from another one that gets its name; of a link itself."""
    found = os.lstat(path)
    return found.st_dev, found.st_ino


class OpenFolder:
    """A folder held by a descriptor: what gets its name meanwhile is not looked at or changed."""

    def __init__(self, path: Path, known_as: Identity | None = None) -> None:
        """OSError: it is a link, no folder, or not the one that had this identity."""
        self.path = path
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        self._descriptor = os.open(path, flags)
        found = os.fstat(self._descriptor)
        if known_as not in (None, (found.st_dev, found.st_ino)):
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
        """Remove `first`, durably, then the files that are known, then the folder if empty."""
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
