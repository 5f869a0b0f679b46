"""The module that opens files for writing, and makes, renames and removes files and folders.

No other does, but for `checkpoint/open_folder.py`, which removes.

Other users may be able to write where runs, token files and caches lie, and the names there can be
guessed. Hence four rules:

1. No link is followed at the end of a path. Only plain files are opened: no pipe, no device.
2. A new file is new (O_EXCL): a file or link with a predictable temporary name is removed, never
   written to.
3. A folder that exists where one would be made belongs to this user, or is refused.
4. The files in a checkpoint are removed through a descriptor of its folder: a folder that is put in
   its place meanwhile is left alone.

`open_to_read` is here too, for files that a stranger names: a pipe or a device does not hang it.
"""

import contextlib
import ctypes
import errno
import os
import pwd
import secrets
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import BinaryIO, TextIO

from hpczero.errors import InputError, escaped

_NO_NAMELESS_FILES = {errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT, errno.ENOSYS}
_ZEROS = 1 << 22  # bytes that are written at a time
_HERE, _EXCHANGE = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
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
    os.set_blocking(file, True)  # O_NONBLOCK was for the opening: a pipe would hold it up
    return file


def open_to_read(path: Path) -> int:
    """Return a descriptor of a plain file, also through a link; OSError for anything else."""
    file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise OSError(errno.EINVAL, _REFUSED[errno.ENXIO], str(path))
    return file


def read_small(path: Path, most: int) -> bytes:
    """Return the content of a plain file; InputError if it cannot be read or has more bytes."""
    try:
        with os.fdopen(open_to_read(path), "rb") as file:
            content = file.read(most + 1)
    except OSError as error:
        raise InputError(f"{escaped(str(path))}: {error.strerror}") from error
    if len(content) > most:
        raise InputError(f"{escaped(str(path))} has more than {most:,} bytes")
    return content


def is_seen(path: Path) -> bool:
    """Return True if there is such a file or folder; False also where that cannot be found out."""
    try:
        return path.exists()
    except OSError:
        return False


def create(path: Path) -> int:
    """Return a descriptor of a file that did not exist; FileExistsError if the name is taken."""
    return open_for_writing(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)


def _open(path: str, flags: int) -> int:
    """Serve as the `opener` of `open`, so that the file knows its name."""
    return open_for_writing(Path(path), flags)


def open_lock(path: Path) -> int:
    """Return a descriptor for a lock: of the file with this name, else of a new, empty one."""
    return open_for_writing(path, os.O_RDWR | os.O_CREAT)


def append_to(path: Path) -> TextIO:
    """Open a text file for appending; create it if it is missing."""
    return open(path, "a", encoding="utf-8", opener=_open)


def touch(path: Path) -> None:
    """Create an empty file if there is none of this name."""
    os.close(open_for_writing(path, os.O_WRONLY | os.O_CREAT))


# ------------------------------------------------------------------------- files in one piece


def written_whole(path: Path) -> AbstractContextManager[BinaryIO]:
    """Write a file under a temporary name inside the context, and give it its name at the end.

    An older file keeps the name until then. A link of that name is replaced, not followed; a pipe,
    a device or a folder is an OSError.
    """
    return _written(path, durably=False)


def written_durably(path: Path) -> AbstractContextManager[BinaryIO]:
    """Write as `written_whole` does; the content is on the disk before it gets the name."""
    return _written(path, durably=True)


@contextlib.contextmanager
def _written(path: Path, durably: bool) -> Iterator[BinaryIO]:
    temporary = path.with_name(path.name + ".new")
    _refuse_special(path)
    remove(temporary)
    try:
        descriptor = create(temporary)
    except OSError as error:  # names the file that was asked for
        raise OSError(error.errno, error.strerror, str(path)) from error
    created = os.fstat(descriptor)
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
            file.flush()
            if durably:
                os.fsync(file.fileno())
        if not _has_name(created, temporary):
            raise OSError(errno.EBUSY, "another process writes it at the same time", str(path))
        os.replace(temporary, path)
        if durably:
            sync(path.parent)
    except BaseException:
        with contextlib.suppress(OSError):
            if _has_name(created, temporary):
                remove(temporary)
        raise


def _has_name(created: os.stat_result, path: Path) -> bool:
    """Return False if another file has taken the name of one that this process has created."""
    try:
        return os.path.samestat(created, os.lstat(path))
    except FileNotFoundError:
        return False


def _refuse_special(path: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        mode = os.lstat(path).st_mode
        if not stat.S_ISREG(mode) and not stat.S_ISLNK(mode):
            raise OSError(errno.EINVAL, _REFUSED[errno.ENXIO], str(path))


def write_text(path: Path, text: str) -> None:
    """Write a text file in one piece; it replaces the one that has the name."""
    with written_whole(path) as file:
        file.write(text.encode())


def write_new(path: Path, text: str) -> None:
    """Write a text file that did not exist; FileExistsError if the name is taken."""
    descriptor = create(path)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
    except BaseException:
        remove(path)
        raise


def create_nameless(folder: Path) -> int | None:
    """Return a descriptor of a new file without a name, which disappears with its process.

    `give_name` makes it stay. None: the file system has no such files, as NFS and Lustre.
    """
    try:
        return os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o666)
    except OSError as error:
        if error.errno in _NO_NAMELESS_FILES:
            return None
        raise


