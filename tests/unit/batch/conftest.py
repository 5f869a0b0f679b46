"""Fixtures: the folder of a user of PBS, whose programs are fakes (tests/support/fakes.py)."""

import os
from pathlib import Path

import pytest

from hpczero.batch import submit
from tests.support import fakes
from tests.support.fakes import SPEC


@pytest.fixture
def queue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    queue = fakes.install(tmp_path / "pbs")
    monkeypatch.setenv("PATH", f"{tmp_path / 'pbs' / 'bin'}{os.pathsep}/usr/bin:/bin")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("SECRET_OF_MINE", "hunter2-and-more")
    monkeypatch.setattr(submit, "_BETWEEN", (0.0, 0.0, 0.0, 0.0))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "spec.toml").write_text(SPEC)
    return queue
