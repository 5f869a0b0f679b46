"""The process in which `verify` asks the HDF5 library: it may die, and the checkpoint's reader
not.
"""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from hpczero.checkpoint.load import Checkpoint
from hpczero.cli import main
from tests.support.checkpoints import Grid, Wanted, make, parameters, seal

WANTED = Wanted(layers=parameters(a=(30, 7), b=(11,)), spec={"name": "crafted"})


@pytest.fixture
def crafted(tmp_path: Path) -> Path:
    return make(tmp_path, Grid(data=2, per_file=1), WANTED)


SELECTION = b"model\0" + bytes(
    [2, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 16, 0, 0, 0]
)  # of a view's source


def test_an_index_that_crashes_the_hdf5_library_is_read_and_found_by_verify(
    crafted: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A view of 65,535 dimensions: HDF5 2.0 writes their bounds over its memory (SIGSEGV)."""
    index = (crafted / "index.h5").read_bytes()
    one, many = SELECTION + bytes([1, 0, 0, 0]), SELECTION + bytes([255, 255, 0, 0])
    assert one in index
    (crafted / "index.h5").write_bytes(index.replace(one, many))
    seal(crafted)
    with Checkpoint.open(crafted) as checkpoint:
        assert np.array_equal(checkpoint["/model/a"].numpy(), WANTED.values[0]["a"])
    for verb in ("show", "stats"):
        assert main(["ckpt", verb, str(crafted)]) == 0
    capsys.readouterr()
    assert main(["ckpt", "verify", str(crafted)]) == 1
    said = capsys.readouterr().out
    assert "index.h5: " in said
    assert said.count("\n") == 2


def test_a_process_that_cannot_look_says_nothing_of_the_checkpoint(
    crafted: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.executable", "/bin/false")
    assert main(["ckpt", "verify", str(crafted)]) == 2
    assert "NOT READ" in capsys.readouterr().out


@pytest.mark.parametrize("words", [["ckpt", "verify"], ["doctor"]], ids=" ".join)
@pytest.mark.few(1)
def test_nothing_is_imported_from_the_current_folder(words: list[str], tmp_path: Path) -> None:
    folder = make(tmp_path / "run", Grid())
    evil = tmp_path / "evil"
    evil.mkdir()
    for name in ("h5py", "mpi4py", "hpczero", "json"):
        (evil / f"{name}.py").write_text("open('imported', 'w').close()\n")
    hpczero = [sys.executable, "-P", "-m", "hpczero"]
    paths = [str(folder)] if "verify" in words else []
    command = [*hpczero, *words, *paths]
    subprocess.run(command, cwd=evil, capture_output=True, timeout=120, check=False)
    assert not (evil / "imported").exists()
