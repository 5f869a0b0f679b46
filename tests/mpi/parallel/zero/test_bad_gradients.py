"""The norm, the loss scale and steps left out, on grids: what one rank sees counts on all of
them.
"""

from dataclasses import dataclass, field

import pytest

from hpczero.comm.grid import Grid
from hpczero.comm.world import World
from hpczero.parallel.zero.engine import Engine, StepResult
from hpczero.parallel.zero.unit import Unit
from tests.support.covering import Case
from tests.support.grids import PLAIN, Serial, assert_all_ranks_say, on_grid, spec_of
from tests.support.training import Record

pytestmark = pytest.mark.mpi


def grids(ranks: int, everything: bool) -> list[Case]:
    """Every axis alone, and together."""
    found = {
        2: [(2, 1), (1, 2)],
        3: [(3, 1), (1, 3)],
        4: [(2, 1), (1, 2), (2, 2)],
        8: [(2, 2), (2, 4)],
    }.get(ranks, [])
    stages = (0, 3, 2, 1)
    return [
        PLAIN
        | {"grid": grid, "stage": stages[number], "sequence": number > 1, "tied": number % 2 == 0}
        for number, grid in enumerate(found)
    ]


@pytest.mark.cases(of=grids)
@pytest.mark.usual(2)
@pytest.mark.few(2)
def test_fp16_overflows_are_left_out_alike_until_the_scale_fits(world: World, case: Case) -> None:
    """Every overflow halves the scale. A rank that sums less than one rank alone does may get by
    with one less.
    """
    spec = spec_of(case | {"precision": "fp16"}, steps=10, loss_scale=2.0**24)
    found = on_grid(world, case, spec)
    assert_all_ranks_say(world, found)
    scales, left_out = of_each_step(found)
    assert left_out[0]
    assert not all(left_out)
    if world.rank == 0:
        _, left_out_alone = of_each_step(Serial()(world, spec))
        assert abs(sum(left_out) - sum(left_out_alone)) <= 1
    assert scales[1:] == [
        scale / 2 if left else scale for scale, left in zip(scales[:-1], left_out[:-1], strict=True)
    ]


def of_each_step(record: Record) -> tuple[list[float], list[bool]]:
    """The loss scale, and whether the step was left out."""
    return [metrics["loss_scale"] for metrics in record.metrics_seen], [
        metrics.get("skipped", False) for metrics in record.metrics_seen
    ]


@dataclass
class Spoiler:
    """Makes one element infinite, in the second step, of the first or the last unit that is
    complete on a rank.
    """

    rank: int
    place: int  # 0 or -1
    steps: int = 0
    seen: list[str] = field(default_factory=list)
    done: bool = False
    updates: list[int] = field(default_factory=list)  # so far, after each step

    def after_complete(self, unit: Unit, rank: int) -> None:
        if self.steps == 0 and unit.layout.name not in self.seen:
            self.seen.append(unit.layout.name)
        if (
            self.steps == 1
            and rank == self.rank
            and not self.done
            and unit.layout.name == self.seen[self.place]
        ):
            unit.part(unit.send_buffer, unit.layout.slots[0]).view(-1)[0] = float("inf")
            self.done = True


@pytest.mark.cases(of=grids)
@pytest.mark.usual(2)
@pytest.mark.few(2)
def test_what_one_rank_alone_sees_is_left_out_everywhere(
    world: World, case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In turn on each rank: one of its units, with or without copies elsewhere, sharded or not."""
    complete, finish, spec = Unit.complete, Engine.finish_step, spec_of(case, steps=3)
    for bad_rank in range(world.size):
        spoiler = Spoiler(bad_rank, place=-(bad_rank % 2))

        def spoiling(unit: Unit, spoiler: Spoiler = spoiler) -> None:
            complete(unit)
            spoiler.after_complete(unit, world.rank)

        def counting(engine: Engine, lr: float, spoiler: Spoiler = spoiler) -> StepResult:
            spoiler.steps += 1
            result = finish(engine, lr)
            spoiler.updates.append(engine.updates)
            return result

        monkeypatch.setattr(Unit, "complete", spoiling)
        monkeypatch.setattr(Engine, "finish_step", counting)
        found = on_grid(world, case, spec)
        assert spoiler.done == (world.rank == bad_rank)
        assert spoiler.updates == [1, 1, 2]
        assert_all_ranks_say(world, found)
        assert [metrics.get("skipped", False) for metrics in found.metrics_seen] == [
            False,
            True,
            False,
        ]
        (where,) = {values["where"] for name, values in found.events if name == "WARN"}
        assert (
            f"of data rank "
            f"{Grid.build(spec.parallel, world.node_of_rank).coordinate(bad_rank, 'data')}"
        ) in where
