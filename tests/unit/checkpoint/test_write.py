"""Saving when something fails: it is SaveFailed, never a checkpoint with a part of it missing,
and never the end of the process.
"""

import errno
import os
import stat
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import h5py
import numpy as np
import pytest

from hpczero import safe_files
from hpczero.checkpoint import directory, manifest
from hpczero.checkpoint import save as write
from hpczero.checkpoint.load import Checkpoint
from hpczero.checkpoint.save import SaveFailed, Saver
from hpczero.checkpoint.shard_file import (
    BLOCK,
    SLOTS,
    WIDTH,
    Writer,
    empty_chunks,
    in_chunks,
    make_file,
)
from tests.support.saver import ELEMENTS, save, saver


class NoThreads(ThreadPoolExecutor):
    def submit(self, *_: Any, **__: Any) -> Any:
        raise RuntimeError("can't start new thread")


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_writer_that_cannot_begin_is_a_save_that_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asynchronous: bool
) -> None:
    own = saver(tmp_path, asynchronous)
    monkeypatch.setattr(write, "ThreadPoolExecutor", NoThreads)
    with pytest.raises(SaveFailed, match="can't start new thread"):
        save(own, 1, asynchronous)
    assert not own.in_flight
    assert not directory.steps(tmp_path)
    monkeypatch.undo()
    with Checkpoint.open(save(own, 2, asynchronous)) as checkpoint:
        assert np.array_equal(
            checkpoint["/optimizer/moment1/weight"].numpy(), np.full(ELEMENTS, 3, np.float32)
        )


def test_a_thread_that_cannot_begin_is_a_save_that_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: Any) -> None:
        raise RuntimeError("can't start new thread")

    own = saver(tmp_path, asynchronous=True)
    monkeypatch.setattr(write.threading.Thread, "start", refuse)
    with pytest.raises(SaveFailed, match="can't start new thread"):
        save(own, 1, asynchronous=True)
    assert not directory.steps(tmp_path)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_failure_on_a_file_system_that_is_gone_is_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asynchronous: bool
) -> None:
    """The message asks that file system once more."""

    def stale(*_: Any) -> Any:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    own = saver(tmp_path, asynchronous)
    monkeypatch.setattr(Writer, "finish", stale)
    monkeypatch.setattr(safe_files, "free_bytes", stale)
    with pytest.raises(
        SaveFailed, match=r"shard-00000.h5.new: Stale file handle \(.*cannot be told"
    ):
        save(own, 1, asynchronous)
    assert not directory.steps(tmp_path)


def test_a_disk_that_is_full_at_any_moment_is_a_save_that_failed(tmp_path: Path) -> None:
    if subprocess.run(
        ["mount", "-t", "tmpfs", "tmpfs", str(tmp_path)], capture_output=True, check=False
    ).returncode:
        pytest.skip("cannot mount a disk here")
    subprocess.run(["umount", "-l", str(tmp_path)], check=True)
    pages = [
        *range(1, 40),
        *range(800, 940, 5),
    ]  # while the structure is written; and around the end of the data, of some 880 pages
    script = f"""
from pathlib import Path
from tests.support.saver import full_disk
said = [full_disk(Path({str(tmp_path)!r}), size * 4096) for size in {pages}]
assert said[0] and not said[-1], said
print("all")
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.stdout == "all\n", (done.returncode, done.stderr)
    assert not done.stderr


class OnDevice:
    """Elements that are no array of this process, of which only pieces are to be had."""

    def __init__(self, values: np.ndarray[Any, Any]) -> None:
        self.values, self.longest = values, 0

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, part: slice) -> np.ndarray[Any, Any]:
        self.longest = max(self.longest, part.stop - part.start)
        return self.values[part].copy()


def test_what_is_copied_is_what_the_sources_have_in_their_order() -> None:
    """Neighbours in memory in one stretch; what only looks like one, an empty source, an order
    of its own, a device's memory.
    """
    memory = np.arange(100, dtype=np.float32)
    device = OnDevice(np.arange(5_000_000, dtype=np.float32))
    neighbours = [memory[:10], memory[10:40], memory[40:40], memory[40:41]]
    sources = [
        *neighbours,
        memory[50:60],
        memory[:10],
        device,
        memory[60:70],
        np.zeros(3, np.float32),
    ]
    assert list(map(len, write._joined(neighbours))) == [41]
    kept = np.full(sum(map(len, sources)), np.nan, np.float32)
    write._copy(sources, kept)
    assert np.array_equal(
        kept,
        np.concatenate(
            [source.values if isinstance(source, OnDevice) else source for source in sources]
        ),
    )
    assert device.longest < 3_000_000


def test_a_disk_that_is_slow_gets_what_was_made_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Buffers come again, also where one slot ends and the next begins: none before what it had
    is written.
    """
    at_once = Writer._write_at

    def slowly(writer: Writer, data: memoryview, place: int) -> None:
        time.sleep(0.01)
        at_once(writer, data, place)

    monkeypatch.setattr(Writer, "_write_at", slowly)
    elements = 4 * BLOCK // WIDTH + 5
    (extent,) = make_file(tmp_path / "shard.h5", {0: elements})
    empty, values = (
        empty_chunks(BLOCK),
        [np.arange(elements, dtype=np.float32) + slot for slot in range(len(SLOTS))],
    )
    writer = Writer(tmp_path / "shard.h5", extent, direct=True)
    for slot, of_slot in enumerate(values):
        writer.write(slot, in_chunks([of_slot[:7], of_slot[7:]], empty))
    writer.finish()
    writer.close()
    with h5py.File(tmp_path / "shard.h5") as file:
        for slot, of_slot in zip(SLOTS, values, strict=True):
            assert np.array_equal(file[f"rank-00000/{slot}"][:elements], of_slot)


