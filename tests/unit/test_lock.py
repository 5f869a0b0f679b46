"""One writer per run directory, whatever happens to the others."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest

from hpczero import lock
from hpczero.errors import HpczeroError, InputError
from hpczero.lock import Holder, RunLock

HOLD = (
    "import sys; from hpczero.lock import RunLock\nwith RunLock(sys.argv[1]): print('held', "
    "flush=True); sys.stdin.read()"
)
COMPETE = """
import sys
from hpczero.errors import HpczeroError, InputError
from hpczero.lock import RunLock
sys.stdin.readline()
try:
    with RunLock(sys.argv[1]):
        print("won", flush=True)
        sys.stdin.read()
except InputError as error:
    print(error, flush=True)
"""


def started(program: str, directory: Path) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", program, str(directory)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def said(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


@pytest.fixture
def holder(tmp_path: Path) -> Iterator["subprocess.Popen[str]"]:
    with started(HOLD, tmp_path) as process:
        assert said(process) == "held"
        yield process
        process.kill()


def test_the_file_names_the_holder_and_is_gone_afterwards(tmp_path: Path) -> None:
    with RunLock(tmp_path) as held:
        record, own = Holder.parse(held.path.read_text()), Holder.this_process()
        assert record is not None
        assert (record.host, record.pid, record.process_start, record.user) == (
            own.host,
            os.getpid(),
            own.process_start,
            own.user,
        )
    assert list(tmp_path.iterdir()) == []


def test_a_second_writer_is_told_who_holds_it_and_changes_nothing(
    tmp_path: Path, holder: "subprocess.Popen[str]"
) -> None:
    before = (tmp_path / "lock").read_bytes()
    with (
        pytest.raises(
            InputError, match=rf"in use by process {holder.pid} on \S+, started by \S+ at 20\d\d-"
        ),
        RunLock(tmp_path),
    ):
        pass
    assert (tmp_path / "lock").read_bytes() == before


def test_after_kill_9_the_next_one_wins_at_once(
    tmp_path: Path, holder: "subprocess.Popen[str]"
) -> None:
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    assert (tmp_path / "lock").exists()
    with RunLock(tmp_path) as held:
        assert json.loads(held.path.read_text())["pid"] == os.getpid()


def test_the_same_process_cannot_hold_it_twice(tmp_path: Path) -> None:
    with RunLock(tmp_path) as held:
        with pytest.raises(InputError, match="in use"), RunLock(tmp_path):
            pass
        assert held.path.exists()


@pytest.mark.timeout(60)
def test_of_many_at_once_exactly_one_wins_each_round(tmp_path: Path) -> None:
    competitors = [started(COMPETE, tmp_path) for _ in range(6)]
    try:
        for process in competitors:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        answers = [said(process) for process in competitors]
        assert answers.count("won") == 1
        assert all("in use by process" in answer for answer in answers if answer != "won")
    finally:
        for process in competitors:
            process.communicate()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.timeout(60)
def test_taking_and_leaving_never_lets_two_in(tmp_path: Path) -> None:
    """The file is removed on release: nobody may win the lock of a removed file. Each winner
    finds the counter as it left it.
    """
    program = """
import sys, time
from pathlib import Path
from hpczero.errors import HpczeroError, InputError
from hpczero.lock import RunLock
inside = Path(sys.argv[1]) / "inside"
wins = 0
while wins < 40:
    try:
        with RunLock(sys.argv[1]):
            inside.open("x").close()  # fails if another one is inside
            inside.unlink()
            wins += 1
    except InputError:
        pass
