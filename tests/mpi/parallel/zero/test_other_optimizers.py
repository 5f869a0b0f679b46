"""LAMB, Lion and Muon: as their twins of plain PyTorch, on any ranks, at every stage."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from hpczero.comm.world import World
from hpczero.model import families
from hpczero.optim.matrices import is_matrix, operations
from hpczero.parallel.zero.muon_update import orthogonalised
from hpczero.spec.schema import Optimizer
from tests.support.jobs import job
from tests.support.other_optimizers import OTHERS
from tests.support.training import train
from tests.support.updates import (
    assert_close,
    assert_equal,
    by_hpczero,
    by_pytorch,
    spec_of,
)
from tests.support.user_modules import ways

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(1, 2, 3), pytest.mark.usual(2)]

LR = {"lamb": 2e-2, "lion": 1e-3, "muon": 1e-2}


@pytest.mark.parametrize("name", OTHERS)
def test_an_optimizer_steps_as_its_twin_and_alike_everywhere(
    world: World, name: str, everything: bool
) -> None:
    twin, options, of_spec = OTHERS[name]
    expected = by_pytorch(twin, options, LR[name])
    first, *others = (
        by_hpczero(world, spec_of(stage, shared, LR[name], name=name, **of_spec))
        for stage, shared in ways(list(OTHERS).index(name), everything)
    )
    assert_close(first, expected, world.rank)
    for other in others:
        if name == "lion":
            assert_equal(first, other)
        assert_close(other, expected, world.rank)


LAYOUTS = {1: [{}], 2: [{}, {"tensor": 2}], 3: [{}], 4: [{}, {"tensor": 2}, {"pipeline": 2}]}


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.usual(2)
def test_products_are_those_of_the_formula_and_divided_over_the_ranks(
    world: World, stage: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    computed: list[int] = []

    def counted(stack: torch.Tensor) -> torch.Tensor:
        with FlopCounterMode(display=False) as counter:
            made = orthogonalised(stack)
        computed.append(counter.get_total_flops())
        return made

    monkeypatch.setattr("hpczero.parallel.zero.muon_update.orthogonalised", counted)
    for parallel in LAYOUTS[world.size]:
        computed.clear()
        spec = job(zero={"stage": stage}, precision="fp32", **parallel)
        model = spec.model.model_copy(update={"layers": 12, "hidden": 48, "heads": 4})
        optimizer = Optimizer(name="muon")
        spec = spec.model_copy(update={"model": model, "optimizer": optimizer})
        train(world, spec)
        loads = world.all_gather_objects(sum(computed))
        steps = spec.train.steps
        formula = sum(
            operations(parameter)
            for layer in families.layers(model)
            for parameter in layer.parameters
            if is_matrix(parameter, optimizer)
        )
        assert sum(loads) == steps * formula
        stages = parallel.get("pipeline", 1)
        assert max(loads) <= 1.1 * sum(loads) / len(loads) or stages > 1, loads
