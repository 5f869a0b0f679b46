"""A full disk ends a build with an error that names the path, and the build can be resumed."""

import os
import re
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpczero.data.token_file import open_token_file
from tests.support.token_files import make


@pytest.mark.parametrize("limit", [5_000, 300_000, 1_500_000])
@pytest.mark.few(1)
def test_a_full_disk_is_an_error_with_path_and_bytes_and_can_be_resumed(
    text: Path, tmp_path: Path, limit: int
) -> None:
    """A limit on the size of files stands in for a full disk: a write fails half-way with an
    OSError.
    """
    program = (
        "import sys\n"
        "from pathlib import Path\n"
        "from hpczero.data.build import *\n"
        "from hpczero.data.corpus import find\n"
        "from hpczero.data.encode import Effort\n"
        "class Quiet:\n said = advanced = copied = lambda *_: None\n"
        "text, output = sys.argv[1:]\n"
        "work = Path(output + '.partial')\n"
        "recipe = Recipe(validation_fraction=0.1)\n"
        "build_token_file(find([text]), Path(output), recipe, work, Quiet(), Effort(1))"
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
    """A file system so small that the tokens fit on it and the finished file does not."""
    folder = tmp_path / "small"
    folder.mkdir()
    options = ["mount", "-t", "tmpfs", "-o", "size=2600k", "tmpfs", str(folder)]
    mounted = subprocess.run(options, capture_output=True, text=True, check=False)
    if mounted.returncode:
        pytest.skip(f"a small tmpfs cannot be mounted: {mounted.stderr.strip() or os.geteuid()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.parametrize("filled", [0, 400, 900, 1300])
@pytest.mark.few(1)
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
@pytest.mark.few(1)
def test_a_disk_that_is_full_but_for_some_pages_is_no_crash(
    small_disk: Path, tmp_path: Path, pages: int
) -> None:
    """All tokens fit; HDF5's own structure does not."""
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
