"""Checkpoints saved by a world of one rank, without MPI."""

import subprocess
from pathlib import Path
from typing import Any, cast

import numpy as np

from hpczero.checkpoint.load import Checkpoint
from hpczero.checkpoint.manifest import TrainingState
from hpczero.checkpoint.piece_table import RankShard, Table, Tensor
from hpczero.checkpoint.save import SaveFailed, SaveJob, Saver
from hpczero.checkpoint.shard_file import (
    SLOTS,
    Array,
)
from hpczero.comm.world import World
from hpczero.parallel.layout import unit_layout
from tests.support.checkpoints import parameters

ELEMENTS = 300_000


class Alone:
    """A world of one rank, without MPI."""

    rank, size, node, node_of_rank, hosts = 0, 1, 0, (0,), ("here",)

    def broadcast_object(self, value: Any) -> Any:
        return value

    def gather_objects(self, value: Any) -> list[Any]:
        return [value]

    def all_gather_objects(self, value: Any) -> list[Any]:
        return [value]


def table() -> Table:
    layers = parameters(weight=(ELEMENTS,))
    holding = RankShard([unit_layout(layer) for layer in layers], 0)
    return Table.of([Tensor("weight", (ELEMENTS,))], 1, lambda _: holding)


def saver(checkpoints: Path, asynchronous: bool = False) -> Saver:
    job = SaveJob(checkpoints, {"name": "saved"}, {"data": 1}, table, "node")
    return Saver(
        cast(World, Alone()), job, [[np.zeros(ELEMENTS, np.float32)] for _ in SLOTS], asynchronous
    )


def save(saver: Saver, step: int, asynchronous: bool = False) -> Path:
    for slot, (source,) in enumerate(saver.sources):
        cast(Array, source).fill(slot + step)
    saver.begin(
        TrainingState(step=step, updates=step, loss_scale=1.0, good_steps=0),
        {"seen": np.arange(3)},
        asynchronous,
    )
    return saver.conclude().path


def full_disk(place: Path, size: int) -> str:
    """Return the complaint of a save on a disk of so many bytes, in a process of its own: HDF5 has
    ended processes here.
    """
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(place)], check=True)
    said = ""
    try:
        try:
            save(saver(place / "checkpoints"), 1)
        except SaveFailed as error:
            said = str(error)
        if said:
            assert f"{place}/checkpoints" in said
            assert "No space left on device" in said
            assert not list((place / "checkpoints").glob("*"))
        else:
            with Checkpoint.open(place / "checkpoints" / "step-00000001") as checkpoint:
                assert checkpoint["/model/weight"].numpy().shape == (ELEMENTS,)
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)
    return said
