"""Pipes and devices where a file is expected: an error at once, and no waiting for what never
comes.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

KINDS = ["pipe", "device", "folder"]


def odd(path: Path, kind: str) -> Path:
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        path.mkdir()
    return path


def refused(*words: str | Path) -> str:
    """Return what is said; a command that hangs fails here."""
    command = [sys.executable, "-m", "hpczero", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr


@pytest.mark.parametrize("kind", KINDS[:2])
def test_an_import_of_what_is_no_file_is_refused(tmp_path: Path, kind: str) -> None:
    (tmp_path / "spec.toml").write_text("")
    path = odd(tmp_path / "in.safetensors", kind)
    out = tmp_path / "run"
    said = refused("ckpt", "import", path, "--spec", tmp_path / "spec.toml", "-o", out)
    assert "in.safetensors: it is no plain file" in said
    assert not out.exists()


@pytest.mark.parametrize("kind", [*KINDS[:2], "file", "nothing"])
@pytest.mark.few(1)
def test_an_export_to_what_is_no_folder_is_refused(tmp_path: Path, kind: str) -> None:
    """Nor is anything made where one above it is none."""
    path = tmp_path / "out"
    if kind == "file":
        path.touch()
    elif kind == "nothing":
        path.symlink_to("nowhere")
    else:
        odd(path, kind)
    for words in ([path, "--hf"], [path], [path / "x", "--hf"], [path / "model.safetensors"]):
        assert "out is no folder" in refused("ckpt", "export", tmp_path / "run", *words)
    assert os.listdir(tmp_path) == ["out"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.few(1)
def test_a_data_source_that_is_no_file_is_refused(tmp_path: Path, kind: str) -> None:
    path = odd(tmp_path / "text.h5", kind)
    (tmp_path / "spec.toml").write_text(f'data.source = "{path}"\n')
    assert "text.h5" in refused("check", tmp_path / "spec.toml")
    assert "text.h5" in refused("data", "show", path)
