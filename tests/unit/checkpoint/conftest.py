"""Fixtures: a checkpoint that a test may change, and a file outside of it that nobody may open."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.checkpoints import Grid, Wanted, look_without_a_process, make, parameters
from tests.support.crafted import watch_opening

WANTED = Wanted(layers=parameters(a=(30, 7), b=(11,)), spec={"name": "crafted"})


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("whole"), Grid(data=2, per_file=1), WANTED)


@pytest.fixture
def crafted(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / whole.name))


@pytest.fixture
def secret(whole: Path, tmp_path: Path) -> Iterator[Path]:
    """A file outside of the checkpoint; opening it fails the test."""
    path = Path(shutil.copy(whole / "shard-00000.h5", tmp_path / "secret.h5"))
    watch = watch_opening(path)
    yield path
    try:
        opened = os.read(watch, 4096)
    except BlockingIOError:
        opened = b""
    os.close(watch)
    assert not opened, "the file outside was opened"


@pytest.fixture
def hdf5_in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    look_without_a_process(monkeypatch)