def create_for_scratch(folder: Path, size: int) -> int:
    """Return a descriptor of a new file of so many zeros, which disappears with its process.

    Its room is taken at once: OSError if there is not enough.
    """
    file = create_nameless(folder)
    if file is None:
        path = folder / f".hpczero-{secrets.token_hex(8)}"
        file = open_for_writing(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        remove(path)
    try:
        _take_room(file, size)
    except BaseException:
        os.close(file)
        raise
    return file


def _take_room(file: int, size: int) -> None:
    """Take room for so many zeros: at once where the file system can, else by writing them."""
    take = ctypes.CDLL(None, use_errno=True).fallocate  # that of `os` would write unasked
    code = errno.EINTR
    while code == errno.EINTR:
        failed = take(file, 0, ctypes.c_int64(0), ctypes.c_int64(size))
        code = ctypes.get_errno() if failed else 0
    if code == errno.EOPNOTSUPP:
        for start in range(0, size, _ZEROS):
            write_at(file, memoryview(bytes(min(_ZEROS, size - start))), start)
        os.fsync(file)  # a server may say only now that there is no room
    elif code:
        raise OSError(code, os.strerror(code))


def open_past_cache(file: int) -> int | None:
    """Open an open file once more, past the page cache (direct I/O); None where that cannot be."""
    with contextlib.suppress(OSError):
        return os.open(proc_path(file), os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC)
    return None


def give_name(file: int, path: Path) -> None:
    """Give a nameless file its name; FileExistsError if the name is taken."""
    os.link(proc_path(file), path, src_dir_fd=file, follow_symlinks=True)


def proc_path(file: int) -> Path:
    """Return a path in /proc that leads to an open file of this process, whatever its name."""
    return Path(f"/proc/self/fd/{file}")


def copy(source: Path, target: Path) -> None:
    """Copy a file's content to a file that did not exist."""
    with source.open("rb") as read, os.fdopen(create(target), "wb") as written:
        shutil.copyfileobj(read, written)


def rename(source: Path, target: Path) -> None:
    """Give a file or folder another name; a file that has that name is replaced."""
    os.replace(source, target)


def exchange(one: Path, other: Path) -> bool:
    """Give two folders each other's name, at one moment; False: the file system cannot (Linux)."""
    at_once = getattr(ctypes.CDLL(None), "renameat2", None)
    names = os.fsencode(one), os.fsencode(other)
    return at_once is not None and not at_once(_HERE, names[0], _HERE, names[1], _EXCHANGE)


def sync(folder: Path) -> None:
    """Flush a folder's list of names to the disk (fsync)."""
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
    """Make the folder and its parents where they are missing; those that exist may be anybody's."""
    path.mkdir(parents=True, exist_ok=True)


def make_own_folder(path: Path, mode: int = 0o777) -> bool:
    """Make the folder and its parents where they are missing; return True if the folder is new.

    InputError: the name is taken by something else, or by a folder of another user, who could
    change all that is written in it. A link must belong to this user or root, like its target.
    """
    make_folders(path.parent)
    try:
        os.mkdir(path, mode)
        return True
    except FileExistsError:
        existing = [os.lstat(path)]
    if stat.S_ISLNK(existing[0].st_mode):
        existing.append(os.stat(path))
    if not stat.S_ISDIR(existing[-1].st_mode):
        raise InputError(f"{path} exists and is no folder: move it away, or choose another name")
    for facts in existing:
        owner = facts.st_uid
        if owner not in (os.geteuid(), 0) and owner != _owner_of_what_is_made_in(path):
            kind = "a link" if stat.S_ISLNK(facts.st_mode) else "a folder"
            raise InputError(
                f"{path} exists and is {kind} that belongs to {_user(owner)}, not to "
                f"{_user(os.geteuid())}: nothing is written there; choose another name, or "
                "another folder"
            )
    return False


def _owner_of_what_is_made_in(folder: Path) -> int:
    """Return the owner of new files there: a file server may know root by another number."""
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
    """Return the owner of the file, folder or a link to it; "" for this user or root."""
    owners = {os.lstat(path).st_uid, os.stat(path).st_uid} - {os.geteuid(), 0}
    return _user(min(owners)) if owners else ""


def temporary_folder(parent: Path, prefix: str) -> Path:
    """Make a folder for this user alone, with a name that nobody can guess."""
    return Path(tempfile.mkdtemp(prefix=prefix, dir=parent))


# ----------------------------------------------------------------------------------- removing


def remove(path: Path) -> None:
    """Remove a file, or a link but not its target; a name that does not exist is no error."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


def remove_empty(path: Path) -> None:
    """Remove an empty folder; OSError if it is not empty, or a link."""
    os.rmdir(path)


def remove_tree(path: Path) -> None:
    """Remove a folder with its contents, or a link but not its target."""
    if path.is_symlink():
        remove(path)
    elif os.path.lexists(path):
        assert shutil.rmtree.avoids_symlink_attacks
        shutil.rmtree(path)


def nearest_there(path: Path) -> Path:
    """Return the path if something has that name, else what there is nearest above it."""
    return next(one for one in (path, *path.parents) if os.path.lexists(one))


def free_bytes(folder: Path) -> int:
    there = next(one for one in (folder, *folder.parents) if one.exists())
    return shutil.disk_usage(there).free


def write_at(file: int, content: memoryview, offset: int) -> None:
    """Write all these bytes at this place of a file."""
    while content:
        count = os.pwrite(file, content, offset)
        content = content[count:]
        offset += count


def read_at(file: int, room: memoryview, offset: int) -> int:
    """Fill `room` (bytes) from this place of a file; return how many bytes there were."""
    left = room
    while left and (count := os.preadv(file, [left], offset)):
        left = left[count:]
        offset += count
    return len(room) - len(left)
