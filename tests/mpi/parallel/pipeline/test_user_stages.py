"""Modules that hpczero has not written, cut into stages by what they offer: the same numbers as
on one rank.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from hpczero.comm.grid import Grid
from hpczero.comm.world import World
from hpczero.errors import HpczeroError, InputError
from hpczero.model.batch import MicroBatch
from hpczero.parallel.parallelize import assemble
from hpczero.parallel.pipeline.executor import Pipeline
from hpczero.parallel.pipeline.user_stages import stage_of
from hpczero.spec.schema import Parallel
from tests.support.training import Record, assert_same, train
from tests.support.user_modules import WAYS, ways
from tests.support.user_stages import spec_of

pytestmark = pytest.mark.mpi

SCHEDULES = {"gpipe": 1, "1f1b": 1, "interleaved": 2}  # -> chunks


def serial(world: World, family: str, steps: int = 4) -> Record:
    alone = world.part([world.rank])
    record = train(alone, spec_of(family, steps=steps))
    alone.close()
    return record


@pytest.mark.ranks(2)
def test_a_module_that_runs_in_two_chunks_of_a_stage(world: World) -> None:
    """The first and the third of four parts are of stage 0, and both are `again`."""
    expected = serial(world, "Twice")
    for stage, shared in WAYS:
        assert_same(
            expected,
            train(
                world, spec_of("Twice", stage, shared, pipeline=2, schedule="interleaved", chunks=2)
            ),
        )


@pytest.mark.ranks(2, 3, 4, 6, 8)
@pytest.mark.parametrize("family", ["Layered", "layered_on_meta"])
@pytest.mark.parametrize(("schedule", "chunks"), SCHEDULES.items())
@pytest.mark.usual(4)
@pytest.mark.few(3)
def test_stages_equal_the_serial_run(
    world: World, family: str, schedule: str, chunks: int, everything: bool
) -> None:
    expected = serial(world, family, steps=20 if world.size == 2 else 4)
    for stages in [
        size for size in range(2, world.size + 1) if world.size % size == 0 and size * chunks <= 6
    ]:
        for stage, shared in ways(stages // 2 + list(SCHEDULES).index(schedule), everything):
            spec = spec_of(
                family,
                stage,
                shared,
                len(expected.losses),
                pipeline=stages,
                schedule=schedule,
                chunks=chunks,
            )
            assert_same(expected, train(world, spec))


@pytest.mark.ranks(2, 4, 6, 8)
def test_half_precision_is_bitwise_the_same_at_every_stage_of_zero(world: World) -> None:
    """One micro-batch on each rank; its shape is told once, and it is another one in the
    evaluation.
    """
    for stages in [size for size in (2, 4) if world.size % size == 0]:
        records = []
        for stage, shared in WAYS:
            spec = spec_of("Layered", stage, shared, precision="bf16", pipeline=stages)
            train_table = spec.train.model_copy(update={"micro_batch": 5, "eval_batches": 2})
            records.append(train(world, spec.model_copy(update={"train": train_table})))
        assert all(record.losses == records[0].losses for record in records)


class Bare(nn.Module):
    """No layers() and no loss()."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(3, 3), nn.Linear(3, 3)


