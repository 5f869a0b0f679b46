"""The ranks' doings are written while somebody looks, by a rank that can; slots are made here."""

import os
import time
from pathlib import Path

import pytest

from hpczero import safe_files
from hpczero.comm import live, node_file, watchdog
from hpczero.comm.live import Live, Onlooker, asked_in, path_of
from hpczero.comm.node_file import NodeFile
from hpczero.comm.status import SLOT, RankState, Status, WaitPoint, last_look, read
from hpczero.comm.watchdog import Member, Watch
from hpczero.errors import InputError


class Node:
    """Ranks of a node, with a clock that the test moves."""

    def __init__(self, ranks: int, folder: Path, first: int = 0) -> None:
        self.now = 1000.0
        self.folder = folder
        self.asleep: set[int] = set()
        folder.parent.mkdir(exist_ok=True)
        self.statuses: dict[int, Status] = {}
        for rank in range(first, first + ranks):
            status = Status()
            status.move_to(memoryview(bytearray(SLOT)))
            status.identify(0)
            status.at_step(7)
            self.statuses[rank] = status
        slots = {rank: status.slot for rank, status in self.statuses.items()}
        self.ranks = {
            rank: Live(status, rank, first, slots, first == 0, lambda: self.now)
            for rank, status in self.statuses.items()
        }

    def run(self, seconds: int, onlooker: Onlooker | None = None) -> list[int]:
        """Let so many seconds pass, and somebody ask now and then; return who wrote, by second."""
        writers = []
        for second in range(seconds):
            if onlooker and second % 3 == 0:
                assert onlooker.ask() == ""
            for rank, of_rank in self.ranks.items():
                if rank not in self.asleep:
                    before = self.file.at
                    of_rank.look(self.folder)
                    writers += [rank] if self.file.at != before else []
            self.now += 1.0
        return writers

    @property
    def file(self) -> NodeFile:
        return node_file.read(path_of(self.folder, min(self.ranks)))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "run" / "watch"


def test_without_anybody_looking_nothing_is_written(folder: Path) -> None:
    node = Node(3, folder)
    assert node.run(100) == []
    assert [path.name for path in folder.iterdir()] == ["asked"]
    assert asked_in(folder).read_bytes() == b""


def test_a_question_of_an_earlier_job_is_none(folder: Path) -> None:
    folder.mkdir(parents=True)
    asked_in(folder).write_text("asked long ago")
    assert Node(2, folder).run(60) == []


def test_what_somebody_else_has_added_to_the_question_goes(folder: Path) -> None:
    node = Node(2, folder)
    node.run(6)
    asked_in(folder).write_text("x" * 5000)
    assert node.run(12, Onlooker(folder))


def test_it_is_written_while_somebody_asks_and_a_while_longer(folder: Path) -> None:
    node = Node(3, folder)
    node.run(6)
    onlooker = Onlooker(folder)
    writers = node.run(60, onlooker)
    assert set(writers) == {0}, "the lowest rank writes for all"
    assert 20 <= len(writers) <= 30, "about every two seconds"
    assert set(node.file.states) == {0, 1, 2}
    assert node.file.states[1].step == 7
    assert node.file.resident[1] > 1e6, "of this process, that stands for all ranks"
    (seen,) = onlooker.files()
    assert (seen.reason, set(seen.states)) == ("", {0, 1, 2})
    node.run(30)
    assert node.run(60) == [], "nobody asks any more"


def test_another_rank_takes_the_place_of_one_that_stands_still(folder: Path) -> None:
    node = Node(4, folder)
    node.run(6)
    onlooker = Onlooker(folder)
    assert set(node.run(20, onlooker)) == {0}
    node.asleep = {0, 1}
    writers = node.run(30, onlooker)
    assert set(writers) == {2}
    assert writers, "it knows that somebody asks"
    node.asleep = set()
    assert set(node.run(30, onlooker)) == {2}, "it keeps the duty"
    assert set(node.file.states) == {0, 1, 2, 3}


