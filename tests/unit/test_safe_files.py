"""Files in folders where others write: no link is followed, and nobody else's folder is taken."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hpczero import safe_files
from hpczero.cli import main
from hpczero.errors import InputError
from hpczero.lock import RunLock
from hpczero.spec.schema import Spec
from hpczero.train.run_directory import RunDirectory
from tests.support.launch import CHECKOUT

NOBODY, DAEMON = 65534, 1
AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    path = tmp_path / "victim"
    path.write_text("precious")
    return path


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder like /tmp: everybody writes there, and removes only what is their own.

    It lies in /tmp, as others cannot get through the folder that the tests' TMPDIR may name.
    """
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        os.chmod(folder, 0o1777)
        yield Path(folder)


OPENING: dict[str, Callable[[Path], object]] = {
    "open_for_writing": safe_files.open_for_writing,
    "create": safe_files.create,
    "open_lock": safe_files.open_lock,
    "append_to": safe_files.append_to,
    "touch": safe_files.touch,
    "write_new": lambda path: safe_files.write_new(path, "new"),
}


@pytest.mark.parametrize("name", OPENING)
def test_a_link_is_not_followed(name: str, tmp_path: Path, victim: Path) -> None:
    (tmp_path / "link").symlink_to(victim)
    (tmp_path / "dangling").symlink_to(tmp_path / "nothing")
    for link in ("link", "dangling"):
        with pytest.raises(OSError, match=r"it is a link|File exists"):
            OPENING[name](tmp_path / link)
    assert victim.read_text() == "precious"
    assert not (tmp_path / "nothing").exists()


@pytest.mark.parametrize("name", OPENING)
def test_a_pipe_neither_hangs_nor_is_written_to(name: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match=r"it is no plain file|File exists"):
        OPENING[name](tmp_path / "pipe")


@pytest.mark.parametrize("planted", ["file", "file.new"])
def test_a_file_written_whole_replaces_a_link(planted: str, tmp_path: Path, victim: Path) -> None:
    (tmp_path / planted).symlink_to(victim)
    safe_files.write_text(tmp_path / "file", "new")
    with safe_files.written_durably(tmp_path / "other") as file:
        file.write(b"new")
    assert victim.read_text() == "precious"
    assert not (tmp_path / "file").is_symlink()
    assert (tmp_path / "file").read_text() == (tmp_path / "other").read_text() == "new"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "other", "victim"]


def _write_half(path: Path) -> None:
    with safe_files.written_whole(path) as file:
        file.write(b"half")
        raise RuntimeError


def test_what_fails_leaves_what_had_the_name(tmp_path: Path, victim: Path) -> None:
    with pytest.raises(RuntimeError):
        _write_half(victim)
    assert victim.read_text() == "precious"
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="it is no plain file"):
        safe_files.write_text(tmp_path / "pipe", "text")
    assert (tmp_path / "pipe").is_fifo()
    with pytest.raises(FileNotFoundError, match=r"'.*/nowhere/file'$"):
        safe_files.write_text(tmp_path / "nowhere" / "file", "text")


def test_a_tree_is_not_removed_through_a_link(tmp_path: Path, victim: Path) -> None:
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "link").symlink_to(tmp_path)
    (tmp_path / "to_tree").symlink_to(tmp_path / "tree")
    safe_files.remove_tree(tmp_path / "to_tree")
    assert (tmp_path / "tree" / "link").is_symlink()
    safe_files.remove_tree(tmp_path / "tree")
    assert [path.name for path in tmp_path.iterdir()] == ["victim"]


WORK = ("lock", "train.tokens", "validation.documents", "journal.new", "journal.json.new")


@pytest.mark.parametrize("name", [*WORK, "assembled.h5"])
def test_a_build_writes_through_no_link_in_its_folder(
    name: str, tmp_path: Path, victim: Path
) -> None:
    (tmp_path / "text.txt").write_text("some text\n" * 1000)
    work = tmp_path / "made.h5.partial"
    work.mkdir()
    (work / name).symlink_to(victim)
    code = main(["data", "build", "-o", str(tmp_path / "made.h5"), str(tmp_path / "text.txt")])
    assert victim.read_text() == "precious"
    assert code == (1 if name == "lock" else 0)


@pytest.mark.parametrize("name", ["spec.toml.new", "metrics.jsonl", "events.jsonl", "lock"])
def test_a_run_writes_through_no_link_in_its_folder(
    name: str, tmp_path: Path, victim: Path
) -> None:
    spec = Spec(name="demo", output=str(tmp_path))
    RunDirectory.claim(spec, resume=False, fresh=False).close()
    (tmp_path / "demo" / name).unlink(missing_ok=True)
    (tmp_path / "demo" / name).symlink_to(victim)
    if name == "spec.toml.new":
        RunDirectory.claim(spec, resume=False, fresh=False).close()
    else:
        with pytest.raises(InputError, match="it is a link"):
            RunDirectory.claim(spec, resume=False, fresh=False)
    assert victim.read_text() == "precious"


