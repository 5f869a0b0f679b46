"""The builder: the same bytes whatever happens on the way."""

import errno
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from hpczero.data.build import Recipe, build_token_file, is_up_to_date
from hpczero.data.corpus import find
from hpczero.data.token_file import TokenFile, open_token_file
from hpczero.errors import HpczeroError, InputError


class Heard:
    """A listener that notes what it hears, and may act after so many advances."""

    def __init__(self, after: int = -1, act: Callable[[], None] = lambda: None) -> None:
        self.lines: list[str] = []
        self._after, self._act, self.advances = after, act, 0

    def said(self, line: str) -> None:
        self.lines.append(line)

    def advanced(self, done: int, total: int) -> None:
        assert 0 <= done <= total
        self.advances += 1
        if self.advances == self._after:
            self._act()

    def copied(self, done: int, total: int) -> None:
        assert 0 <= done <= total


@pytest.fixture
def text(tmp_path: Path) -> Path:
    folder = tmp_path / "text"
    folder.mkdir()
    for number in range(12):
        (folder / f"{number:02}.txt").write_text(
            f"document {number} äöü\n" * (50 + 37 * number), encoding="utf-8"
        )
    (folder / "long.md").write_text(
        "".join(f"line {number} of a long file\n" for number in range(30_000))
    )
    with open(folder / "lines.jsonl", "w") as file:
        for number in range(200):
            print(json.dumps({"text": f"record {number}\n" * (number % 40)}), file=file)
        print(json.dumps({"text": "long\n" * 100_000}), file=file)
    (folder / "damaged.txt").write_bytes(b"caf\xe9 " * 100)
    return folder


def make(
    text: Path,
    output: Path,
    listener: Heard | None = None,
    fraction: float = 0.1,
    commit_every: int = 50_000,
) -> TokenFile:
    work = output.with_name(output.name + ".partial")
    return build_token_file(
        find([str(text)]), output, Recipe("byte", fraction), work, listener or Heard(), commit_every
    )


def documents(file: TokenFile, split: str) -> list[bytes]:
    tokens = np.asarray(file.splits[split].tokens)
    ends = np.flatnonzero(tokens == 256)
    return [bytes(part[part != 256].astype(np.uint8)) for part in np.split(tokens, ends + 1)[:-1]]


def test_the_text_is_in_it_once_in_order(text: Path, tmp_path: Path) -> None:
    made = make(text, tmp_path / "a.h5", fraction=0.0)
    expected = [(text / f"{number:02}.txt").read_bytes() for number in range(12)]
    expected.append("caf\ufffd ".encode() * 100)
    expected += [
        f"record {number}\n".encode() * (number % 40) for number in range(200) if number % 40
    ] + [b"long\n" * 100_000]
    expected.append((text / "long.md").read_bytes())
    assert documents(made, "train") == expected
    assert made.splits["train"].documents == len(expected)
    assert len(made.splits["validation"].tokens) == made.splits["validation"].documents == 0
    assert made.splits["train"].counts[256] == len(expected)
    assert np.array_equal(
        made.splits["train"].counts, np.bincount(made.splits["train"].tokens, minlength=257)
    )
    assert not (tmp_path / "a.h5.partial").exists()


@pytest.mark.parametrize("fraction", [0.01, 0.05, 0.3, 0.5, 0.95])
def test_validation_follows_its_share(text: Path, tmp_path: Path, fraction: float) -> None:
    made = make(text, tmp_path / "a.h5", fraction=fraction, commit_every=2**30)
    train, validation = len(made.splits["train"].tokens), len(made.splits["validation"].tokens)
    assert (
        abs(validation - fraction * (train + validation)) <= 140 * 1024 / 2
    )  # half of the longest piece
    pieces = b"".join(documents(made, "train") + documents(made, "validation"))
    assert len(pieces) == sum(
        map(
            len,
            documents(make(text, tmp_path / "all.h5", fraction=0.0, commit_every=2**30), "train"),
        )
    )


