"""A file of states: its room, how it is read, and what happens when its device fails."""

import ctypes
import errno
import mmap
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from hpczero import safe_files
from hpczero.parallel.offload.state_file import StateFile, StorageFailed
from hpczero.parallel.states import PAGE

SIZE = 16 * PAGE


def numbers(file: StateFile) -> torch.Tensor:
    """Numbers in its block, put there through the map."""
    values = file.blocks["moments"].view(torch.float32)
    values.copy_(torch.arange(len(values), dtype=torch.float32))
    return values


def test_a_copy_is_what_is_there_whichever_way_it_came(tmp_path: Path) -> None:
    file = StateFile(tmp_path, {"moments": SIZE})
    values = numbers(file)
    part = slice(3, 5000)
    assert torch.equal(file.copy_of(values[part]), torch.arange(3, 5000, dtype=torch.float32))
    file.let_pages_go()
    page = mmap.mmap(-1, PAGE)
    torch.frombuffer(page, dtype=torch.float32).fill_(7)
    file.write(PAGE, memoryview(page))
    assert file.copy_of(values[PAGE // 4 :][:1024]).eq(7).all()
    assert file.bytes_read == 0
    assert file.holds(values)
    assert file.holds(values[-1:])
    assert not file.holds(torch.zeros(8))
    file.close()


def test_a_copy_of_what_is_gone_is_an_error(tmp_path: Path) -> None:
    """The map would end the process with SIGBUS, as it does when a device fails under it."""
    file = StateFile(tmp_path, {"moments": SIZE})
    values = numbers(file)
    os.ftruncate(file._file, 2 * PAGE)
    assert len(file.copy_of(values[: 2 * PAGE // 4])) == 2 * PAGE // 4
    with pytest.raises(StorageFailed, match=rf"{SIZE:,} bytes at 0 of .* in {tmp_path} could not"):
        file.copy_of(values)
    file.close()


def blocks(file: int) -> int:
    return os.fstat(file).st_blocks * 512


def test_room_is_taken_without_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(safe_files, "write_at", lambda *_: pytest.fail("it is written"))
    file = safe_files.create_for_scratch(tmp_path, SIZE)
    assert (os.fstat(file).st_size, blocks(file) >= SIZE) == (SIZE, True)
    os.close(file)


@pytest.mark.parametrize("size", [SIZE, 2 * safe_files._ZEROS + 5])
def test_where_the_file_system_cannot_room_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    asked = [errno.EINTR, errno.EOPNOTSUPP]

    def fallocate(*_: object) -> int:
        ctypes.set_errno(asked.pop(0))
        return -1

    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **how: SimpleNamespace(fallocate=fallocate))
    file = safe_files.create_for_scratch(tmp_path, size)
    assert (os.fstat(file).st_size, blocks(file) >= size, asked) == (size, True, [])
    assert not any(os.pread(file, size, 0))
    os.close(file)


def test_direct_reads_are_tried_before_they_are_relied_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some file systems take the flag, and fail at the first read."""
    intact = safe_files.read_at
    direct: list[int] = []

    def open_past_cache(file: int) -> int:
        direct.append(os.dup(file))
        return direct[0]

    def read_at(file: int, room: memoryview, offset: int) -> int:
        if file in direct:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return intact(file, room, offset)

    monkeypatch.setattr(safe_files, "open_past_cache", open_past_cache)
    monkeypatch.setattr(safe_files, "read_at", read_at)
    before = len(os.listdir("/proc/self/fd"))
    file = StateFile(tmp_path, {"moments": SIZE})
    assert direct
    assert not file.is_direct
    assert len(os.listdir("/proc/self/fd")) == before + 2  # the map has one, too
    monkeypatch.setattr(safe_files, "read_at", intact)
    file.read(0, memoryview(bytearray(PAGE)))
    file.close()


@pytest.mark.parametrize("is_direct", [True, False])
def test_pages_are_let_go_where_the_step_does_not_use_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_direct: bool
) -> None:
    file = StateFile(tmp_path, {"moments": SIZE})
    monkeypatch.setattr(StateFile, "is_direct", is_direct)
    asked = []
    monkeypatch.setattr(os, "posix_fadvise", lambda *given: asked.append(given[1:]))
    values = numbers(file)
    file.let_pages_go()
    file.copy_of(values[1024:2048])
    forget = os.POSIX_FADV_DONTNEED
    assert asked == ([(0, SIZE, forget), (PAGE, PAGE, forget)] if is_direct else [])
    file.close()