class Offering(Bare):
    def __init__(
        self, offered: Callable[[Any], list[Any]] = lambda module: [module.one, module.other]
    ) -> None:
        super().__init__()
        self.offered = offered

    def layers(self) -> list[Any]:
        return self.offered(self)

    def loss(self, output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return output.sum()


class Resetting(Offering):
    def reset_parameters(self) -> None:
        self.one.weight.data.fill_(1)


class Attribute(nn.Module):
    """A mask, as most models have it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])

    def loss(self, output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return output.sum()


def on_meta(kind: type[nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return kind()


@pytest.mark.parametrize(
    ("make", "stages", "what"),
    [
        (
            Bare,
            2,
            (
                r"parallel.pipeline = 2: Bare has no layers\(\) and no loss\(output, targets\); "
                r"a module that is cut into stages offers"
            ),
        ),
        (
            lambda: Offering(lambda module: [module.one, torch.tanh]),
            2,
            r"number 1 of the layers\(\) of Offering is a builtin_function",
        ),
        (
            lambda: Offering(lambda module: [module.one, nn.Linear(3, 3)]),
            2,
            r"number 1 .* is a Linear, and none of the module's own",
        ),
        (
            lambda: Offering(lambda module: [module.one]),
            2,
            r"other.weight, other.bias: a parameter is in none of the modules",
        ),
        (lambda: Offering(), 3, r"parallel.pipeline = 3, but layers\(\) gives 2"),
        (
            lambda: nn.Sequential(nn.Embedding(3, 4, max_norm=1.0)),
            2,
            r"0 has max_norm = 1, and changes its weight in every forward",
        ),
        (lambda: nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(3, 3)])}), 2, r"has no loss"),
        (lambda: Attribute(), 2, r"layers of Attribute is a ModuleList: it must be a method"),
        (
            lambda: on_meta(Resetting),
            2,
            r"on meta, and the reset_parameters\(\) of Resetting is for several layers",
        ),
    ],
)
def test_what_a_module_lacks_is_said(
    whole: World, make: Callable[[], nn.Module], stages: int, what: str
) -> None:
    with pytest.raises(InputError, match=what):
        stage_of(make(), Parallel(pipeline=stages), 0)


def test_a_stage_without_parameters_is_said(whole: World) -> None:
    module = Offering(lambda module: [module.one, module.idle, module.other])
    module.idle = nn.ReLU()
    with pytest.raises(InputError, match=r"stage 1 of 3 would have no parameters \(ReLU\)"):
        stage_of(module, Parallel(pipeline=3), 0)


@pytest.mark.parametrize(
    ("layer", "what"),
    [
        (
            lambda x: (x, x),
            r"one \(Linear\) of layers\(\) gives a tuple: in a pipeline a layer gives one tensor",
        ),
        (lambda x: x.double(), r"gives torch.float64 .* expects torch.float32"),
    ],
)
def test_what_cannot_travel_is_said(
    whole: World, layer: Callable[[torch.Tensor], Any], what: str
) -> None:
    """The sender says it: on every rank here, each with a pipeline of its own whose two chunks are
    both its.
    """
    alone = whole.part([whole.rank])
    module = Offering()
    module.one.forward = layer  # type: ignore[method-assign]
    stage = stage_of(module, Parallel(pipeline=1, chunks=2), 0)

    class Runs:
        def forward(self, chunk: int, x: torch.Tensor | None, batch: MicroBatch) -> torch.Tensor:
            out = batch.tokens.float() if x is None else x
            for call in stage.calls[chunk]:
                out = call(out, batch)
            return out

    batch = MicroBatch(torch.zeros(2, 3), torch.zeros(2, 3), torch.arange(2), 0, 1)
    pipeline = Pipeline(alone.group("pipeline", [0]), "interleaved", 2, None, torch.float32)
    with pytest.raises(HpczeroError, match=what):
        pipeline.evaluate(Runs(), [batch])  # type: ignore[arg-type]
    alone.close()


@pytest.mark.ranks(2, 3, 4, 6)
def test_what_another_stage_has_is_of_no_use_here(world: World) -> None:
    """PyTorch would compute with a weight on meta, and give whatever lies in memory."""
    spec = spec_of("Layered", pipeline=world.size)
    grid = Grid.build(spec.parallel, world.node_of_rank)
    way = assemble(spec, world, grid, accumulates=True)
    elsewhere = {name: own for name, own in way.engine.module.named_parameters() if own.is_meta}
    assert elsewhere
    for name, own in elsewhere.items():
        with pytest.raises(InputError, match=f"{name} belongs to another stage"):
            torch.nn.functional.linear(torch.zeros(own.shape[-1]), own)
    way.engine.close()


@pytest.mark.ranks(2, 3, 4, 6)
def test_a_stage_has_its_own_layers_only(world: World) -> None:
    """The parameters of the others are on meta, where they take no memory."""
    spec = spec_of("Layered", pipeline=world.size)
    grid = Grid.build(spec.parallel, world.node_of_rank)
    way = assemble(spec, world, grid, accumulates=True)
    module, own = (
        way.engine.module,
        {place.parameter.name for unit in way.engine.units for place in unit.layout.slots},
    )
    assert {name for name, parameter in module.named_parameters() if not parameter.is_meta} == own
    assert 0 < len(own) < len(list(module.parameters()))
    assert way.engine.parameter_count() == sum(
        parameter.numel() for parameter in module.parameters()
    )
    assert way.engine.module.head.scale.is_meta == (world.rank + 1 < world.size)
    way.engine.close()
