"""Checkpoints of other optimizers than AdamW: what they keep of each tensor has other names."""

import json
from pathlib import Path
from typing import cast

import h5py
import numpy as np
import pytest

from hpczero.checkpoint import manifest
from hpczero.checkpoint.load import Checkpoint
from hpczero.checkpoint.manifest import TrainingState
from hpczero.checkpoint.save import SaveJob, Saver
from hpczero.checkpoint.shard_file import SLOTS, Damaged
from hpczero.checkpoint.verify import Verification
from hpczero.cli import main
from hpczero.comm.world import World
from tests.support.checkpoints import seal
from tests.support.saver import ELEMENTS, Alone, table

OTHERS = {
    "none": ["model"],
    "one": ["model", "optimizer/momentum_buffer"],
    "four": [*SLOTS, "optimizer/average"],
    "seven": ["model", *(f"optimizer/state_{number}" for number in range(6))],
}


def save(folder: Path, slots: list[str], asynchronous: bool = False) -> Path:
    job = SaveJob(folder, {"name": "saved"}, {"data": 1}, table, "node", slots=slots)
    values = [np.arange(ELEMENTS, dtype=np.float32) * (at + 1) for at in range(len(slots))]
    saver = Saver(cast(World, Alone()), job, [[one] for one in values], asynchronous)
    state = TrainingState(step=1, updates=1, loss_scale=1.0, good_steps=0, slots=slots)
    saver.begin(state, {}, asynchronous)
    return saver.conclude().path


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.few(2)
def test_every_slot_is_kept_and_verified(
    tmp_path: Path, name: str, asynchronous: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    slots = OTHERS[name]
    path = save(tmp_path, slots, asynchronous)
    with Checkpoint.open(path) as checkpoint:
        assert checkpoint.content.format == 3
        assert list(checkpoint.slots) == slots
        assert list(checkpoint) == [f"/{slot}/weight" for slot in slots]
        for number, slot in enumerate(slots):
            expected = np.arange(ELEMENTS, dtype=np.float32) * (number + 1)
            assert np.array_equal(checkpoint[f"/{slot}/weight"].numpy(), expected)
            with h5py.File(path / "index.h5") as view:
                assert np.array_equal(view[slot]["weight"][()], expected)
    assert main(["ckpt", "verify", str(path)]) == 0
    last = slots[-1].rpartition("/")[2]
    assert main(["ckpt", "stats", str(path), "--slot", last]) == 0
    capsys.readouterr()
    assert main(["ckpt", "show", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["slots"] == slots
    assert main(["ckpt", "export", str(path), str(tmp_path / "out.safetensors")]) == 0


def test_a_flipped_bit_in_the_last_slot_is_found(tmp_path: Path) -> None:
    path = save(tmp_path, OTHERS["seven"])
    place = manifest.read(path).shards[0].ranks[0].data[-1]
    with (path / "shard-00000.h5").open("r+b") as file:
        file.seek(place + 5)
        byte = file.read(1)
        file.seek(place + 5)
        file.write(bytes([byte[0] ^ 1]))
    with Verification(path) as verification:
        found = [
            damage
            for task in verification.tasks()
            for damage in verification.carry_out(task, lambda size: None)
        ]
    assert [damage.tensors for damage in found] == [("/optimizer/state_5/weight",)]


def test_names_are_compared_and_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, four = (save(tmp_path / name, OTHERS[name]) for name in ("one", "four"))
    assert main(["ckpt", "diff", str(one), str(four)]) == 2
    assert "--slot model compares the weights" in capsys.readouterr().err
    assert main(["ckpt", "diff", str(one), str(four), "--slot", "model"]) == 0
    assert main(["ckpt", "stats", str(one), "--slot", "moment1"]) == 2
    assert "has model, momentum_buffer or all" in capsys.readouterr().err


CRAFTED = {
    "another first one": ["optimizer/moment1", "model"],
    "twice": ["model", "optimizer/a", "optimizer/a"],
    "a path": ["model", "optimizer/../../x"],
    "none of a rank": [*SLOTS],
    "too many": ["model", *(f"optimizer/s{number}" for number in range(20))],
}


@pytest.mark.parametrize("way", CRAFTED)
def test_slots_that_cannot_be_are_damage(tmp_path: Path, way: str) -> None:
    path = save(tmp_path, OTHERS["one"])
    seal(path, lambda content: content["state"].update(slots=CRAFTED[way]))
    with pytest.raises(Damaged):
        manifest.read(path)