"""
    competitors = [started(program, tmp_path) for _ in range(4)]
    assert [process.wait() for process in competitors] == [0] * 4
    for process in competitors:
        process.communicate()


def test_a_forked_child_neither_keeps_nor_releases_it(tmp_path: Path) -> None:
    read, write = os.pipe()
    with RunLock(tmp_path) as held:
        child = os.fork()
        if child == 0:
            os.close(write)
            held.release()
            os.read(read, 1)  # lives on until the parent has been judged
            os._exit(0)
        os.close(read)
        with pytest.raises(InputError, match="in use"), RunLock(tmp_path):
            pass
    with RunLock(tmp_path):
        pass
    os.close(write)
    os.waitpid(child, 0)


def test_a_lock_file_removed_by_hand_is_put_back_by_the_next_beat(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock, "BEAT_EVERY", 0.0)
    with RunLock(tmp_path) as held:
        held.path.unlink()
        held.beat()
        assert json.loads(held.path.read_text())["pid"] == os.getpid()
        held.path.unlink()
        with RunLock(tmp_path), pytest.raises(HpczeroError, match="in use") as taken:
            held.beat()
        assert taken.value.exit_code == 1, "this run has been writing: it failed"


def test_an_unwritable_or_missing_directory_is_the_users_mistake(tmp_path: Path) -> None:
    with (
        pytest.raises(InputError, match="cannot write in the run directory"),
        RunLock(tmp_path / "missing"),
    ):
        pass
    (tmp_path / "lock").symlink_to("elsewhere")
    with pytest.raises(InputError), RunLock(tmp_path):
        pass
    assert not (tmp_path / "elsewhere").exists()


class TestWhereTheKernelsLockEndsAtThisComputer:
    """A shared file system: the record and its age decide."""

    @pytest.fixture(autouse=True)
    def shared(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(lock.machine, "is_local_file_system", lambda path: False)
        monkeypatch.setattr(lock, "SETTLE", 0.01)

    def left_by(self, directory: Path, seconds_ago: float, **changes: object) -> None:
        record = Holder.this_process().__dict__ | {"host": "node7", "kernel": "another"} | changes
        (directory / "lock").write_text(json.dumps(record))
        os.utime(directory / "lock", (time.time() - seconds_ago,) * 2)

    def test_a_holder_elsewhere_lives_while_it_beats(self, tmp_path: Path) -> None:
        self.left_by(tmp_path, seconds_ago=100)
        with (
            pytest.raises(InputError, match=r"on node7.*last sign of life was 100 s ago.*600 s"),
            RunLock(tmp_path),
        ):
            pass
        assert "node7" in (tmp_path / "lock").read_text()

    def test_a_holder_elsewhere_that_fell_silent_is_dead(self, tmp_path: Path) -> None:
        self.left_by(tmp_path, seconds_ago=lock.STALE_AFTER + 1)
        with RunLock(tmp_path):
            assert "node7" not in (tmp_path / "lock").read_text()

    def test_a_holder_elsewhere_whose_beat_is_in_the_far_future_is_dead(
        self, tmp_path: Path
    ) -> None:
        """Its clock was wrong; nobody is to wait for that time."""
        self.left_by(tmp_path, seconds_ago=-lock.STALE_AFTER - 60)
        with RunLock(tmp_path):
            assert "node7" not in (tmp_path / "lock").read_text()

    def test_a_beat_makes_the_file_young(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(lock, "BEAT_EVERY", 0.0)
        with RunLock(tmp_path) as held:
            os.utime(held.path, (0, 0))
            held.beat()
            assert time.time() - held.path.stat().st_mtime < 100

    def test_the_file_stays_young_while_its_holder_is_busy(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(lock, "TOUCH_EVERY", 0.02)
        with RunLock(tmp_path) as held:
            for _ in range(2):
                os.utime(held.path, (0, 0))
                until = time.monotonic() + 30
                while held.path.stat().st_mtime < 100 and time.monotonic() < until:
                    time.sleep(0.01)
                assert time.time() - held.path.stat().st_mtime < 100
        (tmp_path / "lock").touch()
        os.utime(tmp_path / "lock", (0, 0))
        time.sleep(0.1)
        assert (tmp_path / "lock").stat().st_mtime == 0, "of nobody any more"

    def test_a_holder_here_is_dead_if_its_number_belongs_to_another_process_now(
        self, tmp_path: Path
    ) -> None:
        here = Holder.this_process()
        self.left_by(
            tmp_path,
            seconds_ago=1,
            host=here.host,
            kernel=here.kernel,
            process_start=here.process_start - 1000,
        )
        with RunLock(tmp_path):
            pass

    def test_without_any_locks_a_living_holder_here_is_respected(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def unsupported(descriptor: int, operation: int) -> None:
            raise OSError(lock.errno.ENOSYS, "not here")

        monkeypatch.setattr(lock.fcntl, "flock", unsupported)
        with RunLock(tmp_path):
            with pytest.raises(InputError, match=f"process {os.getpid()}"), RunLock(tmp_path):
                pass
            assert (tmp_path / "lock").exists()

    def test_of_two_that_came_at_once_the_first_to_write_gives_up(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(
            lock.time, "sleep", lambda seconds: self.left_by(tmp_path, seconds_ago=0)
        )
        with pytest.raises(InputError, match="node7"), RunLock(tmp_path):
            pass
        assert "node7" in (tmp_path / "lock").read_text()


class TestInABatchJob:
    @pytest.fixture
    def job(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("SLURM_JOB_ID", "17")
        monkeypatch.setattr(lock, "LOOK_EVERY", 0.02)

    def test_a_held_lock_is_waited_for(
        self, job: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        holder = RunLock(tmp_path).take()
        threading.Timer(0.3, holder.release).start()
        with RunLock(tmp_path).take_in_job():
            assert (tmp_path / "lock").exists()
        said = capsys.readouterr().err
        assert said.count("waiting: the run directory") == 1

    def test_one_that_stays_is_a_failure_and_no_wrong_input(
        self, job: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(lock, "PATIENCE", 0.2)
        with RunLock(tmp_path):
            before = (tmp_path / "lock").read_bytes()
            with pytest.raises(
                HpczeroError, match=r"is in use by .* this job waited 0 s"
            ) as failed:
                RunLock(tmp_path).take_in_job()
            assert failed.value.exit_code == 1
            assert (tmp_path / "lock").read_bytes() == before

    def test_the_end_of_the_job_is_not_waited_for(
        self, job: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("HPCZERO_DEADLINE", str(int(time.time()) + 20))
        with RunLock(tmp_path), pytest.raises(HpczeroError, match="this job waited 0 s for it"):
            RunLock(tmp_path).take_in_job()

    def test_elsewhere_it_is_said_at_once(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for name in ("SLURM_JOB_ID", "PBS_JOBID"):
            monkeypatch.delenv(name, raising=False)
        with RunLock(tmp_path), pytest.raises(InputError, match="is in use by process"):
            RunLock(tmp_path).take_in_job()

    def test_what_cannot_be_locked_is_no_reason_to_wait(self, job: None, tmp_path: Path) -> None:
        (tmp_path / "lock").symlink_to("elsewhere")
        with pytest.raises(InputError, match="cannot write in the run directory"):
            RunLock(tmp_path).take_in_job()


def test_who_holds_a_folder_is_told_without_taking_it(tmp_path: Path) -> None:
    assert lock.living_holder(tmp_path) is None
    with RunLock(tmp_path):
        holder = lock.living_holder(tmp_path)
        assert holder is not None
        assert holder.pid == os.getpid()
    (tmp_path / "lock").write_text(json.dumps(asdict(holder) | {"pid": 2**22 + 1}))
    assert lock.living_holder(tmp_path) is None, "its process is gone"
    (tmp_path / "lock").unlink()
    os.mkfifo(tmp_path / "lock")
    assert lock.living_holder(tmp_path) is None
