"""Fixtures: a folder with the spec of a tiny run, before and after the run."""

import shutil
from pathlib import Path

import pytest

from tests.support.tiny_run import SPEC, train


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "spec.toml").write_text(SPEC)
    return tmp_path


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    (folder / "spec.toml").write_text(SPEC)
    assert train(folder, 0).code == 0
    return folder


@pytest.fixture
def finished(trained: Path, tmp_path: Path) -> Path:
    """A copy of a folder with a finished run, which the test may change."""
    return Path(shutil.copytree(trained, tmp_path, dirs_exist_ok=True))
