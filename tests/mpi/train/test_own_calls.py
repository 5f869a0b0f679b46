"""Calls of loops of one's own: their arguments, several of them, going back, the end."""

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from hpczero.checkpoint import directory
from hpczero.checkpoint.load import Checkpoint
from hpczero.checkpoint.save import SaveFailed
from hpczero.comm.world import World
from hpczero.errors import HpczeroError, InputError
from hpczero.train import own_run, preflight, setup
from tests.support.own_loops import Loop, spec_of, started, states
from tests.support.user_modules import made

pytestmark = [pytest.mark.mpi, pytest.mark.usual(2)]


def test_another_folder_has_a_copy_that_is_complete_at_once(
    world: World, shared_folder: str
) -> None:
    with started(world, spec_of(shared_folder)) as engine:
        Loop(engine, world).run(1)
        engine.save({"note": "kept"}, folder=f"{shared_folder}/aside", step=77)
        path = Path(shared_folder) / "aside" / "checkpoints" / "step-00000077"
        with Checkpoint.open(path) as checkpoint:
            assert checkpoint.step == 77
            assert checkpoint.buffers.keys() == {"seen"}
        assert not (Path(shared_folder) / "loop").exists()


def test_what_a_checkpoint_cannot_keep_is_refused_on_all_ranks(
    world: World, shared_folder: str
) -> None:
    with started(world, spec_of(shared_folder)) as engine:
        Loop(engine, world).run(1)
        with pytest.raises(InputError, match=r"extra\['model'\] is a Small"):
            engine.save({"model": made(lambda: engine.module)})
        with pytest.raises(InputError, match=r"random\['data'\] is a int"):
            engine.save(random={"data": 3})
        engine.save(wait=True)
        with pytest.raises(InputError, match="has no state of the generator 'own'"):
            engine.resume({"own": torch.Generator()})


def test_a_save_that_fails_ends_the_loop_or_is_said(
    world: World,
    shared_folder: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    with started(world, spec_of(shared_folder)) as engine:
        Loop(engine, world).run(1)
        engine.save(wait=True)
        checkpoints = Path(shared_folder) / "loop" / "checkpoints"
        world.everyone.barrier()
        if world.rank == 0:
            checkpoints.rename(checkpoints.with_name("moved"))
            checkpoints.write_text("a file in its place")
        world.everyone.barrier()
        with pytest.raises(SaveFailed, match="the checkpoint could not be saved: rank 0"):
            engine.save(wait=True, step=2)
        monkeypatch.setattr(
            engine.run,
            "spec",
            engine.spec.model_copy(
                update={
                    "checkpoint": engine.spec.checkpoint.model_copy(update={"on_error": "continue"})
                }
            ),
        )
        engine.save(wait=True, step=2)
        Loop(engine, world).run(2)
    said = capfd.readouterr().err
    assert ("hpczero: WARN the checkpoint could not be saved" in said) == (world.rank == 0)


def test_without_room_for_a_copy_it_waits(
    world: World,
    shared_folder: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(preflight, "has_room", lambda world, wanted: wanted == 0)
    with started(world, spec_of(shared_folder)) as engine:
        Loop(engine, world).run(1)
        engine.save()
        assert not engine.run._claimed.saver.in_flight
        assert engine.run._claimed.saver.copy_bytes == 0
    assert ("no room for a copy" in capfd.readouterr().err) == (world.rank == 0)
    assert own_run.setup is setup


def test_two_engines_are_two_runs(world: World, shared_folder: str) -> None:
    one = started(world, spec_of(shared_folder))
    other = started(world, spec_of(shared_folder) | {"name": "other"})
    for engine in (one, other):
        Loop(engine, world).run(1)
        engine.save()
    same = started(world, spec_of(shared_folder))
    with pytest.raises(InputError, match=r"loop is in use by|is held by"):
        same.save()
    for engine in (same, other, one):
        engine.close()
    assert directory.steps(Path(shared_folder) / "other" / "checkpoints").keys() == {1}


def test_a_save_in_flight_ends_before_anything_is_read(world: World, shared_folder: str) -> None:
    with started(world, spec_of(shared_folder)) as engine:
        loop = Loop(engine, world).run(1)
        engine.save({"number": 1})
        engine.save({"number": 2})
        assert engine.resume().extra == {"number": 2}
        loop.run(2)
        engine.save({"number": 3})
        assert engine.load(f"{shared_folder}/loop").extra == {"number": 3}


def test_wrong_arguments_are_said_on_all_ranks(world: World, shared_folder: str) -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"step": -1}, "step = -1 must be a whole number"),
        ({"step": 1.5}, "step = 1.5 must be"),
        ({"extra": [1]}, "extra is a list: give a table of names"),
        ({"random": torch.Generator()}, "random is a Generator: give a table"),
        ({"random": {1: torch.Generator()}}, "random has the key 1: names are text"),
    ]
    last = world.rank == world.size - 1
    if world.size > 1:
        wrong += [
            ({"step": 2 if last else 1}, r"engine.save: step is 1 on rank 0 and 2 on rank \d"),
            ({"step": -1 if last else 1}, r"rank \d on .*: save: step = -1"),
            ({"folder": "there" if last else None}, "folder is None on rank 0 and there on rank"),
            ({"wait": last}, "wait is False on rank 0 and True on rank"),
        ]
    with started(world, spec_of(shared_folder)) as engine:
        for how, said in wrong:
            with pytest.raises(InputError, match=said):
                engine.save(**how)
        engine.save({"whose": 0} if world.rank == 0 else [1])  # only rank 0's is asked for
        assert engine.resume().extra == {"whose": 0}
        if world.size > 1:
            with pytest.raises(InputError, match=r"engine\.load: path is .* on rank 0 and .* on"):
                engine.load(f"{shared_folder}/{'other' if last else 'loop'}")


