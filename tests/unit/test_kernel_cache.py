"""Kernels are compiled once on a computer, whoever comes first, and lie where nobody else can write."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hpczero import kernel_cache

pytest.importorskip("llvmlite")
ONE = """
import sys, time
from pathlib import Path
from hpczero.kernel_cache import once
folder = Path(sys.argv[1])
def compiles():
    with (folder / "compiled").open("a") as file:
        file.write("x")
    time.sleep(0.3)
once(folder, "done", compiles)
assert (folder / "compiled").read_text() == "x"
"""


def test_one_process_compiles_and_the_others_wait_for_it(tmp_path: Path) -> None:
    processes = [subprocess.Popen([sys.executable, "-c", ONE, str(tmp_path)]) for _ in range(4)]
    assert [process.wait() for process in processes] == [0] * 4
    assert (tmp_path / "compiled").read_text() == "x"


def test_what_failed_is_tried_again_by_the_next(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        kernel_cache.once(tmp_path, "done", lambda: 1 // 0)
    assert kernel_cache.once(tmp_path, "done", lambda: None)
    assert not kernel_cache.once(tmp_path, "done", lambda: 1 // 0)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "local").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "local"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    return tmp_path / "local" / f"hpczero-{os.getuid()}"


def test_the_folder_is_this_users_alone(cache: Path) -> None:
    assert kernel_cache._own_folder("key") == cache / "key"
    assert cache.stat().st_mode & 0o777 == 0o700
    cache.chmod(0o770)
    assert kernel_cache._own_folder("key") is None
    cache.chmod(0o700)
    cache.rename(cache.with_name("elsewhere"))
    cache.symlink_to("elsewhere")
    assert kernel_cache._own_folder("key") is None


def test_a_new_computer_takes_what_another_has_compiled(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    def compiled(name: str) -> object:
        made.append(name)
        (folder / "kernel.nbc").write_text("code")
        return object()

    monkeypatch.setattr(kernel_cache.importlib, "import_module", compiled)
    kept = tmp_path / "home" / "hpczero" / "kernels" / "key"
    for number in range(2):
        folder = tmp_path / f"computer{number}" / "key"
        folder.mkdir(parents=True)
        kernel_cache._fill(folder, kept)
        assert (folder / "kernel.nbc").read_text() == "code"
    assert made == ["hpczero.train.run"]
    assert [path.name for path in kept.parent.iterdir()] == ["key"]


def test_the_key_follows_the_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "hpczero_kernels").mkdir()
    source = tmp_path / "hpczero_kernels" / "precision.py"
    (tmp_path / "hpczero_kernels" / "__init__.py").touch()
    spec = kernel_cache.find_spec("hpczero_kernels")
    assert spec
    spec.submodule_search_locations = [str(tmp_path / "hpczero_kernels")]
    monkeypatch.setattr(kernel_cache, "find_spec", lambda name: spec)
    source.write_text("one")
    first = kernel_cache._key()
    assert kernel_cache._key() == first
    source.write_text("two")
    assert kernel_cache._key() != first
