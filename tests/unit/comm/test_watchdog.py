"""The file that a node's ranks write for other nodes, and for `hpczero blame`, without MPI."""

import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpczero.comm import live, node_file, watchdog
from hpczero.comm.status import RankState, Status
from hpczero.comm.watchdog import Member, Watch


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_the_nodes_file_is_written_by_a_rank_that_waits_not_by_one_that_is_stuck(
    rank: int, tmp_path: Path
) -> None:
    """Rank 0 computes for ever, and might not be able to; of those that wait it is the lowest."""
    states = {
        number: RankState(1, 1, 1, 3, 9.0, None if number == 0 else 5.0, "somewhere")
        for number in range(3)
    }
    watch = object.__new__(Watch)
    watch._seconds, watch._published, watch._rank, watch._node = 2.0, set(), rank, 0
    watch._folder = tmp_path / "watch"
    watch._asked, watch._rested, watch._longest = None, {}, 0.0
    watch._states_on_node = lambda whole=True: states
    watch._stacks_of = lambda ranks, states: {}
    watch._publish(watch._folder)
    written = watch._folder / "node-0000.json"
    assert written.exists() == (rank == 1)
    if rank == 1:
        assert set(json.loads(written.read_text())["states"]) == {"0", "1", "2"}


def test_what_an_earlier_job_left_does_not_keep_this_one_from_reporting(tmp_path: Path) -> None:
    for name in ("report", "node-0000.txt"):
        (tmp_path / name).touch()
    status = Status()
    member = Member(0, "here", 0)
    watch = Watch(status, member, [member], {0: status.slot}, 3600, tmp_path)
    try:
        assert not (tmp_path / "node-0000.txt").exists()
        assert [watch._is_first_node() for _ in range(2)] == [True, False]
    finally:
        watch.stop()


class Quiet(Watch):
    """A watch of ranks that are as the test says; it only writes when it is told to."""

    def __init__(self, folder: Path, seconds: float = 600.0) -> None:
        self._seconds, self._folder, self._rank, self._node = seconds, folder, 0, 0
        self._published, self._rested, self._longest = set(), {}, 0.0
        self._asked, self._answered, self._slots = None, 0, {}
        self._status = Status()
        self.states: dict[int, RankState] = {}

    def _states_on_node(self, whole: bool = True) -> dict[int, RankState]:
        return self.states

    def look(self, *rested: float) -> str:
        """Return why the file is written when the ranks have waited for so long; "": it is not."""
        path = node_file.path_of(self._folder, 0)
        path.unlink(missing_ok=True)
        self.states = {
            rank: RankState(1, 1, 1, 3, 0.0, seconds, "x") for rank, seconds in enumerate(rested)
        }
        self._publish(self._folder)
        return node_file.read(path).reason


def test_a_slot_that_changes_while_it_is_read_rests_for_less_than_nothing(tmp_path: Path) -> None:
    watch = Quiet(tmp_path)
    watch.states = {1: RankState(1, 1, 1, 3, -0.001, None, "")}
    watch._publish(tmp_path)
    assert not list(tmp_path.iterdir())


def test_ranks_that_never_rested_are_quiet_after_a_short_time(tmp_path: Path) -> None:
    watch = Quiet(tmp_path)
    assert watch.look(19, 0) == ""
    assert watch.look(21, 2) == "nothing new for 20 s on 1 of 2 ranks"
    assert watch.look(25, 6) == "", "it has been said"
    assert watch.look(41, 22) == "nothing new for 20 s on 2 of 2 ranks"


def test_ranks_that_rest_by_habit_get_more_time(tmp_path: Path) -> None:
    watch = Quiet(tmp_path)
    assert watch.look(15, 0) == ""
    assert watch.look(1, 0) == ""
    assert watch.look(44, 0) == ""
    assert watch.look(46, 0) == "nothing new for 45 s on 1 of 2 ranks"


def test_no_habit_makes_a_hang_go_unseen(tmp_path: Path) -> None:
    watch = Quiet(tmp_path)
    watch.look(400, 0)
    watch.look(0, 0)
    assert watch.look(59, 0) == ""
    assert watch.look(61, 0) == "nothing new for 60 s on 1 of 2 ranks"


def test_patience_is_half_the_watchdogs_at_most(tmp_path: Path) -> None:
    watch = Quiet(tmp_path, seconds=10.0)
    assert watch.look(4.9, 0) == ""
    assert watch.look(5.1, 0) == "nothing new for 5 s on 1 of 2 ranks"


@pytest.mark.parametrize("by", ["a signal", "a file"])
def test_a_run_that_is_asked_to_stop_gets_a_few_seconds(tmp_path: Path, by: str) -> None:
    """It has a habit of resting, but is killed half a minute later."""
    watch = Quiet(tmp_path / "watch")
    watch.look(30, 0)
    watch.look(0, 0)
    assert watch.look(6, 0) == ""
    if by == "a file":
        (tmp_path / "stop").touch()
    else:
        watch._status.is_to_end = True
    assert watch.look(4, 0) == ""
    assert watch.look(6, 0) == "nothing new for 5 s on 1 of 2 ranks"


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[Watch]:
    """A watch of this process alone, which writes nowhere yet."""
    status = Status()
    member = Member(0, "here", 0)
    watch = Watch(status, member, [member], {0: status.slot}, 3600, None)
    yield watch
    watch.stop()


