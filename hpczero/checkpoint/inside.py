"""HDF5 files that a stranger may have made, as the HDF5 library sees them: what is taken from one
lies in that file itself, and is no larger than it. The library may crash on such a file: this is
used in a process of its own (`apart`).
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from hpczero.checkpoint.files import not_read
from hpczero.checkpoint.shard_file import Array

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


def dataset(file: h5py.File, name: str) -> h5py.Dataset:
    """What has this name, as h5py shows it."""
    found = _inside(file, name)
    if not isinstance(found, h5py.h5d.DatasetID):
        raise ValueError(f"/{name} is no dataset")
    return h5py.Dataset(found)


def _inside(file: h5py.File, name: str) -> Any:
    """What has this name (the root: ""), as h5py's low level has it: reached without a link that leads on, here or elsewhere; such a link is not even
    looked along.
    """
    here = h5py.h5g.open(file.id, b"/")
    for part in name.encode().split(b"/") if name else ():
        if not isinstance(here, h5py.h5g.GroupID) or not here.links.exists(part):
            raise ValueError(f"/{name} is not in this file itself")
        _refuse_a_link(here, part, name)
        here = h5py.h5o.open(here, part)
    return here


def _refuse_a_link(group: h5py.h5g.GroupID, part: bytes, path: str) -> None:
    if group.links.get_info(part).type != h5py.h5l.TYPE_HARD:
        raise ValueError(f"/{path} is not in this file itself")


def plain(file: h5py.File, name: str, dtype: str = "", dims: int | None = None) -> Array:
    """A dataset of numbers, whole."""
    found = dataset(file, name)
    if found.is_virtual or found.external or found.chunks is not None:
        raise ValueError(f"/{name} is no plain dataset")
    if found.shape is None or found.dtype.kind not in "fiub" or found.dtype.names or found.dtype.subdtype:
        raise ValueError(f"/{name} has no numbers")
    if (dtype and found.dtype != np.dtype(dtype)) or (dims is not None and found.ndim != dims):
        raise ValueError(f"/{name} has {found.dtype} {found.shape}")
    if found.nbytes > min(found.id.get_storage_size(), os.stat(file.filename).st_size):
        raise ValueError(f"/{name} says that it has {found.shape} and stores less")
    return np.asarray(found[()])


def datasets_below(file: h5py.File) -> Iterator[tuple[str, Any]]:
    """The name and the object of each that is in a group of the file. ValueError: there is a link
    that leads on, or a group twice.
    """
    stack, seen = [("", _inside(file, ""))], set()
    while stack:
        prefix, group = stack.pop()
        address = h5py.h5o.get_info(group).addr
        if address in seen or prefix.count("/") > _DEEPEST:
            raise ValueError(f"/{prefix} is too deep, or there twice")
        seen.add(address)
        for part in group:
            path = prefix + part.decode()
            _refuse_a_link(group, part, path)
            found = h5py.h5o.open(group, part)
            if isinstance(found, h5py.h5g.GroupID):
                stack.append((f"{path}/", found))
            else:
                yield path, found
