"""The beginning of a run, and what it refuses to begin from."""

import errno
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hpczero.checkpoint.load import Checkpoint
from hpczero.comm.world import World
from hpczero.errors import InputError
from hpczero.spec.schema import Spec
from hpczero.train.checkpointing import Checkpoints
from hpczero.train.resume import look_ahead
from hpczero.train.saved_states import common_states
from tests.support.saving import divided, engine_on, save_steps

pytestmark = [pytest.mark.mpi, pytest.mark.usual(2)]


def with_train(spec: Spec, **values: Any) -> Spec:
    return spec.model_copy(update={"train": spec.train.model_copy(update=values)})


def begins_at(world: World, spec: Spec, *then: int) -> int:
    """Return the step where the run begins; it then saves these steps."""
    world.run_on_all(lambda: look_ahead(spec))
    with engine_on(world, spec) as (_, checkpoints):
        found = checkpoints.resume().step
        save_steps(checkpoints, *then)
    return found


def test_a_path_counts_until_the_run_has_a_checkpoint_of_its_own(
    world: World, shared_folder: str
) -> None:
    """Else a job that is started again and again would never get further. A run's directory
    stands for its newest one.
    """
    begins_at(world, divided(f"{shared_folder}/first"), 4, 5)
    there = f"{shared_folder}/first/run"
    begun = divided(f"{shared_folder}/second", resume=f"{there}/checkpoints/step-00000004")
    assert begins_at(world, begun) == 4
    assert begins_at(world, begun, 6) == 4
    assert begins_at(world, begun) == 6
    assert begins_at(world, divided(f"{shared_folder}/second", resume=there), 7) == 5
    anew = divided(f"{shared_folder}/second", resume="never")
    assert begins_at(world, anew, 1) == 0
    world.everyone.barrier()
    if world.rank == 0:
        shutil.rmtree(there)
    world.everyone.barrier()
    assert begins_at(world, anew, 2) == 1
    assert begins_at(world, divided(f"{shared_folder}/second")) == 2