def steps_of(world: World, folder: str) -> list[int]:
    """The complete checkpoints of the run, seen by all ranks at one moment."""
    world.everyone.barrier()
    found = list(directory.steps(Path(folder) / "loop" / "checkpoints"))
    world.everyone.barrier()
    return found


@pytest.mark.parametrize("every", [0, -1])
@pytest.mark.few(1)
def test_a_loop_that_goes_back_sets_aside_what_came_after(
    world: World, shared_folder: str, every: int, capfd: pytest.CaptureFixture[str]
) -> None:
    spec = spec_of(shared_folder, checkpoint={"every": every, "keep": 0})
    first = f"{shared_folder}/loop/checkpoints/step-00000002"
    with started(world, spec) as engine:
        loop = Loop(engine, world)
        for step in (2, 4, 6):
            loop.run(step)
            engine.save(wait=True)
        assert engine.load(first).step == 2
        assert steps_of(world, shared_folder) == [6, 4, 2], "nothing is saved yet"
        loop.run(3)
        engine.save(wait=True)
        assert steps_of(world, shared_folder) == [3, 2]
        loop.run(5)
        engine.save(wait=True)
        assert steps_of(world, shared_folder) == [5, 3, 2]
    if world.rank == 0:
        lines = (Path(shared_folder) / "loop" / "metrics.jsonl").read_text().splitlines()
        steps = [json.loads(line)["step"] for line in lines]
        assert steps[-3:] == [3, 4, 5]
        assert len(set(steps)) == len(steps)
    with started(world, spec) as engine:  # begins anew, as nobody asks for a resume
        Loop(engine, world).run(1)
        engine.save(wait=True)
        assert steps_of(world, shared_folder) == [1]
    said = capfd.readouterr().err
    assert said.count("set aside, as the run goes on from step") == 5 * (world.rank == 0)


@pytest.mark.parametrize("changed", [False, True])
@pytest.mark.few(1)
def test_the_last_save_has_the_last_values(world: World, shared_folder: str, changed: bool) -> None:
    with started(world, spec_of(shared_folder)) as engine:
        Loop(engine, world).run(1)
        engine.save({"best": 1.0})
        world.everyone.barrier()
        with pytest.raises(SystemExit) as left:
            engine.stop({"best": 2.0 if changed else 1.0})
        assert left.value.code == 75
        with pytest.raises(HpczeroError, match="this engine is closed"):
            engine.should_stop()
    asides = directory.aside(Path(shared_folder) / "loop" / "checkpoints")
    assert len(asides) == changed
    with started(world, spec_of(shared_folder)) as engine:
        assert engine.resume().extra == {"best": 2.0 if changed else 1.0}


def test_a_job_that_could_not_save_is_not_one_that_stopped(
    world: World, shared_folder: str
) -> None:
    spec = spec_of(shared_folder, checkpoint={"on_error": "continue"})
    with started(world, spec) as engine:
        Loop(engine, world).run(1)
        engine.should_stop()
        checkpoints = Path(shared_folder) / "loop" / "checkpoints"
        world.everyone.barrier()
        if world.rank == 0:
            checkpoints.write_text("a file in its place")
        world.everyone.barrier()
        with pytest.raises(HpczeroError, match="no checkpoint of step 1 could be saved at the"):
            engine.stop()


def test_one_process_of_all_is_first(world: World, shared_folder: str) -> None:
    with started(world, spec_of(shared_folder)) as engine:
        assert engine.is_first == (world.rank == 0)
        assert bool(engine.full_state_dict()) == engine.is_first


def test_other_names_on_other_ranks_are_said(world: World, shared_folder: str) -> None:
    random = {"mine": torch.Generator()} if world.rank == 0 else {}
    with started(world, spec_of(shared_folder)) as engine:
        if world.size > 1:
            with pytest.raises(InputError, match="random: mine is on rank 0 or"):
                engine.save(random=random)