@AS_ROOT
@pytest.mark.parametrize("through_link", [False, True])
def test_another_users_folder_is_refused(shared: Path, through_link: bool) -> None:
    folder = shared / "demo"
    folder.mkdir(mode=0o777)
    os.chown(folder, DAEMON, DAEMON)
    if through_link:
        (shared / "to_demo").symlink_to(folder)
        folder = shared / "to_demo"
    with pytest.raises(InputError, match=r"belongs to daemon \(user 1\), not to root \(user 0\)"):
        safe_files.make_own_folder(folder)
    with pytest.raises(InputError, match="belongs to daemon"):
        RunDirectory.claim(Spec(name=folder.name, output=str(shared)), resume=False, fresh=False)
    assert not list(folder.iterdir())


@AS_ROOT
def test_a_link_of_another_user_is_refused_and_ones_own_is_not(shared: Path) -> None:
    (shared / "mine").mkdir()
    (shared / "link").symlink_to(shared / "mine")
    assert not safe_files.make_own_folder(shared / "link")
    os.chown(shared / "link", DAEMON, DAEMON, follow_symlinks=False)
    with pytest.raises(InputError, match="is a link that belongs to daemon"):
        safe_files.make_own_folder(shared / "link")


@AS_ROOT
def test_a_user_neither_builds_nor_runs_in_what_another_one_has_planted(
    shared: Path, victim: Path
) -> None:
    text, goal = shared / "text.txt", shared / "goal"
    text.write_text("some text\n" * 100)
    goal.write_text("precious")
    os.chown(goal, NOBODY, NOBODY)
    for name in ("made.h5.partial", "demo"):
        (shared / name).mkdir()
        os.chmod(shared / name, 0o777)
        os.chown(shared / name, DAEMON, DAEMON)
    for name in ("made.h5.partial/lock", "made.h5.partial/train.tokens", "demo/spec.toml.new"):
        (shared / name).symlink_to(goal)
        os.chown(shared / name, DAEMON, DAEMON, follow_symlinks=False)
    built = _as_nobody(shared, f"main(['data', 'build', '-o', '{shared}/made.h5', '{text}'])")
    assert built.returncode == 2, built.stderr
    assert "made.h5.partial exists and is a folder that belongs to daemon" in built.stderr
    claimed = _as_nobody(shared, f"claim(Spec(name='demo', output='{shared}'), False, False)")
    assert "demo exists and is a folder that belongs to daemon" in claimed.stderr
    assert goal.read_text() == "precious"


def _as_nobody(home: Path, what: str) -> subprocess.CompletedProcess[str]:
    """Imports come first: the checkout and Python itself may be out of another user's reach."""
    program = f"""
import os, sys
import h5py
import hpczero.commands.data
from hpczero.cli import main
from hpczero.spec.schema import Spec
from hpczero.train.run_directory import RunDirectory
claim = RunDirectory.claim
os.setgroups([])
os.setgid({NOBODY})
os.setuid({NOBODY})
sys.exit({what})
"""
    path = f"{CHECKOUT}:{CHECKOUT}/numba_cuda"
    environment = {"HOME": str(home), "PATH": os.defpath, "PYTHONPATH": path}
    command = [sys.executable, "-c", program]
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=120, check=False
    )


@AS_ROOT
def test_a_folder_whose_files_are_ones_own_to_the_file_server_is_taken(
    shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that knows root as nobody: what root makes is nobody's."""
    (shared / "demo").mkdir()
    os.chown(shared / "demo", NOBODY, NOBODY)
    monkeypatch.setattr(safe_files, "_owner_of_what_is_made_in", lambda folder: NOBODY)
    assert not safe_files.make_own_folder(shared / "demo")


def test_a_lock_that_is_a_link_or_a_pipe_is_one_error(tmp_path: Path, victim: Path) -> None:
    (tmp_path / "lock").symlink_to(victim)
    with pytest.raises(InputError, match="it is a link"):
        RunLock(tmp_path).take()
    (tmp_path / "lock").unlink()
    os.mkfifo(tmp_path / "lock")
    with pytest.raises(InputError, match="it is no plain file"):
        RunLock(tmp_path).take()


def test_what_another_process_has_half_written_gets_no_name(tmp_path: Path) -> None:
    path = tmp_path / "file"
    second = safe_files.written_whole(path)

    def both() -> None:
        with safe_files.written_whole(path) as first:
            first.write(b"first")
            second.__enter__().write(b"sec")

    with pytest.raises(OSError, match="at the same time"):
        both()
    assert not path.exists()
    second.__exit__(None, None, None)
    assert path.read_bytes() == b"sec"
    assert [one.name for one in tmp_path.iterdir()] == ["file"]


def test_what_is_written_durably_is_in_the_file_when_the_disk_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sizes of what os.fsync sees: a buffer that is still to be written would be lost."""
    sizes = []
    sync = os.fsync
    monkeypatch.setattr(
        os, "fsync", lambda file: sizes.append(os.fstat(file).st_size) or sync(file)
    )
    with safe_files.written_durably(tmp_path / "file") as file:
        file.write(b"12345")
    assert sizes[0] == 5
    assert len(sizes) == 2  # the folder's entry, too


def test_a_read_that_returns_less_goes_on_behind_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "text"
    path.write_bytes(b"0123456789")
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda file, into, at: preadv(file, [into[0][:3]], at))
    room = bytearray(20)
    with path.open("rb") as file:
        assert safe_files.read_at(file.fileno(), memoryview(room), 1) == 9
    assert room == b"123456789" + bytes(11)
