"""A home folder that cannot be read, as on a compute node that has not mounted it: what lies
there is done without, and that is said.
"""

import os
import shutil
from pathlib import Path

import pytest

from hpczero import kernel_cache
from tests.support.launch import Finished, hpczero, launch

SPEC = """
[model]
layers = 1
hidden = 32
seq_len = 16
[data]
source = "synthetic"
[train]
steps = 2
"""


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "spec.toml").write_text(SPEC)
    (tmp_path / "home").mkdir(mode=0)
    return tmp_path / "home"


def started(home: Path, *arguments: str) -> Finished:
    """Without root's right to read everything."""
    plain: list[str] = []
    if os.geteuid() == 0:
        if not shutil.which("setpriv"):
            pytest.skip("root reads every folder, and there is no setpriv to give that up")
        plain = ["setpriv", "--bounding-set", "-dac_override,-dac_read_search"]
    places = {f"XDG_{kind}_HOME": "" for kind in ("CACHE", "CONFIG", "STATE")}
    return launch([*plain, *hpczero(*arguments)], 120, home.parent, {"HOME": str(home), **places})


def test_check_goes_on_and_says_so(home: Path) -> None:
    done = started(home, "check", "spec.toml")
    assert (done.code, done.err) == (0, "")
    assert (
        f"note: no profile of a site is taken from {home}/.config/hpczero/sites: Permission denied"
        in done.out
    )


def test_a_site_that_is_not_found_may_lie_there(home: Path) -> None:
    done = started(home, "check", "spec.toml", "--set", "batch.site=nix")
    assert done.code == 2
    assert f"{home}/.config/hpczero/sites: Permission denied" in done.err


@pytest.mark.parametrize("cache", [[], ["--set", "paths.cache=cache"]])
@pytest.mark.few(1)
def test_a_run_goes_on_and_says_so(home: Path, cache: list[str]) -> None:
    pytest.importorskip("torch", reason="training needs torch")
    pytest.importorskip("mpi4py", reason="training needs mpi4py")
    done = started(home, "run", "spec.toml", *cache)
    assert (done.code, done.err) == (0, ""), done
    assert done.out.count(f"{home}/.config/hpczero/sites: Permission denied") == 1


@pytest.mark.slow
def test_a_run_that_wants_its_cache_there_is_told_another_place(home: Path) -> None:
    pytest.importorskip("torch", reason="training needs torch")
    pytest.importorskip("mpi4py", reason="training needs mpi4py")
    done = started(home, "run", "spec.toml", "--set", "data.source=stdlib")
    assert done.code == 2, done
    assert (
        "cannot be used (Permission denied): set paths.cache to a folder that can be written"
        in done.err
    )


def test_kernels_are_compiled_where_nothing_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exists = Path.exists

    def refused(path: Path) -> bool:
        if "home" in path.parts:
            raise PermissionError(13, "Permission denied")
        return exists(path)

    monkeypatch.setattr(Path, "exists", refused)
    monkeypatch.setattr(kernel_cache, "_USERS", "json")
    kernel_cache._fill(tmp_path / "kernels", tmp_path / "home" / "kept")
    done: list[str] = []
    assert kernel_cache.once_per_computer(
        tmp_path / "home" / "kernels", "complete", lambda: done.append("here")
    )
    assert done == ["here"]