def test_another_folder_keeps_all(world: World, shared_folder: str) -> None:
    with started(world, spec_of(shared_folder, checkpoint={"keep": 1})) as engine:
        for step in (1, 2, 3):
            engine.save(folder=f"{shared_folder}/best", step=step)
    assert list(directory.steps(Path(shared_folder) / "best" / "checkpoints")) == [3, 2, 1]


def test_a_step_that_is_saved_again_is_never_away(
    world: World, shared_folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second save of it fails at its end: the first one is what it was."""
    spec = spec_of(shared_folder, checkpoint={"on_error": "continue"})
    with started(world, spec) as engine:
        Loop(engine, world).run(2)
        engine.save({"number": 1}, wait=True)

        def fails(*_: Any) -> None:
            raise OSError(28, "No space left on device", "here")

        with monkeypatch.context() as patched:
            patched.setattr("hpczero.checkpoint.manifest.commit", fails)
            engine.save({"number": 2}, wait=True)
        assert steps_of(world, shared_folder) == [2]
        assert engine.load(f"{shared_folder}/loop").extra == {"number": 1}
        engine.save({"number": 3}, wait=True)
        engine.save({"number": 3}, wait=True)  # is saved
        assert steps_of(world, shared_folder) == [2]
    folder = Path(shared_folder) / "loop" / "checkpoints"
    assert len(directory.aside(folder)) == 1
    assert not list(folder.glob("*.new"))
    with started(world, spec) as engine:
        assert engine.resume().extra == {"number": 3}
        with pytest.raises(SystemExit):
            engine.stop({"number": 3})
    assert len(directory.aside(folder)) == 1


@pytest.mark.parametrize("numbers", [(5, 6, 2), (0, 3, 1)])
@pytest.mark.few(1)
def test_the_newest_is_what_was_saved_last(
    world: World, shared_folder: str, numbers: tuple[int, ...]
) -> None:
    with started(world, spec_of(shared_folder)) as engine:
        for number in numbers:
            engine.save({"number": number}, step=number, wait=True)
        assert engine.resume().extra == {"number": numbers[-1]}
        Loop(engine, world).run(4)
        engine.save({"number": 4}, wait=True)
        engine.load(f"{shared_folder}/loop", weights_only=True)
        Loop(engine, world).run(1)
        engine.save({"number": "anew"}, wait=True)
        assert engine.resume().extra == {"number": "anew"}


def test_a_refused_load_changes_nothing_and_a_failed_one_is_not_saved(
    world: World, shared_folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with started(world, spec_of(shared_folder)) as engine:
        Loop(engine, world).run(2)
        engine.save(wait=True)
        Loop(engine, world).run(3)
        before = states(engine)
        with pytest.raises(InputError, match="has no state of the generator 'x', and of others"):
            engine.load(f"{shared_folder}/loop", random={"x": torch.Generator()})
        assert all(map(torch.equal, states(engine), before))
        engine.save()

        def fails(*_: Any) -> None:
            raise InputError("in the middle of it")

        with monkeypatch.context() as patched:
            patched.setattr("hpczero.train.checkpointing.restore", fails)
            with pytest.raises(InputError, match="in the middle of it"):
                engine.load(f"{shared_folder}/loop")
        with pytest.raises(HpczeroError, match="the last load or resume failed"):
            engine.save()
        assert engine.resume().step == 3
        engine.save()


def test_inside_averaged_nothing_is_loaded(world: World, shared_folder: str) -> None:
    with started(world, spec_of(shared_folder), average=0.5) as engine:
        Loop(engine, world).run(2)
        engine.save(wait=True)
        for call in (engine.resume, lambda: engine.load(f"{shared_folder}/loop")):
            with (
                pytest.raises(HpczeroError, match="the weights are their average"),
                engine.averaged(),
            ):
                call()
            with engine.averaged():
                pass


@pytest.mark.parametrize("folder", ["", "a\0b", 5, None])
def test_folders_that_are_none_are_refused(world: World, shared_folder: str, folder: Any) -> None:
    with started(world, spec_of(shared_folder)) as engine:
        with pytest.raises(InputError, match="give the path of a folder"):
            engine.load(folder)
        if folder is not None:
            with pytest.raises(InputError, match="give the path of a folder"):
                engine.save(folder=folder)
        engine.save(wait=True)
        with pytest.raises(InputError, match="is the directory of a run, which saves there"):
            engine.save(folder=f"{shared_folder}/loop")


def test_all_engines_hear_of_a_signal(world: World, shared_folder: str) -> None:
    one = started(world, spec_of(shared_folder))
    other = started(world, spec_of(shared_folder) | {"name": "other"})
    assert [one.should_stop(), other.should_stop()] == ["", ""]
    one.close()
    if world.rank == world.size - 1:
        signal.raise_signal(signal.SIGTERM)
    assert other.should_stop() == "SIGTERM"
    other.close()
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
