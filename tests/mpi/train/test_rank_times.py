"""Seconds of each rank, of evaluations and of saves, as a whole run leaves them."""

from pathlib import Path

import pytest

from hpczero.comm.world import World
from hpczero.runs import rank_times
from tests.support.grids import PLAIN, spec_of
from tests.support.saving import divided, trained
from tests.support.training import train

pytestmark = [pytest.mark.mpi, pytest.mark.usual(2)]


def test_each_ranks_seconds_are_written_every_few_steps_and_at_the_end(
    world: World, shared_folder: str
) -> None:
    spec = spec_of(PLAIN | {"grid": (1, 1)}, steps=5, log_every=2, eval_every=2)
    record = train(world, spec, Path(shared_folder))
    world.everyone.barrier()
    (job,) = rank_times.read(Path(shared_folder))
    assert (job.ranks, job.first.tolist(), job.last.tolist()) == (world.size, [1, 3, 5], [2, 4, 5])
    parts = sum(job.of_field[name] for name in ("compute", "wait", "data"))
    assert parts == pytest.approx(job.of_field["step"], rel=1e-3, abs=1e-4)
    assert (job.of_field["processor"] > 0).all()
    of_rank = job.of_field["step"][:, world.rank].sum()
    assert of_rank == pytest.approx(
        sum(one["step_seconds"] for one in record.metrics_seen), rel=1e-3
    )
    evaluated = [one["step"] for one in record.metrics_seen if "evaluation_seconds" in one]
    assert evaluated == [one["step"] for one in record.metrics_seen if "validation_loss" in one]
    assert evaluated == [2, 4, 5]
    assert all(one.get("evaluation_seconds", 1) > 0 for one in record.metrics_seen)


def test_times_that_cannot_be_written_are_one_warning(world: World, shared_folder: str) -> None:
    if world.rank == 0:
        (Path(shared_folder) / "rank_times").write_text("")
    spec = spec_of(PLAIN | {"grid": (1, 1)}, steps=4, log_every=1)
    record = train(world, spec, Path(shared_folder))
    warnings = [facts["what"] for name, facts in record.events if name == "WARN"]
    # the record is both the output and the directory
    assert len(warnings) == (2 if world.rank == 0 else 0)
    assert all("times of ranks are not written any more" in said for said in warnings)
    assert len(record.losses) == 4


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.few(1)
def test_a_save_says_for_how_long_it_held_up_training(
    world: World, shared_folder: str, asynchronous: bool
) -> None:
    record = trained(world, divided(shared_folder, asynchronous=asynchronous))
    saves = [facts for name, facts in record.events if name == "save"]
    assert saves
    for save in saves:
        assert save["stalled"] > 0
        if not asynchronous:  # all of it is inside
            assert save["stalled"] >= 0.5 * save["seconds"]