@pytest.mark.timeout(60)
def test_a_save_that_is_waited_for_makes_no_pauses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pause of an hour after each chunk ends when the others begin to wait."""
    monkeypatch.setattr(write, "_PAUSE_FACTOR", 1e9)
    own = saver(tmp_path, asynchronous=True)
    with Checkpoint.open(save(own, 1, asynchronous=True)) as checkpoint:
        assert checkpoint["/model/weight"].numpy().shape == (ELEMENTS,)


def test_all_files_of_a_checkpoint_are_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk was asked to have each of them, as large as it is in the end, and the names of the
    others before there is a manifest.
    """
    sizes: dict[int, int] = {}
    names: list[set[str]] = []
    sync = os.fsync

    def note_and_sync(file: int) -> None:
        found = os.fstat(file)
        sizes[found.st_ino] = found.st_size
        if stat.S_ISDIR(found.st_mode):
            names.append(set(os.listdir(file)))
        sync(file)

    monkeypatch.setattr(os, "fsync", note_and_sync)
    paths = list(save(saver(tmp_path), 1).iterdir())
    files = [path.stat() for path in paths]
    assert len(files) == 3
    assert {path.name for path in paths} - {manifest.NAME} in names
    assert {found.st_ino: found.st_size for found in files}.items() <= sizes.items()


def test_a_save_is_written_when_its_thread_has_ended_and_not_before() -> None:
    saver, goes_on = object.__new__(Saver), threading.Event()
    saver._save = None
    assert saver.written
    saver._save = SimpleNamespace(thread=None)
    assert saver.written
    thread = threading.Thread(target=goes_on.wait, daemon=True)
    saver._save = SimpleNamespace(thread=thread)
    thread.start()
    assert not saver.written
    goes_on.set()
    thread.join()
    assert saver.written


@pytest.mark.parametrize(
    ("nodes", "leaders"), [([0, 0, 1, 2, 2, 2], [0, 0, 2, 3, 3, 3]), ([1, 0, 1, 0], [0, 1, 0, 1])]
)
def test_the_first_rank_of_a_node_makes_its_file(nodes: list[int], leaders: list[int]) -> None:
    """Nodes of 2, 1 and 3 ranks; and ranks that are dealt out to the nodes."""
    worlds: list[Any] = [
        SimpleNamespace(rank=rank, node=node, node_of_rank=nodes, local_size=nodes.count(node))
        for rank, node in enumerate(nodes)
    ]
    assert [write._leader(world, "node") for world in worlds] == leaders
    assert [write._leader(world, "rank") for world in worlds] == list(range(len(nodes)))
