"""Any grid reads what any grid has saved, to the bit; a run that goes on from a checkpoint is the
one that was never stopped.
"""

import errno
import os
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch

from hpczero.checkpoint import directory, manifest, shard_file
from hpczero.checkpoint import save as write
from hpczero.checkpoint.load import Checkpoint
from hpczero.checkpoint.save import SaveFailed
from hpczero.checkpoint.shard_file import SLOTS
from hpczero.comm.world import World
from hpczero.model.families import layers
from hpczero.parallel.zero.engine import Engine
from hpczero.parallel.zero.unit import Unit
from hpczero.spec.schema import Spec
from hpczero.train.saved_states import common_states
from tests.support.checkpoints import seal
from tests.support.saving import GRIDS, divided, engine_on, spec_of

pytestmark = pytest.mark.mpi


def truth(name: str, slot: int, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.rand(
        shape, generator=torch.Generator().manual_seed(zlib.crc32(f"{slot} {name}".encode()))
    )


def stretches(engine: Engine, unit: Unit) -> Iterator[tuple[torch.Tensor, torch.Tensor, str]]:
    """Yield, of all states, what this rank steps and what it ought to be."""
    for place, part in unit.layout.spans(unit.owned.start, unit.owned.stop):
        here = slice(part.start - unit.owned.start, part.stop - unit.owned.start)
        for slot, state in enumerate(common_states(engine, unit).values()):
            whole = truth(place.parameter.name, slot, place.parameter.shape)[place.held].reshape(-1)
            yield (
                state[here],
                whole[part.start - place.offset : part.stop - place.offset],
                f"{SLOTS[slot]}/{place.parameter.name}",
            )


def save(world: World, spec: Spec) -> None:
    with engine_on(world, spec) as (engine, checkpoints):
        for unit in engine.units:
            for own, values, _ in stretches(engine, unit):
                own.copy_(values)
        checkpoints.begin(7, ends=False)
        for unit in engine.units:  # whatever happens to the states now is not saved
            unit.master.zero_()
        checkpoints.conclude()


def assert_weights(engine: Engine) -> None:
    """Every rank computes with the states' weights, rounded."""
    engine.wait_for_weights()
    for unit in engine.units:
        weights = engine._copy(unit, exact=False) if engine.sharded.parameters else None
        for slot, parameter in zip(unit.layout.slots, unit.parameters, strict=True):
            values = parameter if weights is None else unit.part(weights, slot)
            expected = truth(slot.parameter.name, 0, slot.parameter.shape)[slot.held].bfloat16()
            assert torch.equal(values, expected), slot.parameter.name


def assert_whole(path: Path) -> None:
    """For hpczero's own reader, and for any other."""
    with Checkpoint.open(path) as checkpoint, h5py.File(path / "index.h5") as file:
        expected = [
            parameter
            for layer in layers(spec_of("runs", "alone").model)
            for parameter in layer.parameters
        ]
        assert {f"/{slot}/{parameter.name}" for slot in SLOTS for parameter in expected} == set(
            checkpoint
        )
        for slot, prefix in enumerate(SLOTS):
            for parameter in expected:
                values = truth(parameter.name, slot, parameter.shape).numpy()
                assert np.array_equal(checkpoint[f"/{prefix}/{parameter.name}"].numpy(), values), (
                    parameter.name
                )
                assert np.array_equal(file[f"{prefix}/{parameter.name}"][()], values), (
                    parameter.name
                )


@pytest.mark.ranks(4, 6, 8)
def test_any_grid_reads_what_any_grid_saved(
    world: World, shared_folder: str, everything: bool
) -> None:
    """Without --slow each reads a third of them."""
    possible = {name: ranks for name, (ranks, _, _) in GRIDS.items() if ranks <= world.size}
    for number, (writer, ranks) in enumerate(possible.items()):
        output = f"{shared_folder}/{writer}"
        if world.rank < ranks:
            part = world.part(range(ranks), ranks_per_node=number % 3)
            save(
                part,
                spec_of(
                    output,
                    writer,
                    writers=("node", "rank")[number % 2],
                    asynchronous=number % 2 == 0,
                ),
            )
            part.close()
        world.everyone.barrier()
        if world.rank == 0:
            assert_whole(Path(output) / "run" / "checkpoints" / "step-00000007")
    for number, (reader, ranks) in enumerate(possible.items()):
        writers = [
            writer
            for place, writer in enumerate(possible)
            if everything or (place + number) % 3 == 0
        ]
        if world.rank < ranks:
            part = world.part(range(ranks))
            with engine_on(part, spec_of(shared_folder, reader)) as (engine, checkpoints):
                for writer in writers:
                    for unit in engine.units:
                        for state in common_states(engine, unit).values():
                            state.fill_(float("nan"))
                    checkpoints.spec = spec_of(f"{shared_folder}/{writer}", reader)
                    checkpoints.path = Path(shared_folder) / writer / "run" / "checkpoints"
                    assert checkpoints.resume().step == 7
                    for unit in engine.units:
                        for own, values, name in stretches(engine, unit):
                            assert torch.equal(own, values), (writer, reader, name)
                checkpoints.refresh_weights()
                assert_weights(engine)
            part.close()
        world.everyone.barrier()


def test_damage_that_one_rank_meets_is_passed_over_by_all(world: World, shared_folder: str) -> None:
    """The last byte of data of the newer of two checkpoints: which rank has it depends on the
    grid.
    """
    spec = divided(shared_folder)
    with engine_on(world, spec) as (_, checkpoints):
        for step in (1, 2):
            checkpoints.begin(step, ends=True)
            checkpoints.conclude()
        path = checkpoints.path / directory.name_of(2)
        if world.rank == 0:
            with Checkpoint.open(path) as checkpoint:
                last = max(checkpoint.content.shards[0].ranks, key=lambda data: data.data)
                piece = max(
                    row
                    for row in range(len(checkpoint.table.rank))
                    if checkpoint.table.rank[row] == last.rank
                )
                place = last.data[2] + 4 * int(checkpoint.table.offset[piece])
            damaged = path / checkpoint.content.shards[0].file
            raw = bytearray(damaged.read_bytes())
            raw[place] ^= 1
            damaged.write_bytes(raw)
        world.everyone.barrier()
        resumed = checkpoints.resume()
        assert resumed.step == 1
        assert "shard-00000.h5: damaged at bytes" in resumed.warnings[0]


def test_a_view_that_is_none_keeps_nobody_from_resuming(world: World, shared_folder: str) -> None:
    """A run reads through the piece table; the view is for other programs, and `verify` looks at
    it.
    """
    with engine_on(world, divided(shared_folder)) as (_, checkpoints):
        for step in (1, 2):
            checkpoints.begin(step, ends=True)
            checkpoints.conclude()
        path = checkpoints.path / directory.name_of(2)
        if world.rank == 0:
            with Checkpoint.open(path) as checkpoint:
                tensor = checkpoint.table.tensors[0]
            with h5py.File(path / "index.h5", "r+") as file:
                del file[f"model/{tensor.name}"]
                file[f"model/{tensor.name}"] = np.zeros(tensor.shape, "<f4")
            seal(path)
        world.everyone.barrier()
        resumed = checkpoints.resume()
        assert (resumed.step, resumed.warnings) == (2, ())


@pytest.mark.parametrize("asynchronous", [False, True])
def test_what_fails_on_one_rank_is_none_on_any(
    world: World, shared_folder: str, asynchronous: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with engine_on(world, divided(shared_folder, asynchronous=asynchronous)) as (_, checkpoints):

        def saved(step: int) -> None:
            checkpoints.begin(step, ends=False)
            checkpoints.conclude()

        def refused(*_: Any) -> None:
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

        saved(1)
        with monkeypatch.context() as patch:
            if world.rank == world.size - 1:
                patch.setattr(shard_file, "write_all", refused)
            with pytest.raises(
                SaveFailed,
                match=(
                    rf"rank {world.size - 1} on .*step-00000002/shard-00000.h5.new: Disk quota "
                    rf"exceeded \(.* bytes"
                ),
            ):
                saved(2)
            assert not checkpoints.saver.in_flight
        world.everyone.barrier()
        assert [path.name for path in checkpoints.path.iterdir()] == [directory.name_of(1)]
        world.everyone.barrier()
        saved(2)
        assert list(directory.steps(checkpoints.path)) == [2, 1]


def test_hdf5_that_cannot_write_is_a_save_that_failed(
    world: World, shared_folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: Any) -> None:
        raise RuntimeError(
            "Unable to flush file (file write failed: errno = 28, error message = 'No space "
            "left on device')"
        )

    with engine_on(world, spec_of(shared_folder, "alone")) as (_, checkpoints):
        monkeypatch.setattr(shard_file, "make_file", refused)
        with pytest.raises(
            SaveFailed,
            match=(
                r"rank 0 on .*/step-00000001: Unable to flush file .*No space left on device.* "
                r"bytes are free there"
            ),
        ):
            checkpoints.begin(1, ends=True)
        assert not checkpoints.saver.in_flight
        world.everyone.barrier()
        assert not directory.steps(checkpoints.path)


def test_retention_never_drops_the_newest(world: World, shared_folder: str) -> None:
    spec = divided(shared_folder, keep=2, keep_every=3)
    with engine_on(world, spec) as (_, checkpoints):
        for step in range(1, 8):
            checkpoints.begin(step, ends=True)
            checkpoints.conclude()
        world.everyone.barrier()
        assert list(directory.steps(checkpoints.path)) == [7, 6, 3]


def slow(world: World, rank: int, action: Callable[..., Any]) -> Callable[..., Any]:
    """On this rank it takes so long that the ranks have to show each other that they are alive."""

    def slowly(*arguments: Any, **named: Any) -> Any:
        begun, met = time.monotonic(), world._number
        while world.rank == rank and world.size > 1 and world._number < met + 3:
            assert time.monotonic() < begun + 20, "the ranks do not meet"
            time.sleep(0.01)
        return action(*arguments, **named)

    return slowly


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.few(1)
def test_ranks_meet_while_one_is_slow(
    world: World, shared_folder: str, asynchronous: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The watchdog ends a job of which a rank does not show up."""
    last = world.size - 1
    with engine_on(
        world, divided(shared_folder, asynchronous=asynchronous, keep=1, writers="rank")
    ) as (_, checkpoints):
        of_last, of_first = (
            (
                (shard_file, "make_file"),
                (shard_file.Writer, "finish"),
                (shard_file, "structure_checksum"),
            ),
            ((directory, "remove"), (manifest, "write")),
        )
        for owner, name, rank in [(*one, last) for one in of_last] + [
            (*one, 0) for one in of_first
        ]:
            monkeypatch.setattr(owner, name, slow(world, rank, getattr(owner, name)))
        monkeypatch.setattr(checkpoints, "_read", slow(world, last, checkpoints._read))
        for step in (1, 2):
            checkpoints.begin(step, ends=not asynchronous)
            assert checkpoints.conclude()[1] == ""
        assert list(directory.steps(checkpoints.path)) == [2]
        assert checkpoints.resume().step == 2


def test_a_save_that_is_waited_for_makes_no_more_pauses(
    world: World, shared_folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(write, "_PAUSE_FACTOR", 1e6)
    with engine_on(world, divided(shared_folder)) as (_, checkpoints):
        checkpoints.begin(1, ends=False)
        checkpoints.conclude()  # in this life
        assert list(directory.steps(checkpoints.path)) == [1]


def test_loss_scale_and_counters_come_back(world: World, shared_folder: str) -> None:
    spec = divided(shared_folder)
    spec = spec.model_copy(update={"train": spec.train.model_copy(update={"precision": "fp16"})})
    with engine_on(world, spec) as (engine, checkpoints):
        engine.updates, engine.loss_scale = (
            41,
            replace(engine.loss_scale, value=4096.0, good_steps=17),
        )
        checkpoints.begin(50, ends=True)
        checkpoints.conclude()
    with engine_on(world, spec) as (engine, checkpoints):
        resumed = checkpoints.resume()
        assert (
            resumed.step,
            engine.updates,
            engine.loss_scale.value,
            engine.loss_scale.good_steps,
        ) == (50, 41, 4096.0, 17)
