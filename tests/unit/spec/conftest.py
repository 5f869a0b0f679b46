"""Fixture: spec files in the working directory of a test."""

from pathlib import Path

import pytest

from tests.support.specs import Write


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Write a spec file into a new working directory; return its name."""
    monkeypatch.chdir(tmp_path)

    def write(text: str | bytes, name: str = "spec.toml") -> str:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return name

    return write