def test_no_more_than_a_hundredth_of_a_processor_is_taken(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = Node(1, folder)
    node.run(6)
    times = iter(range(1000))
    monkeypatch.setattr(live.time, "thread_time", lambda: 0.1 * next(times))
    assert 3 <= len(node.run(40, Onlooker(folder))) <= 5, "0.1 s each ten seconds"


def test_a_folder_that_is_removed_is_not_made_again_before_the_run_is(folder: Path) -> None:
    node = Node(1, folder)
    node.run(6)
    onlooker = Onlooker(folder)
    assert node.run(10, onlooker)
    safe_files.remove_tree(folder.parent)
    assert "asked is not there: the job is starting" in onlooker.ask()
    assert onlooker.may_be_answered
    node.run(30)
    assert not folder.parent.exists()
    folder.parent.mkdir()
    node.run(10)
    assert onlooker.ask() == ""
    assert node.run(10, onlooker)


@pytest.mark.parametrize("kind", ["pipe", "link to a device", "long", "folder"])
def test_whatever_a_stranger_puts_there_is_no_question(folder: Path, kind: str) -> None:
    folder.mkdir(parents=True)
    path = asked_in(folder)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "link to a device":
        path.symlink_to("/dev/zero")
    elif kind == "long":
        path.write_bytes(b"x" * 100_000)
    else:
        path.mkdir()
    assert Node(1, folder).run(30) == []
    if kind != "long":
        assert Onlooker(folder).ask() != ""


def test_ranks_of_other_nodes_do_not_make_the_file(folder: Path) -> None:
    assert Node(2, folder, first=8).run(20) == []
    assert not folder.exists()


def test_an_onlooker_does_not_believe_what_was_there_before(folder: Path) -> None:
    """Neither an earlier job's file, nor one whose writer has another clock."""
    state = RankState(1, 1, 1, 3, 0.0, None, "")
    old = NodeFile(time.time() + 500, "", {4: state}, {})
    node_file.write(path_of(folder, 4), old, 4)
    onlooker = Onlooker(folder)
    assert onlooker.files() == []
    new = NodeFile(12.0, "", {0: state}, {})
    node_file.write(path_of(folder, 0), new, 0)
    (seen,) = onlooker.files()
    assert set(seen.states) == {0}
    assert abs(seen.at - time.time()) < 60, "by this computer's clock"
    assert onlooker.files() == [seen], "it grows older"


def test_two_who_look_do_not_disturb_each_other(folder: Path) -> None:
    node = Node(1, folder)
    node.run(6)
    one, other = Onlooker(folder), Onlooker(folder)
    node.run(6, one)
    for _ in range(10):
        assert other.ask() == ""
        assert node.run(4, one)
    assert one.files()
    assert other.files()


def test_who_may_only_read_is_told_so(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, flags: int = 0) -> int:
        raise PermissionError(13, "Permission denied", str(path))

    folder.mkdir(parents=True)
    monkeypatch.setattr(safe_files, "open_for_writing", refuse)
    asked_in(folder).touch()
    onlooker = Onlooker(folder)
    assert onlooker.may_be_answered
    assert onlooker.ask() == f"{asked_in(folder)}: Permission denied"
    assert not onlooker.may_be_answered


def test_an_error_while_somebody_looks_does_not_end_a_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*arguments: object) -> bytes:
        raise MemoryError

    status = Status()
    member = Member(0, "here", 0)
    watch = Watch(status, member, [member], {0: status.slot}, 3600, None)
    try:
        watch.use(tmp_path / "watch")
        monkeypatch.setattr(live.Live, "look", fails)
        watch._write_files()
        watch._write_files()
        assert watch._live is None
    finally:
        watch.stop()


def test_a_new_job_removes_what_an_earlier_one_said(tmp_path: Path) -> None:
    path_of(tmp_path, 0).write_text("{}")
    path_of(tmp_path, 1).write_text("{}")
    status = Status()
    member = Member(0, "here", 0)
    watch = Watch(status, member, [member], {0: status.slot}, 3600, tmp_path)
    watch.stop()
    assert not path_of(tmp_path, 0).exists()
    assert path_of(tmp_path, 1).exists(), "another node's"


def test_a_slot_tells_what_part_of_the_run_it_is() -> None:
    status = Status()
    with status.doing("save"):
        status.begin_wait(WaitPoint(b"closing"))
        assert read(status.slot, time.monotonic()).doing == "save"
        moved = memoryview(bytearray(SLOT))
        status.move_to(moved)
        assert read(moved, time.monotonic()).doing == "save"
    assert read(status.slot, time.monotonic()).doing == ""
    assert last_look(status.slot) == (0.0, 0.0)
    status.looked(5.0, 4.0)
    assert last_look(status.slot) == (5.0, 4.0)
    assert read(status.slot, time.monotonic()).waits_in == "closing"


def test_a_part_that_fails_is_over() -> None:
    status = Status()
    with pytest.raises(InputError), status.doing("evaluation"):
        raise InputError("no")
    assert read(status.slot, time.monotonic()).doing == ""


def test_the_files_of_a_job_are_not_those_that_blame_and_the_watchdog_read(folder: Path) -> None:
    state = RankState(1, 1, 1, 3, 0.0, None, "")
    node_file.write(path_of(folder, 0), NodeFile(1.0, "", {0: state}, {}), 0)
    assert not list(folder.glob("node-*.json"))
    assert watchdog.node_file.read(node_file.path_of(folder, 0)) == node_file.NOTHING
