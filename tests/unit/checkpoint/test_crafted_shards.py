"""Shards that a stranger made, with checksums that fit, are refused, and so are files of a
checkpoint that are no plain files.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

import hpczero.checkpoint
from hpczero.checkpoint import Damaged
from hpczero.checkpoint.shard_file import structure_checksum
from hpczero.cli import main
from tests.support.checkpoints import (
    seal,
)
from tests.support.crafted import assert_refused, first_shard, replace

pytestmark = pytest.mark.usefixtures("hdf5_in_this_process")


@pytest.mark.parametrize("name", ["shard-00000.h5", "index.h5", "MANIFEST.json"])
@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
def test_a_file_that_is_no_plain_file_is_refused(
    crafted: Path, secret: Path, capsys: pytest.CaptureFixture[str], name: str, kind: str
) -> None:
    (crafted / name).unlink()
    {"link": lambda path: path.symlink_to(secret), "pipe": os.mkfifo, "folder": os.mkdir}[kind](
        crafted / name
    )
    with pytest.raises(Damaged, match=name):
        hpczero.checkpoint.load.Checkpoint.open(crafted)["/model/a"].numpy()
    assert main(["ckpt", "verify", str(crafted)]) == 1
    assert main(["ckpt", "ls", str(crafted.parent)]) == 0
    assert "damaged" in capsys.readouterr().out or name == "shard-00000.h5"


def move_elsewhere(file: h5py.File, name: str) -> None:
    """Store the dataset at another place in its file."""
    values = file[name][()]
    del file[name]
    file["in its place"] = values
    file[name] = values
    del file["in its place"]


def test_a_shard_that_is_not_as_large_as_the_manifest_says_is_refused(
    crafted: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seal(crafted, lambda content: first_shard(content).update(size=123_456))
    for verb in ("stats", "verify"):
        assert main(["ckpt", verb, str(crafted)]) == 1
    assert "123,456 were written" in capsys.readouterr().out


def test_a_shard_that_is_mostly_a_hole_is_refused_at_once(
    crafted: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    os.truncate(crafted / "shard-00000.h5", 1 << 43)
    seal(crafted, lambda content: first_shard(content).update(size=1 << 43))
    assert_refused(crafted, capsys, "bytes besides its data")


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda file: file.create_dataset("more", data=[1]), "/more does not belong there"),
        (
            lambda file: file.__setitem__("rank-00000/more", h5py.ExternalLink("secret.h5", "/")),
            "/rank-00000/more is not in this file",
        ),
        (
            lambda file: move_elsewhere(file, "rank-00000/checksums"),
            "/rank-00000/checksums is not at byte",
        ),
        (
            lambda file: replace(file, "rank-00000/checksums", data=np.zeros((3, 2), "<u8")),
            "/rank-00000/checksums is no plain dataset",
        ),
    ],
)
def test_a_shard_with_other_datasets_is_found(
    crafted: Path,
    secret: Path,
    capsys: pytest.CaptureFixture[str],
    change: Callable[[h5py.File], Any],
    word: str,
) -> None:
    path = crafted / "shard-00000.h5"
    with h5py.File(path, "r+") as file:
        change(file)

    def sealed(content: dict[str, Any]) -> None:
        data = [(begin, begin + 4096) for begin in first_shard(content)["ranks"][0]["data"]]
        with path.open("rb") as file:
            first_shard(content).update(
                size=path.stat().st_size,
                rest=structure_checksum(file.fileno(), path.stat().st_size, data),
            )

    seal(crafted, sealed)
    assert main(["ckpt", "verify", str(crafted)]) == 1
    assert word in capsys.readouterr().out


def test_a_shard_whose_datasets_lie_elsewhere_than_the_manifest_says_is_found(
    crafted: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seal(crafted, lambda content: first_shard(content)["ranks"][0]["data"].reverse())
    assert main(["ckpt", "verify", str(crafted)]) == 1
    assert "not at byte" in capsys.readouterr().out
