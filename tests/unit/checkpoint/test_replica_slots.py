"""Checkpoints of replicas that have states of their own: what every verb makes of them, and what
cannot be.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import h5py
import numpy as np
import pytest

from hpczero.checkpoint import manifest
from hpczero.checkpoint.load import Checkpoint
from hpczero.checkpoint.manifest import TrainingState
from hpczero.checkpoint.save import SaveJob, Saver
from hpczero.checkpoint.shard_file import Damaged
from hpczero.cli import main
from hpczero.comm.world import World
from tests.support.checkpoints import seal
from tests.support.saver import ELEMENTS, Alone, table

SIGNS = [
    *("model", "optimizer/moment1", "optimizer/moment2", "optimizer/served_error"),
    *(f"replica_{number}/error" for number in range(3)),
]
APART = [
    *("model", "optimizer/outer_momentum"),
    *(f"replica_{number}/{name}" for number in range(12) for name in ("weights", "moment1")),
]
NUMBERS = {"frozen": 15.0, "variance_seen": 0.0, "variance_norm": 0.25}


@pytest.fixture(autouse=True)
def _alone(hdf5_in_this_process: None) -> None:
    """The files of these tests do the HDF5 library no harm."""


def save(
    folder: Path, slots: Sequence[str] = SIGNS, numbers: Mapping[str, float] = NUMBERS
) -> Path:
    job = SaveJob(folder, {"name": "saved"}, {"data": 1}, table, "node", slots=tuple(slots))
    values = [np.arange(ELEMENTS, dtype=np.float32) * (at + 1) for at in range(len(slots))]
    saver = Saver(cast(World, Alone()), job, [[one] for one in values], False)
    state = TrainingState(
        step=20, updates=20, loss_scale=1.0, good_steps=0, slots=list(slots), update=dict(numbers)
    )
    saver.begin(state, {}, False)
    return saver.conclude().path


@pytest.mark.parametrize("slots", [SIGNS, APART])
@pytest.mark.few(1)
def test_every_verb_reads_them(
    tmp_path: Path, slots: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    path = save(tmp_path, slots)
    with Checkpoint.open(path) as checkpoint:
        assert checkpoint.content.format == 4
        assert checkpoint.content.state.update == NUMBERS
        assert list(checkpoint.slots) == slots
        for number, slot in enumerate(slots):
            expected = np.arange(ELEMENTS, dtype=np.float32) * (number + 1)
            assert np.array_equal(checkpoint[f"/{slot}/weight"].numpy(), expected)
            with h5py.File(path / "index.h5") as view:
                assert np.array_equal(view[slot]["weight"][()], expected)
    for verb in (
        ["verify", str(path)],
        ["stats", str(path), "--slot", "all"],
        ["diff", str(path), str(path)],
        ["export", str(path), str(tmp_path / "out.safetensors")],
    ):
        assert main(["ckpt", *verb]) == 0, verb
    said = capsys.readouterr().out
    assert all(f"{slot}/weight" in said for slot in slots)
    assert main(["ckpt", "stats", str(path), "--slot", slots[-1]]) == 0
    assert main(["ckpt", "stats", str(path), "--slot", "error_of_none"]) == 2
    assert f"replica_K/{slots[-1].rpartition('/')[2]} or all" in capsys.readouterr().err
    assert main(["ckpt", "show", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["slots"] == slots


def test_numbers_of_the_update_alone_are_format_4_too(tmp_path: Path) -> None:
    path = save(tmp_path, ["model", "optimizer/moment1"])
    assert manifest.read(path).format == 4
    path = save(tmp_path / "none", ["model", "optimizer/moment1"], {})
    assert manifest.read(path).format == 3


REPLICAS: dict[str, list[str]] = {
    "a zero before its number": ["replica_01/error"],
    "a negative number": ["replica_-1/error"],
    "no number": ["replica_/error"],
    "too large a number": ["replica_1000000/error"],
    "no name": ["replica_0"],
    "an empty name": ["replica_0/"],
    "a path out": ["replica_0/../error"],
    "a path inside": ["replica_0/error/more"],
    "another folder": ["replicas/error"],
    "a hidden end": ["replica_0/error\n"],
    "no first one": ["replica_1/error"],
    "one is missing": ["replica_0/error", "replica_2/error"],
    "another has other states": ["replica_0/error", "replica_1/weights"],
    "another has more": ["replica_0/error", "replica_1/error", "replica_1/weights"],
    "one twice": ["replica_0/error", "replica_0/error"],
}


def saved_with(folder: Path, slots: Sequence[str]) -> Path:
    """Save as many slots, and let the manifest give them these names."""
    others = [f"optimizer/state_{number}" for number in range(len(slots))]
    path = save(folder, ["model", *others])
    seal(path, lambda content: content["state"].update(slots=["model", *slots]))
    return path


@pytest.mark.parametrize("way", REPLICAS)
def test_replicas_that_cannot_be_are_damage(tmp_path: Path, way: str) -> None:
    path = saved_with(tmp_path, REPLICAS[way])
    with pytest.raises(Damaged, match=r"MANIFEST\.json: (it is damaged|its )"):
        manifest.read(path)


@pytest.mark.parametrize("slots", [["replica_0/error"], ["replica_0/error", "replica_1/error"]])
def test_replicas_that_can_be_are_read(tmp_path: Path, slots: list[str]) -> None:
    """The slots are refused for their names, not for what the test does to the manifest."""
    path = saved_with(tmp_path, slots)
    assert list(manifest.read(path).slots) == ["model", *slots]


@pytest.mark.parametrize(
    "numbers",
    [
        {"frozen": float("nan")},
        {"frozen": float("inf")},
        {"joined": -1.0},
        {"joined": 1e300},
        {"frozen": "5"},
        {"frozen": None},
        {"Frozen": 1.0},
        {"frozen out": 1.0},
        {"": 1.0},
        {f"n{'a' * number}": 1.0 for number in range(200)},
        [1.0],
    ],
)
def test_numbers_that_cannot_be_are_damage(tmp_path: Path, numbers: Any) -> None:
    path = save(tmp_path)
    seal(path, lambda content: content["state"].update(update=numbers))
    with pytest.raises(Damaged, match=r"MANIFEST\.json: it is damaged"):
        manifest.read(path)


@pytest.mark.parametrize("number", [1, 3])
def test_an_older_format_has_no_place_for_them(tmp_path: Path, number: int) -> None:
    """So that an older version refuses to go on without what replicas have of their own."""
    path = save(tmp_path)
    seal(path, lambda content: content.update(format=number))
    with pytest.raises(Damaged):
        manifest.read(path)
