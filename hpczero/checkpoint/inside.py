"""HDF5 files that a stranger may have made: what is taken from one lies in that file itself, and is no larger than it."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from hpczero.checkpoint.files import not_read
from hpczero.checkpoint.shard import Array

WRONG = (OSError, KeyError, ValueError, TypeError, RuntimeError, RecursionError, AttributeError, MemoryError)  # what h5py says of such a file
_DEEPEST = 32  # groups in groups: more than any name that can be meant has


@contextmanager
def opened(path: Path) -> Iterator[h5py.File]:
    """To look into. Unreadable: that fails, and not for what is in the file."""
    try:
        with h5py.File(path, "r", locking=False) as file:
            yield file
    except OSError as error:
        if error.errno is None:
            raise
        raise not_read(path, error) from error


def inside(file: h5py.File, name: str) -> Any:
    """What has this name (the root: ""), reached without a link that leads on, here or elsewhere: such a link is not even looked along."""
    here = file["/"]
    for part in name.split("/") if name else ():
        if not _holds(here, part):
            raise ValueError(f"/{name} is not in this file itself")
        here = here[part]
    return here


def _holds(group: Any, name: str) -> bool:
    if not isinstance(group, h5py.Group) or not group.id.links.exists(name.encode()):
        return False
    return bool(group.id.links.get_info(name.encode()).type == h5py.h5l.TYPE_HARD)


def plain(file: h5py.File, name: str, dtype: str = "", dims: int | None = None) -> Array:
    """A dataset of numbers, whole."""
    found = inside(file, name)
    if not isinstance(found, h5py.Dataset) or found.is_virtual or found.external or found.chunks is not None:
        raise ValueError(f"/{name} is no plain dataset")
    if found.shape is None or found.dtype.kind not in "fiub" or found.dtype.names or found.dtype.subdtype:
        raise ValueError(f"/{name} has no numbers")
    if (dtype and found.dtype != np.dtype(dtype)) or (dims is not None and found.ndim != dims):
        raise ValueError(f"/{name} has {found.dtype} {found.shape}")
    if found.nbytes > min(found.id.get_storage_size(), os.stat(file.filename).st_size):
        raise ValueError(f"/{name} says that it has {found.shape} and stores less")
    return np.asarray(found[()])


def datasets_below(file: h5py.File, name: str) -> Iterator[str]:
    """The names of those in a group, and in groups in it. ValueError: there is a link that leads on, or a group twice."""
    stack, seen = [("", inside(file, name))] if not name or file.id.links.exists(name.encode()) else [], set()
    while stack:
        prefix, group = stack.pop()
        address = h5py.h5o.get_info(group.id).addr
        if address in seen or prefix.count("/") > _DEEPEST:
            raise ValueError(f"/{name}/{prefix} is too deep, or there twice")
        seen.add(address)
        for part in group:
            if not _holds(group, part):
                raise ValueError(f"/{name}/{prefix}{part} is not in this file itself")
            if isinstance(found := group[part], h5py.Group):
                stack.append((f"{prefix}{part}/", found))
            else:
                yield prefix + part
