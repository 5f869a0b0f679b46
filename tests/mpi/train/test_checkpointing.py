"""Checkpoints that a run keeps, where it begins, and what it does about saves that fail."""

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hpczero.checkpoint import directory, shard_file
from hpczero.comm.world import World
from hpczero.train.checkpointing import Checkpoints
from tests.support.saving import divided, engine_on, names, save_steps, trained

pytestmark = [pytest.mark.mpi, pytest.mark.usual(2)]


def spoil(checkpoints: Checkpoints, step: int) -> None:
    """On rank 0."""
    if checkpoints.world.rank == 0:
        with (checkpoints.path / directory.name_of(step) / "index.h5").open("r+b") as file:
            file.write(b"damaged")
    checkpoints.world.everyone.barrier()


def test_what_is_newer_than_where_a_run_begins_does_not_count_among_those_kept(
    world: World, shared_folder: str
) -> None:
    """Two damaged ones would push out the good one, and all that the run saves."""
    with engine_on(world, divided(shared_folder, keep=0)) as (_, checkpoints):
        save_steps(checkpoints, 4, 11, 12)
        spoil(checkpoints, 11)
        spoil(checkpoints, 12)
    with engine_on(world, divided(shared_folder, keep=2)) as (_, checkpoints):
        resumed = checkpoints.resume()
        assert resumed.step == 4
        said = ["passed over a damaged checkpoint"] * 2 + [
            "set aside, as the run goes on from step 4"
        ] * 2
        assert [warning.split(":")[0] for warning in resumed.warnings] == said
        save_steps(checkpoints, 5, 6)
        assert list(directory.steps(checkpoints.path)) == [6, 5]
        assert len(directory.aside(checkpoints.path)) == 2
        world.everyone.barrier()
        if world.rank == 0:  # somebody else's
            shutil.copytree(
                checkpoints.path / directory.name_of(6), checkpoints.path / directory.name_of(99)
            )
        world.everyone.barrier()
        save_steps(checkpoints, 7)
        assert list(directory.steps(checkpoints.path)) == [99, 7, 6]
    with engine_on(world, divided(shared_folder, keep=2, resume="never")) as (_, checkpoints):
        assert checkpoints.resume().step == 0
        save_steps(checkpoints, 1, 2, 3)
        assert list(directory.steps(checkpoints.path)) == [3, 2]


def test_a_copy_under_another_name_is_passed_over(world: World, shared_folder: str) -> None:
    with engine_on(world, divided(shared_folder, keep=0)) as (_, checkpoints):
        save_steps(checkpoints, 1, 2)
        if world.rank == 0:
            copy = checkpoints.path / directory.name_of(99)
            shutil.copytree(checkpoints.path / directory.name_of(1), copy)
        world.everyone.barrier()
        resumed = checkpoints.resume()
        assert resumed.step == 2
        assert "it is of step 1, and its name is not step-00000001" in resumed.warnings[0]
        assert list(directory.steps(checkpoints.path)) == [2, 1]
        assert len(directory.aside(checkpoints.path)) == 1


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.few(1)
def test_metrics_are_on_the_disk_before_a_checkpoint_counts(
    world: World, shared_folder: str, asynchronous: bool
) -> None:
    record = trained(world, divided(shared_folder, every=2, asynchronous=asynchronous))
    saved = sorted({values["step"] for name, values in record.events if name == "save"})
    assert saved == [2, 4, 6]
    assert len(record.synced) == 3
    assert all(on_disk >= step for on_disk, step in zip(record.synced, saved, strict=True))


def test_what_saves_left_is_cleared_away_at_the_start(world: World, shared_folder: str) -> None:
    """With a file that no save makes, and that cannot be removed as long as somebody has it
    open: it is set aside.
    """
    with engine_on(world, divided(shared_folder)) as (_, checkpoints):
        save_steps(checkpoints, 1)
        if world.rank == 0:
            for step in (2, 3, 4):
                (checkpoints.path / directory.name_of(step)).mkdir()
            (checkpoints.path / directory.name_of(2) / "shard-00000.h5.new").touch()
            (checkpoints.path / directory.name_of(3) / ".nfs0001").touch()
        world.everyone.barrier()
        resumed = checkpoints.resume()
        assert resumed.step == 1
        assert len(resumed.warnings) == 1
        (aside,) = directory.aside(checkpoints.path)
        assert names(aside) == [".nfs0001"]
        assert names(checkpoints.path) == [directory.name_of(1), aside.name]
        world.everyone.barrier()
        if world.rank == 0:
            (checkpoints.path / directory.name_of(2)).mkdir()
            (checkpoints.path / directory.name_of(2) / ".nfs0002").touch()
            (checkpoints.path / directory.name_of(3)).touch()
        world.everyone.barrier()
        save_steps(checkpoints, 2, 3)
        assert list(directory.steps(checkpoints.path)) == [3, 2]


