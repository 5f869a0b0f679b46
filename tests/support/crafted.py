"""Changes that a stranger could make to a checkpoint's files, and the check that hpczero refuses
them.
"""

import ctypes
import os
from pathlib import Path
from typing import Any

import h5py
import pytest

from hpczero.cli import main
from tests.support.checkpoints import (
    memory_at_most,
)


def assert_refused(
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    word: str,
    code: int = 1,
    is_read: bool = False,
) -> None:
    """Assert that every verb refuses it in one line with `word`, with little memory.

    `is_read`: only `verify` refuses it; the other verbs succeed.
    """
    with memory_at_most(100 << 20):
        for verb, *more in (
            ["stats", "--slot", "all"],
            ["show"],
            ["export", str(folder.parent / "out.safetensors")],
        ):
            assert main(["ckpt", verb, str(folder), *more]) == (0 if is_read else code), verb
            said = capsys.readouterr().err
            assert is_read or word in said, (verb, said)
            assert said.count("\n") == (not is_read)
        assert main(["ckpt", "verify", str(folder)]) == code
        listed = capsys.readouterr()
        assert word in listed.out
        assert listed.out.count("\n") <= 7
        assert not listed.err


def replace(file: h5py.File, name: str, **arguments: Any) -> None:
    del file[name]
    file.create_dataset(name, **arguments)


IN_OPEN = 0x20  # of inotify


def watch_opening(path: Path) -> int:
    """Return an inotify descriptor that reports each opening of the file, or of one in the folder;
    reading it never blocks.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    watch: int = libc.inotify_init1(os.O_NONBLOCK)
    assert libc.inotify_add_watch(watch, str(path).encode(), IN_OPEN) >= 0
    return watch


def virtual(file: h5py.File, name: str, source: str, shape: tuple[int, ...] = (30, 7)) -> None:
    layout = h5py.VirtualLayout(shape, "<f4")
    layout[:] = h5py.VirtualSource(source, "/rank-00000/model", shape, "<f4")
    if name in file:
        del file[name]
    file.create_virtual_dataset(name, layout)


def remake_view(file: h5py.File, fill: float) -> None:
    """Make the view of b again, with this fill value."""
    layout = h5py.VirtualLayout((11,), "<f4")
    for mapping in file["model/b"].virtual_sources():
        (first,), (last,) = mapping.vspace.get_select_bounds()
        (begin,), (end,) = mapping.src_space.get_select_bounds()
        source = h5py.VirtualSource(
            mapping.file_name, mapping.dset_name, mapping.src_space.get_simple_extent_dims(), "<f4"
        )
        layout[first : last + 1] = source[begin : end + 1]
    del file["model/b"]
    file.create_virtual_dataset("model/b", layout, fillvalue=fill)


def first_shard(content: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = content["shards"][0]
    return found
