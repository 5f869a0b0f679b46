"""The text of Python's library as a source: one rank builds it once, and a failed build leaves
nothing.
"""

import fcntl
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from hpczero.data import dataset
from hpczero.data.dataset import open_source
from hpczero.errors import HpczeroError, InputError
from hpczero.spec.schema import Data, Paths
from tests.support.token_files import alone, spec_of


@pytest.fixture
def small_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A library with two texts, and files that hpczero must not count among them."""
    library = tmp_path / "lib"
    for name in (
        "abc.py",
        "json/decoder.py",
        "test/test_abc.py",
        "site-packages/numpy/x.py",
        "json/tests/t.py",
        "__pycache__/abc.txt",
    ):
        (library / name).parent.mkdir(parents=True, exist_ok=True)
        (library / name).write_text(f"# {name}\n" * 500)
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"stdlib": str(library)})
    return library


def test_the_librarys_text_is_built_once_and_said(
    small_library: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = spec_of("stdlib", eval_batches=0, paths=Paths(cache=str(tmp_path / "cache")))
    source = open_source(asked, alone)
    assert source.describe()["documents"] == {"train": 2, "validation": 0}
    assert capsys.readouterr().err.count("\n") == 1
    [made] = (tmp_path / "cache").iterdir()
    assert source.describe()["path"] == str(made)
    before = made.stat()
    open_source(asked, alone)
    assert (capsys.readouterr().err, made.stat()) == ("", before)
    other = asked.model_copy(update={"data": Data(validation_fraction=0.5)})
    assert open_source(other, alone).describe()["documents"] == {"train": 1, "validation": 1}
    assert len(list((tmp_path / "cache").iterdir())) == 2


def test_many_builders_at_once_do_no_harm(small_library: Path, tmp_path: Path) -> None:
    asked = spec_of("stdlib", eval_batches=0, paths=Paths(cache=str(tmp_path / "cache")))
    start, fingerprints = threading.Barrier(4), []

    def build() -> None:
        start.wait(10)
        fingerprints.append(open_source(asked, alone).describe()["fingerprint"])

    threads = [threading.Thread(target=build) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(fingerprints) == 4
    assert len(set(fingerprints)) == 1
    assert len(list((tmp_path / "cache").iterdir())) == 1


def test_one_rank_builds_and_the_others_wait_for_its_verdict(
    small_library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = spec_of("stdlib", eval_batches=0, paths=Paths(cache=str(tmp_path / "cache")))
    said: list[Any] = []

    def share_of_rank_0(value: Any) -> Any:
        said.append(value)
        return value

    first = open_source(asked, share_of_rank_0, is_builder=True)
    with monkeypatch.context() as patched:
        patched.setattr(
            dataset, "library_token_file", lambda spec: pytest.fail("a second rank builds")
        )
        second = open_source(asked, lambda value: said[0], is_builder=False)
    assert first.describe() == second.describe()
    with pytest.raises(InputError, match=r"is not seen here: set paths\.cache"):
        open_source(
            asked, lambda value: {"path": str(tmp_path / "on another node.h5")}, is_builder=False
        )


def test_every_rank_gets_the_builders_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    asked = spec_of("stdlib", paths=Paths(cache=str(tmp_path / "file" / "cache")))
    said: list[Any] = []
    refusal = r"file/cache cannot be used .*set paths\.cache"
    with pytest.raises(InputError, match=refusal) as builders:
        open_source(asked, lambda value: said.append(value) or value)
    with pytest.raises(InputError) as others:
        open_source(asked, lambda value: said[0], is_builder=False)
    assert str(others.value) == str(builders.value)


def test_a_failed_build_leaves_nothing(
    small_library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise HpczeroError("no room")

    monkeypatch.setattr("hpczero.data.build.fill_token_file", full)
    with pytest.raises(InputError, match=r"no room \(paths\.cache"):
        open_source(spec_of("stdlib", paths=Paths(cache=str(tmp_path / "cache"))), alone)
    assert list((tmp_path / "cache").iterdir()) == []


def test_what_killed_builders_left_is_removed_and_what_others_build_stays(
    small_library: Path, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    for name in (".building-dead", ".building-living", ".building-new"):
        (cache / name).mkdir(parents=True)
        (cache / name / "lock").touch()
        (cache / name / "train.tokens").write_bytes(b"1234")
        if name != ".building-new":
            os.utime(cache / name, (0, 0))
    with open(cache / ".building-living" / "lock") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        open_source(spec_of("stdlib", eval_batches=0, paths=Paths(cache=str(cache))), alone)
    left = sorted(path.name for path in cache.glob(".building-*"))
    assert left == [".building-living", ".building-new"]


_KILLED_AT = """
import os, signal, sys
from pathlib import Path
from hpczero.data import build, dataset
from hpczero.spec.schema import Paths, Spec
library, cache, moment = sys.argv[1:]
dataset.sysconfig.get_paths = lambda: {"stdlib": library}
owner = build.Reader if moment == "read" else build
whole = getattr(owner, moment)
def killed(*words):
    if moment == "read":
        whole(*words)
    os.kill(os.getpid(), signal.SIGKILL)
setattr(owner, moment, killed)
dataset.library_token_file(Spec(name="killed", paths=Paths(cache=cache)))
"""


@pytest.mark.parametrize("moment", ["read", "fill_token_file", "give_name"])
@pytest.mark.few(1)
def test_a_killed_build_leaves_nothing(small_library: Path, tmp_path: Path, moment: str) -> None:
    cache = tmp_path / "cache"
    command = [sys.executable, "-c", _KILLED_AT, str(small_library), str(cache), moment]
    killed = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert list(cache.iterdir()) == []


def test_without_nameless_files_the_same_bytes_are_made(
    small_library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = [spec_of("stdlib", paths=Paths(cache=str(tmp_path / name))) for name in ("a", "b")]
    one = dataset.library_token_file(asked[0])
    monkeypatch.setattr("hpczero.data.build.create_nameless", lambda folder: None)
    other = dataset.library_token_file(asked[1])
    assert one.read_bytes() == other.read_bytes()
    assert [path.name for path in (tmp_path / "b").iterdir()] == [other.name]
