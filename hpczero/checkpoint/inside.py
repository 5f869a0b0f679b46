"""HDF5 files that a stranger may have made: what is taken from one lies in that file itself, and is no larger than it."""

import os
from collections.abc import Iterator
from typing import Any

import h5py
import numpy as np

from hpczero.checkpoint.shard import Array

WRONG = (OSError, KeyError, ValueError, TypeError, RuntimeError, RecursionError, AttributeError, MemoryError)  # what h5py says of such a file
_DEEPEST, _MOST = 16, 100_000  # groups in groups, and entries in all of them, that can be meant


def inside(file: h5py.File, name: str) -> Any:
    """What has this name, reached without a link that leads on, here or elsewhere: such a link is not even looked along."""
    here = file["/"]
    for part in name.strip("/").split("/"):
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
    """The names of those in a group, and in groups in it; a group that is in itself ends it."""
    stack, seen = [name] if file.id.links.exists(name.encode()) else [], 0
    while stack:
        group = stack.pop()
        for part in inside(file, group):
            seen += 1
            if group.count("/") > _DEEPEST or seen > _MOST:
                raise ValueError(f"/{name} has too much in it")
            path = f"{group}/{part}"
            if isinstance(inside(file, path), h5py.Group):
                stack.append(path)
            else:
                yield path.removeprefix(f"{name}/")