def test_what_cannot_be_read_now_is_not_damaged(
    world: World, shared_folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newest one is still there when the run has been refused."""
    spec, opened = divided(shared_folder), Checkpoint.open
    begins_at(world, spec, 1, 2)

    def refused(path: Path, *arguments: Any, **named: Any) -> Checkpoint:
        if world.rank == world.size - 1:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), str(path))
        return opened(path, *arguments, **named)

    with engine_on(world, spec) as (_, checkpoints):
        with monkeypatch.context() as patch:
            patch.setattr(Checkpoint, "open", refused)
            with pytest.raises(
                InputError, match=r"step-00000002: Too many open files: it cannot be read now"
            ):
                checkpoints.resume()
        assert checkpoints.resume().step == 2


def test_a_key_that_is_not_known_makes_another_run(world: World, shared_folder: str) -> None:
    spec = divided(shared_folder)
    with engine_on(world, spec) as (_, checkpoints):
        known = checkpoints.saver.job.spec
        checkpoints.saver.job = replace(
            checkpoints.saver.job, spec=known | {"model": known["model"] | {"rotary": 2}}
        )
        save_steps(checkpoints, 1)
        with pytest.raises(
            InputError,
            match=(
                r"another run:\n  model.rotary: 2 there, and this version of hpczero does not "
                r"know it"
            ),
        ):
            checkpoints.resume()
        fewer = {key: value for key, value in known["optimizer"].items() if key != "weight_decay"}
        checkpoints.saver.job = replace(checkpoints.saver.job, spec=known | {"optimizer": fewer})
        save_steps(checkpoints, 2)
        assert checkpoints.resume().step == 2  # of a version that did not have it: its default


def test_what_the_new_precision_and_batch_mean(world: World, shared_folder: str) -> None:
    """A loss scale is that of fp16; and where a batch is of another size the data goes on
    somewhere else.
    """
    begins_at(world, with_train(divided(shared_folder), precision="fp32"), 10)
    with engine_on(
        world,
        with_train(divided(shared_folder), precision="fp16", loss_scale=4096.0, global_batch=8),
    ) as (engine, checkpoints):
        resumed = checkpoints.resume()
        assert (resumed.step, engine.loss_scale.value) == (10, 4096.0)
        (warning,) = resumed.warnings
        assert "train.global_batch was 5 and is 8: samples 50 to 79 are left out" in warning
        checkpoints.spec = with_train(checkpoints.spec, global_batch=4)
        assert "samples 40 to 49 come once more" in checkpoints.resume().warnings[0]


def test_text_that_is_cut_anew_is_told_and_a_later_change_is_not(
    world: World, shared_folder: str
) -> None:
    spec = divided(shared_folder)
    whole = spec.seq_len
    begins_at(world, spec, 10)

    def warnings(*phases: tuple[int, int]) -> Sequence[str]:
        lengths = spec.schedule.model_copy(update={"seq_len": phases})
        with engine_on(world, spec.model_copy(update={"schedule": lengths})) as (_, checkpoints):
            return checkpoints.resume().warnings

    (warning,) = warnings((0, whole // 2))
    assert warning.startswith(f"schedule.seq_len was [] and is [[0, {whole // 2}]]: sequences are")
    assert not warnings((0, whole // 2), (10, whole))  # what is done had the longest


def test_weights_only_begin_a_run_of_their_own(world: World, shared_folder: str) -> None:
    with engine_on(world, divided(f"{shared_folder}/first")) as (engine, checkpoints):
        for unit in engine.units:
            for number, state in enumerate(common_states(engine, unit).values()):
                state.fill_(number + 1.0)
        engine.updates = 9
        save_steps(checkpoints, 9)
    spec = divided(
        f"{shared_folder}/second", resume=f"{shared_folder}/first/run", weights_only=True
    ).model_copy(update={"seed": 5})
    world.run_on_all(lambda: look_ahead(spec))
    with engine_on(world, spec) as (engine, checkpoints):
        resumed = checkpoints.resume()
        assert (resumed.step, engine.updates) == (0, 0)
        for unit in engine.units:
            own = [
                (part.start - unit.owned.start, part.stop - unit.owned.start)
                for _, part in unit.layout.spans(unit.owned.start, unit.owned.stop)
            ]
            assert all(torch.all(unit.master[start:stop] == 1.0) for start, stop in own)
            assert not any(state.any() for state in list(common_states(engine, unit).values())[1:])
        save_steps(checkpoints, 3)
    assert begins_at(world, spec) == 3
    other = spec.model_copy(
        update={
            "model": spec.model.model_copy(update={"layers": 2}),
            "output": f"{shared_folder}/third",
        }
    )
    with (
        engine_on(world, other) as (_, checkpoints),
        pytest.raises(InputError, match=r"blocks\.2\..* there, nothing now"),
    ):
        checkpoints.resume()


@pytest.mark.parametrize(
    ("there", "now", "message"),
    [
        ({"odd": 3}, {"odd": 4}, r"buffer odd: \(3,\) there, \(4,\) now"),
        ({"odd": 3}, {}, r"buffer odd: \(3,\) there, nothing now"),
        ({}, {"odd": 3}, r"buffer odd: nothing there, \(3,\) now"),
    ],
)
def test_other_buffers_are_refused(
    world: World, shared_folder: str, there: dict[str, int], now: dict[str, int], message: str
) -> None:
    def with_buffers(lengths: dict[str, int], action: Callable[[Checkpoints], object]) -> None:
        with engine_on(world, divided(shared_folder)) as (engine, checkpoints):
            for name, length in lengths.items():
                engine.module.register_buffer(name, torch.ones(length))
            action(Checkpoints(checkpoints.spec, world, checkpoints.grid, engine))

    with_buffers(there, lambda checkpoints: save_steps(checkpoints, 1))
    with_buffers(there, lambda checkpoints: checkpoints.resume())
    with pytest.raises(InputError, match=message):
        with_buffers(now, lambda checkpoints: checkpoints.resume())
