"""States in files, and the stream of their pieces: what is read is what was written."""

import errno
import os
import threading
from pathlib import Path

import pytest
import torch

from hpczero import safe_files
from hpczero.parallel.offload.state_file import StateFile, StorageFailed
from hpczero.parallel.offload.stream import Piece, Stream
from hpczero.parallel.states import PAGE, SETS

PIECES = 11


def file_in(folder: Path, pages: int = 2 * PIECES) -> StateFile:
    return StateFile(folder, {"one": pages // 2 * PAGE, "two": pages // 2 * PAGE})


def pieces(file: StateFile) -> list[Piece]:
    """Pieces of a page, and a last one of half of it, of both blocks."""
    places = [file.place_of(file.blocks[name]) for name in ("one", "two")]
    return [
        Piece(
            tuple(place + number * PAGE for place in places),
            PAGE if number + 1 < PIECES else PAGE // 2,
        )
        for number in range(PIECES)
    ]


def test_a_new_file_is_full_of_zeros_and_has_no_name(tmp_path: Path) -> None:
    file = file_in(tmp_path / "new" / "folder")
    assert all(int(block.sum()) == 0 for block in file.blocks.values())
    assert os.listdir(tmp_path / "new" / "folder") == []
    assert (tmp_path / "new" / "folder").stat().st_mode & 0o777 == 0o700
    file.close()


@pytest.mark.parametrize("nameless", [True, False])
@pytest.mark.parametrize("direct", [True, False])
def test_pass_after_pass_all_pieces_go_through_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nameless: bool, direct: bool
) -> None:
    """What the stream writes is seen through the map, and the other way round."""
    if not nameless:
        monkeypatch.setattr(safe_files, "create_nameless", lambda folder: None)
    if not direct:
        monkeypatch.setattr(safe_files, "open_past_cache", lambda file: None)
    file = file_in(tmp_path)
    assert file.is_direct == direct
    stream = Stream(file, 2, PAGE)
    for times in range(1, 4):
        file.blocks["two"].add_(1)  # through the map
        file.let_pages_go()
        stream.begin(pieces(file))
        for number, piece in enumerate(pieces(file)):
            one, two = stream.take()
            assert len(one) == len(two) == piece.size
            assert set(two.tolist()) == {times}
            assert set(one.tolist()) == {number * (times - 1)}
            one.add_(number)
            stream.put_back()
        stream.finish()
    half = PAGE // 2
    expected = torch.arange(PIECES, dtype=torch.uint8).repeat_interleave(PAGE) * 3
    expected[-half:] = 0
    assert torch.equal(file.blocks["one"], expected)
    assert file.bytes_read == file.bytes_written == 3 * 2 * PIECES * PAGE
    assert os.listdir(tmp_path) == []
    stream.close()
    file.close()


def test_the_next_are_read_while_one_is_worked_on(tmp_path: Path) -> None:
    file = file_in(tmp_path)
    stream = Stream(file, 2, PAGE)
    stream.begin(pieces(file))
    stream.take()
    stream._threads.shutdown(wait=True)  # whatever has been asked for is done
    assert file.bytes_read == (SETS - 1) * 2 * PAGE
    file.close()


@pytest.mark.parametrize("name", ["read_at", "write_at"])
def test_a_failure_has_path_place_and_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    file = file_in(tmp_path)
    stream = Stream(file, 2, PAGE)

    def broken(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(safe_files, name, broken)
    stream.begin(pieces(file))

    def passes() -> None:
        for _ in pieces(file):
            stream.take()
            stream.put_back()

    with pytest.raises(StorageFailed, match=rf"4,096 bytes at .* of .* in {tmp_path} could"):
        passes()
    stream.close()
    file.close()


def test_there_is_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(StorageFailed, match=r"does not take the .* are free there"):
        StateFile(tmp_path, {"moments": 1 << 60})
    assert len(os.listdir("/proc/self/fd")) == before
    assert os.listdir(tmp_path) == []


def test_its_room_is_free_again(tmp_path: Path) -> None:
    size = 64 << 20
    before = safe_files.free_bytes(tmp_path)
    file = StateFile(tmp_path, {"moments": size})
    assert before - safe_files.free_bytes(tmp_path) > size * 0.9
    file.close()
    del file
    assert before - safe_files.free_bytes(tmp_path) < size * 0.1


def test_its_threads_end(tmp_path: Path) -> None:
    threads = set(threading.enumerate())
    stream = Stream(file_in(tmp_path), 2, PAGE)
    stream.begin(pieces(stream._file))
    stream.take()
    stream.close()
    assert set(threading.enumerate()) <= threads