def test_a_new_folder_of_checkpoints_is_on_the_disk_before_they_are(
    world: World, shared_folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[Path] = []
    monkeypatch.setattr(directory, "sync", synced.append)
    with engine_on(world, divided(shared_folder)) as (_, checkpoints):
        save_steps(checkpoints, 1)
        assert (checkpoints.path.parent in synced) == (world.rank == 0)


@contextmanager
def failing_saves(world: World, *steps: int) -> Iterator[None]:
    """Nothing can be written into the checkpoints of these steps, by the last rank."""
    write = shard_file.Writer.finish

    def finish(writer: shard_file.Writer) -> None:
        if world.rank == world.size - 1 and writer.path.parent.name in map(
            directory.name_of, steps
        ):
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
        write(writer)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shard_file.Writer, "finish", finish)
        yield


@pytest.mark.parametrize("on_error", ["stop", "continue"])
@pytest.mark.few(1)
def test_a_save_that_failed_does_not_keep_the_next_from_being_tried(
    world: World, shared_folder: str, on_error: str
) -> None:
    spec = divided(shared_folder, every=5, on_error=on_error)
    with failing_saves(world, 5):  # found out at step 6, with which the run ends
        record = trained(world, spec)
    assert record.outcome is not None
    assert (record.outcome.state, record.outcome.saved) == ("finished", 6)
    assert list(directory.steps(Path(shared_folder) / "run" / "checkpoints")) == [6]
    assert {values["step"] for name, values in record.events if name == "WARN"} == {6}


def test_a_run_is_finished_when_its_last_step_is_saved(world: World, shared_folder: str) -> None:
    spec = divided(shared_folder, every=0, on_error="continue")
    with failing_saves(world, 6):
        outcome = trained(world, spec).outcome
    assert outcome is not None
    assert (outcome.state, outcome.steps) == ("failed", 6)
    assert "not saved" in outcome.reason
    outcome = trained(world, spec).outcome
    assert outcome is not None
    assert (outcome.state, outcome.steps, outcome.saved) == ("finished", 6, 6)


@pytest.mark.parametrize("steps", [6, 3])
def test_a_start_that_finds_all_steps_done_is_finished(
    world: World, shared_folder: str, steps: int
) -> None:
    spec = divided(shared_folder, every=0)
    trained(world, spec)
    outcome = trained(
        world, spec.model_copy(update={"train": spec.train.model_copy(update={"steps": steps})})
    ).outcome
    assert outcome is not None
    assert (outcome.state, outcome.steps, outcome.saved, outcome.final_loss) == (
        "finished",
        6,
        6,
        None,
    )


def test_a_run_that_fails_keeps_the_save_under_way(world: World, shared_folder: str) -> None:
    record = trained(world, divided(shared_folder, every=5), spoils_gradients=True)
    assert record.outcome is not None
    assert (record.outcome.state, record.outcome.saved) == ("failed", 5)
    assert list(directory.steps(Path(shared_folder) / "run" / "checkpoints")) == [5]


def test_an_old_one_that_cannot_be_removed_is_no_save_that_failed(
    world: World, shared_folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, known_as: object = None) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    with engine_on(world, divided(shared_folder, keep=0)) as (_, checkpoints):
        save_steps(checkpoints, 1, 2)
        checkpoints.spec = divided(shared_folder, keep=1)
        monkeypatch.setattr(directory, "remove", refuse)
        checkpoints.begin(3, ends=True)
        saved, left = checkpoints.conclude()
        assert saved.step == 3
        assert left.count("it was to be removed: Permission denied") == 2
        assert list(directory.steps(checkpoints.path)) == [3, 2, 1]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(directory, "remove", refuse)
        record = trained(world, divided(shared_folder, keep=1, on_error="stop", every=0))
    assert record.outcome is not None
    assert (record.outcome.state, record.outcome.saved) == ("finished", 6)
    assert any(
        "it was to be removed" in values["what"] for name, values in record.events if name == "WARN"
    )