def record(watch: Watch, reason: str) -> None:
    """Let another thread record, as the watchdog's does; its own stack is left out."""
    thread = threading.Thread(target=watch.record, args=[reason])
    thread.start()
    thread.join()


def test_a_folder_that_is_known_later_is_written_without_what_was_there(
    alone: Watch, tmp_path: Path
) -> None:
    folder = tmp_path / "watch"
    record(alone, "nowhere")
    assert not folder.exists()
    folder.mkdir()
    for name in ("report", "node-0000.txt", "node-0000.json", "node-0001.json"):
        (folder / name).touch()
    alone.use(folder)
    assert [path.name for path in folder.iterdir()] == ["node-0001.json"], "another node's"
    record(alone, "somewhere")
    file = node_file.read(node_file.path_of(folder, 0))
    assert (file.reason, set(file.states)) == ("somewhere", {0})
    assert "test_watchdog.py" in file.stacks[0]
    assert file.states[0].pid == os.getpid()
    assert abs(file.at - time.time()) < 60


def test_a_folder_that_was_left_does_not_come_back(alone: Watch, tmp_path: Path) -> None:
    """A program that goes on may remove the run; it may have begun another one, too."""
    folder = tmp_path / "watch"
    alone.use(folder)
    alone._write_files()
    assert live.asked_in(folder).exists()
    alone.leave(tmp_path / "of another run" / "watch")
    assert alone._folder == folder
    alone.leave(folder)
    shutil.rmtree(folder)
    assert alone._live
    alone._live._next_look = 0.0
    alone._write_files()
    record(alone, "nowhere")
    assert not folder.exists()


@pytest.mark.parametrize("answers", [True, False])
def test_a_folder_is_left_once_nothing_is_written(
    alone: Watch, tmp_path: Path, answers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file server that does not answer keeps nobody."""
    begun, answered = threading.Event(), threading.Event()

    def look(watching: live.Live, folder: Path) -> None:
        begun.set()
        assert answered.wait(60)

    monkeypatch.setattr(live.Live, "look", look)
    alone.use(tmp_path)
    assert begun.wait(60), "the thread has not looked"
    monkeypatch.setattr(watchdog, "_REPORTING", 60.0 if answers else 0.05)
    leaving = threading.Thread(target=alone.leave, args=[tmp_path])
    leaving.start()
    leaving.join(0.5 if answers else 60)
    assert leaving.is_alive() == answers
    answered.set()
    leaving.join(60)
    assert not leaving.is_alive()


def test_a_rank_that_is_asked_records_and_goes_on(alone: Watch, tmp_path: Path) -> None:
    alone.use(tmp_path)
    path = node_file.path_of(tmp_path, 0)
    for _ in range(2):
        os.kill(os.getpid(), signal.SIGUSR1)
        deadline = time.monotonic() + 30
        while not path.exists():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert node_file.read(path).reason == "rank 0 was asked (SIGUSR1)"
        path.unlink()


def test_a_rank_that_fails_is_recorded(alone: Watch, tmp_path: Path) -> None:
    alone.use(tmp_path)
    alone.record_failure("ValueError: \x1b[2J")
    file = node_file.read(node_file.path_of(tmp_path, 0))
    assert (file.reason, file.stacks) == ("rank 0 failed: ValueError: \x1b[2J", {})


def test_neither_an_error_nor_a_dead_file_server_keeps_a_rank_from_its_end(
    alone: Watch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*arguments: object) -> None:
        raise MemoryError

    alone.use(tmp_path)
    monkeypatch.setattr(node_file, "write", fails)
    alone.record_failure("x")
    answered = threading.Event()
    monkeypatch.setattr(node_file, "write", lambda *arguments: answered.wait(60))
    monkeypatch.setattr(watchdog, "_REPORTING", 0.05)
    alone.record_failure("y")
    assert not answered.is_set()
    answered.set()


def test_a_stack_file_that_is_not_there_is_no_stack(alone: Watch, tmp_path: Path) -> None:
    """All of 10 ranks are asked, not only the first ones."""
    state = alone._states_on_node()[0]
    gone = RankState(2**22 + 1, state.namespace, 5, 1, 0.0, None, "")
    alone._states_on_node = lambda whole=True: {**dict.fromkeys(range(9), gone), 9: state}  # type: ignore[method-assign]
    alone._slots = dict.fromkeys(range(10), memoryview(b""))
    alone._folder = tmp_path
    record(alone, "asked")
    file = node_file.read(node_file.path_of(tmp_path, 0))
    assert list(file.stacks) == [9]
    assert file.notes == dict.fromkeys(range(9), "its process has ended")