def test_one_long_file_has_a_part_in_both_splits(tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text("".join(f"line {number}\n" for number in range(200_000)))
    made = build_token_file(
        find([str(tmp_path / "one.txt")]), tmp_path / "a.h5", Recipe(), tmp_path / "work", Heard()
    )
    assert 0.03 < len(made.splits["validation"].tokens) / len(made.splits["train"].tokens) < 0.08
    assert all(
        document.endswith(b"\n") for split in made.splits for document in documents(made, split)
    )


def test_same_text_elsewhere_and_later_gives_the_same_bytes(text: Path, tmp_path: Path) -> None:
    make(text, tmp_path / "a.h5", commit_every=10_000)
    shutil.copytree(text, tmp_path / "other" / "place", copy_function=shutil.copyfile)
    make(tmp_path / "other" / "place", tmp_path / "b.h5", commit_every=2**30)
    assert (tmp_path / "a.h5").read_bytes() == (tmp_path / "b.h5").read_bytes()
    assert (
        make(text, tmp_path / "c.h5", fraction=0.2).fingerprint
        != open_token_file(tmp_path / "a.h5").fingerprint
    )


def in_child(action: Callable[[], object]) -> int:
    """Runs the action in a forked process; what that ended with."""
    pid = os.fork()
    if pid == 0:
        try:
            action()
        finally:
            os._exit(7)
    return os.waitpid(pid, 0)[1]


@pytest.mark.parametrize(("commit_every", "stride"), [(1, 83), (60_000, 23)])
def test_killed_anywhere_it_goes_on_to_the_same_bytes(
    text: Path, tmp_path: Path, commit_every: int, stride: int
) -> None:
    heard = Heard()
    make(text, tmp_path / "whole.h5", heard, commit_every=2**30)
    whole = (tmp_path / "whole.h5").read_bytes()
    resumed = 0
    for after in [1, 2, *range(3, heard.advances, stride), heard.advances - 1]:
        output = tmp_path / "killed.h5"
        status = in_child(
            lambda: make(
                text,
                output,  # noqa: B023
                Heard(after, lambda: os.kill(os.getpid(), signal.SIGKILL)),  # noqa: B023
                commit_every=commit_every,
            )
        )
        assert os.WTERMSIG(status) == signal.SIGKILL
        assert not output.exists()
        again = Heard()
        make(text, output, again, commit_every=commit_every)
        resumed += any("resuming after" in line for line in again.lines)
        assert output.read_bytes() == whole
        assert not (tmp_path / "killed.h5.partial").exists()
        output.unlink()
    assert resumed >= 3


def test_killed_many_times_in_a_row_it_still_comes_to_the_same_bytes(
    text: Path, tmp_path: Path
) -> None:
    make(text, tmp_path / "whole.h5")
    for _ in range(40):
        in_child(
            lambda: make(
                text,
                tmp_path / "a.h5",
                Heard(25, lambda: os.kill(os.getpid(), signal.SIGKILL)),
                commit_every=1,
            )
        )
        if (tmp_path / "a.h5").exists():
            break
    assert (tmp_path / "a.h5").read_bytes() == (tmp_path / "whole.h5").read_bytes()


@pytest.mark.parametrize("name", ["write_token_file", "replace_file"])
def test_killed_while_the_file_is_put_together_it_goes_on(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    make(text, tmp_path / "whole.h5")
    real = getattr(sys.modules["hpczero.data.build"], name)

    def killed(path: Path, *rest: object) -> None:
        if path.name == "assembled.h5":
            path.write_bytes(b"half")
            os.kill(os.getpid(), signal.SIGKILL)
        real(path, *rest)

    with monkeypatch.context() as patched:
        patched.setattr(f"hpczero.data.build.{name}", killed)
        assert os.WTERMSIG(in_child(lambda: make(text, tmp_path / "a.h5"))) == signal.SIGKILL
    heard = Heard()
    make(text, tmp_path / "a.h5", heard)
    assert heard.lines[0].startswith("resuming after")
    assert (tmp_path / "a.h5").read_bytes() == (tmp_path / "whole.h5").read_bytes()


def interrupted(text: Path, output: Path) -> Path:
    """A work folder with a journal in the middle of the text."""

    def stop() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make(text, output, Heard(30, stop), commit_every=1)
    return output.with_name(output.name + ".partial")


@pytest.mark.parametrize("change", ["content", "recipe", "journal", "raw files"])
def test_what_changed_meanwhile_starts_it_over_and_is_said(
    text: Path, tmp_path: Path, change: str
) -> None:
    work = interrupted(text, tmp_path / "a.h5")
    fraction = 0.1
    if change == "content":
        (text / "01.txt").write_text("something else")
    elif change == "recipe":
        fraction = 0.3
    elif change == "journal":
        (work / "journal.json").write_text('{"done": 3}')
    else:
        os.truncate(work / "train.tokens", 10)
    heard = Heard()
    make(text, tmp_path / "a.h5", heard, fraction=fraction)
    assert heard.lines[0].startswith("starting over: ")
    make(text, tmp_path / "b.h5", fraction=fraction)
    assert (tmp_path / "a.h5").read_bytes() == (tmp_path / "b.h5").read_bytes()


def test_a_mistake_further_on_can_be_mended_without_starting_over(
    text: Path, tmp_path: Path
) -> None:
    with open(text / "z.jsonl", "w") as file:
        file.write('{"text": "good"}\n{"txt": "bad"}\n')
    with pytest.raises(InputError, match=r"z\.jsonl:2: "):
        make(text, tmp_path / "a.h5")
    (text / "z.jsonl").write_text('{"text": "good"}\n{"text": "mended"}\n')
    heard = Heard()
    made = make(text, tmp_path / "a.h5", heard, commit_every=1)
    assert b"mended" in documents(made, "train") + documents(made, "validation")


def test_a_file_that_changes_while_it_is_read_is_an_error(text: Path, tmp_path: Path) -> None:
    def grow() -> None:
        with open(text / "long.md", "a") as file:
            file.write("more\n")

    with pytest.raises(HpczeroError, match=r"long\.md changed while"):
        make(text, tmp_path / "a.h5", Heard(1, grow))


def test_a_second_builder_is_refused(text: Path, tmp_path: Path) -> None:
    errors = []

    def second() -> None:
        with pytest.raises(InputError, match="another process is building") as raised:
            make(text, tmp_path / "a.h5")
        errors.append(raised)

    make(text, tmp_path / "a.h5", Heard(5, second))
    assert len(errors) == 1


def test_a_file_system_without_locks_is_said(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unsupported(*_: object) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", unsupported)
    heard = Heard()
    make(text, tmp_path / "a.h5", heard)
    assert "cannot be locked (Function not implemented)" in heard.lines[0]


def test_up_to_date_means_same_recipe_same_names_and_sizes_and_none_newer(
    text: Path, tmp_path: Path
) -> None:
    made = make(text, tmp_path / "a.h5")
    assert is_up_to_date(made, find([str(text)]), Recipe("byte", 0.1))
    assert not is_up_to_date(made, find([str(text)]), Recipe("byte", 0.2))
    assert not is_up_to_date(made, find([str(text / "01.txt")]), Recipe("byte", 0.1))
    later = made.path.stat().st_mtime_ns + 10**9
    os.utime(text / "01.txt", ns=(later, later))
    assert not is_up_to_date(made, find([str(text)]), Recipe("byte", 0.1))


def test_what_could_not_be_read_is_counted_and_named(text: Path, tmp_path: Path) -> None:
    (text / "broken.txt").symlink_to(text / "nothing")
    gone = text / "gone.txt"
    gone.write_text("gone")
    (text / "x.bin").touch()
    heard = Heard(1, gone.unlink)
    make(text, tmp_path / "a.h5", heard)
    assert "left out, being of other kinds: 1 files" in heard.lines
    assert any(
        "cannot be read: 2 (" in line and "gone.txt (No such file" in line and "broken.txt" in line
        for line in heard.lines
    )
    assert any(
        "not UTF-8" in line and "1 files" in line and "damaged.txt" in line for line in heard.lines
    )


@pytest.mark.parametrize("limit", [5_000, 300_000, 1_500_000])
def test_a_full_disk_is_an_error_with_path_and_bytes_and_can_be_resumed(
    text: Path, tmp_path: Path, limit: int
) -> None:
    """A limit on the size of files stands in for the end of the disk: writing fails half-way,
    with an OSError as well.
    """
    program = (
        "import sys; from pathlib import Path; from hpczero.data.build import *; from "
        "hpczero.data.corpus import find\n"
        "class Quiet:\n said = advanced = copied = lambda *_: None\n"
        "build_token_file(find([sys.argv[1]]), Path(sys.argv[2]), Recipe('byte', 0.1), "
        "Path(sys.argv[2] + '.partial'), Quiet(), 1)"
    )

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    command = [sys.executable, "-c", program, str(text), str(tmp_path / "a.h5")]
    ended = subprocess.run(
        command, preexec_fn=limited, capture_output=True, text=True, check=False, timeout=60
    )
    assert "HpczeroError" in ended.stderr.splitlines()[-1]
    assert f"{tmp_path}/a.h5.partial/" in ended.stderr.splitlines()[-1]
    assert "bytes so far" in ended.stderr.splitlines()[-1]
    assert not (tmp_path / "a.h5").exists()
    make(text, tmp_path / "a.h5")
    make(text, tmp_path / "b.h5")
    assert (tmp_path / "a.h5").read_bytes() == (tmp_path / "b.h5").read_bytes()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of so few kilobytes that tokens fit on it and their file does not."""
    folder = tmp_path / "small"
    folder.mkdir()
    options = ["mount", "-t", "tmpfs", "-o", "size=2600k", "tmpfs", str(folder)]
    mounted = subprocess.run(options, capture_output=True, text=True, check=False)
    if mounted.returncode:
        pytest.skip(f"a small tmpfs cannot be mounted: {mounted.stderr.strip() or os.geteuid()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.parametrize("filled", [0, 400, 900, 1300])
def test_a_disk_that_is_full_is_an_error_and_no_crash(
    text: Path, small_disk: Path, tmp_path: Path, filled: int
) -> None:
    (small_disk / "filling").write_bytes(bytes(filled << 10))
    command = [
        sys.executable,
        "-m",
        "hpczero",
        "data",
        "build",
        "-o",
        str(small_disk / "a.h5"),
        str(text),
    ]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert ended.returncode == 1, ended.stderr
    assert re.search(
        r"^hpczero: \S+/a.h5.partial/\S+ cannot be written \(\d+ bytes so far\): No space left",
        ended.stderr,
        re.MULTILINE,
    )
    assert not (small_disk / "a.h5").exists()
    subprocess.run(["mount", "-o", "remount,size=100m", str(small_disk)], check=True)
    assert subprocess.run(command, capture_output=True, check=False, timeout=120).returncode == 0
    make(text, tmp_path / "b.h5", fraction=0.05)
    assert (small_disk / "a.h5").read_bytes() == (tmp_path / "b.h5").read_bytes()


@pytest.mark.parametrize("pages", [1, 2, 3])
def test_a_disk_that_is_full_but_for_some_pages_is_no_crash(
    small_disk: Path, tmp_path: Path, pages: int
) -> None:
    """All tokens fit, and then HDF5's own structure does not."""
    (tmp_path / "one.txt").write_text(
        "".join(f"line {number} of a long file\n" for number in range(20_000))
    )
    command = [sys.executable, "-m", "hpczero", "data", "build", str(tmp_path / "one.txt"), "-o"]
    assert (
        subprocess.run(
            [*command, str(tmp_path / "b.h5")], capture_output=True, check=False
        ).returncode
        == 0
    )
    made = open_token_file(tmp_path / "b.h5")
    raw = [
        size for split in made.splits.values() for size in (split.tokens.nbytes, split.ends.nbytes)
    ]
    needed = sum(-(-size // 4096) for size in [*raw, made.path.stat().st_size])
    (small_disk / "filling").write_bytes(bytes((650 - needed - 4 + pages) * 4096))
    ended = subprocess.run(
        [*command, str(small_disk / "a.h5")], capture_output=True, text=True, check=False
    )
    assert ended.returncode in (0, 1), ended.stderr
    assert (ended.returncode == 0) == (small_disk / "a.h5").exists()
