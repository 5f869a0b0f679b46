"""LAMB, Lion and Muon: as their twins of plain PyTorch, on any ranks, at every stage."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from hpczero.comm.world import World
from hpczero.model import families
from hpczero.optim.learning_rate import learning_rate
from hpczero.optim.matrices import is_matrix, operations
from hpczero.parallel.zero.muon_update import orthogonalised
from hpczero.spec.schema import Optimizer, Spec
from tests.support import tensor_plans
from tests.support.grids import PLAIN
from tests.support.grids import spec_of as of_case
from tests.support.jobs import job
from tests.support.other_optimizers import OTHERS, Idle, Odd, newton_schulz
from tests.support.training import Record, train
from tests.support.updates import (
    assert_close,
    assert_equal,
    by_hpczero,
    by_pytorch,
    spec_of,
)
from tests.support.user_modules import ways

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(1, 2, 3), pytest.mark.usual(2)]

LAMB = {"grid": (1, 1), "family": "gpt", "optimizer": "lamb", "precision": "bf16"}
LR = {"lamb": 2e-2, "lion": 1e-3, "muon": 1e-2}


@pytest.mark.parametrize("name", OTHERS)
def test_an_optimizer_steps_as_its_twin(world: World, name: str, everything: bool) -> None:
    twin, options, of_spec = OTHERS[name]
    expected = by_pytorch(twin, options, LR[name], kind=Odd)
    first, *others = (
        by_hpczero(world, spec_of(stage, shared, LR[name], name=name, **of_spec), kind=Odd)
        for stage, shared in ways(list(OTHERS).index(name), everything)
    )
    assert_close(first, expected, world.rank)
    for other in others:
        if name == "lion":
            assert_equal(first, other)
        assert_close(other, expected, world.rank)


def test_a_step_of_no_length_has_a_ratio_of_1(world: World) -> None:
    """Without decay a matrix whose gradient is 0 stays as it is."""
    twin, options, of_spec = OTHERS["lamb"]
    expected = by_pytorch(twin, {**options, "decay": 0.0}, LR["lamb"], kind=Idle)
    spec = spec_of(1, False, LR["lamb"], name="lamb", weight_decay=0.0, **of_spec)
    assert_close(by_hpczero(world, spec, kind=Idle), expected, world.rank)


@pytest.mark.by_mpi_alone("what a node shares is in the CPU's memory")
def test_what_a_node_shares_changes_no_bit_of_lambs_steps(world: World) -> None:
    """Stages of a pipeline on unlike nodes step a tied parameter alike."""
    alone, shared = (
        train(world, of_case(PLAIN | LAMB | {"stage": 0, "shared": shared})).weights
        for shared in (False, True)
    )
    for name, weight in alone.items():
        assert torch.equal(weight, shared[name]), name


@pytest.mark.ranks(1, 2, 3)
def test_sections_of_a_tensor_plan_are_a_matrix_each(world: World) -> None:
    """A weight [inputs, outputs] of which query, key and value have a third of the columns each."""
    module = tensor_plans.made(tensor_plans.gpt2)
    tensor_plans.loss_of(module, 0).backward()
    spec = tensor_plans.spec_of(world.size, 1)
    spec["optimizer"] |= {"name": "muon"}
    rate = learning_rate(Spec.model_validate(spec), 0)
    whole = tensor_plans.made(tensor_plans.gpt2)
    _, after = tensor_plans.trained(world, whole, tensor_plans.GPT2, spec, 1)
    for name, weight in module.named_parameters() if world.rank == 0 else ():
        if name.endswith("c_attn.weight"):
            before, gradient = weight.detach().double(), weight.grad
            assert gradient is not None
            ways = [newton_schulz(part) for part in gradient.double().chunk(3, 1)]
            way = (before * (1 - 0.1 * rate) - after[name]) / (0.2 * 32**0.5 * rate)
            assert (way - torch.cat(ways, 1)).norm() < 1e-2 * way.norm(), name


GRIDS = {1: [(1, 1)], 2: [(1, 1), (2, 1)], 3: [(3, 1)], 4: [(2, 1), (2, 2)]}


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.usual(3)
@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("family", ["gpt", "relative", "t5"])
@pytest.mark.few(3)
def test_own_models_step_as_the_twin_by_the_same_gradients(
    world: World, family: str, name: str
) -> None:
    """On tensor ranks, in stages, with fused maps: what whole parameters become."""
    for number, grid in enumerate(GRIDS[world.size], len(name)):
        case = PLAIN | {"grid": grid, "family": family, "optimizer": name, "stage": number % 4}
        spec = of_case(case, steps=3, grad_clip=0.0)
        found = train(world, spec, keeps=3)
        for name_of_one, expected in by_twin(found, spec).items():
            one, initial = found.weights[name_of_one], found.initial[name_of_one]
            way = (expected - initial).norm()
            assert way > 0
            assert (expected - one).norm() < 1e-4 * way, name_of_one


def by_twin(found: Record, spec: Spec) -> dict[str, torch.Tensor]:
    """Step the initial weights, whole, by the gradients of a run."""
    weights = {name: nn.Parameter(initial.clone()) for name, initial in found.initial.items()}
    own = spec.optimizer
    options: dict[str, Any] = {
        "betas": own.betas,
        "eps": own.eps,
        "momentum": own.momentum,
        "decay": own.weight_decay,
        "stacks": [name for name, tensor in weights.items() if tensor.dim() == 3],
        "by_adamw": [name for name in weights if name.split(".")[0] in NOT_IN_BLOCKS],
    }
    groups = [{"params": [tensor], "name": name} for name, tensor in weights.items()]
    twin = OTHERS[own.name][0](groups, lr=own.lr, **options)
    for step, gradients in enumerate(found.all_gradients):
        for group in twin.param_groups:
            group["lr"] = learning_rate(spec, step)
        for name, tensor in weights.items():
            tensor.grad = gradients[name]
        twin.step()
    return {name: tensor.detach() for name, tensor in weights.items()}


NOT_IN_BLOCKS = ("embedding", "positions", "head")
LAYOUTS = {1: [{}], 2: [{}, {"tensor": 2}], 3: [{}], 4: [{}, {"tensor": 2}, {"pipeline": 2}]}


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.usual(2)
@pytest.mark.few(2)
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
