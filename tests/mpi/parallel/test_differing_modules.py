"""Modules that must be the same on every rank, and belong to one engine: any difference is said
before training begins.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import hpczero
from hpczero.comm.grid import Grid
from hpczero.comm.world import World
from hpczero.errors import InputError
from hpczero.parallel.parallelize import make_user_model
from hpczero.spec.schema import Model, Spec

pytestmark = pytest.mark.mpi


def spec_of(stage: int, shared: bool = False) -> dict[str, Any]:
    train = {"precision": "fp32", "steps": 2, "grad_clip": 0}
    return {"train": train, "zero": {"stage": stage, "node_shared": shared}}


def named(*names: str) -> nn.Module:
    return nn.ModuleDict({name: nn.Linear(4, 4) for name in names})


def with_buffer(module: nn.Module, buffer: torch.Tensor) -> nn.Module:
    module.register_buffer("scale", buffer)
    return module


def tied(is_tied: bool) -> nn.Module:
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    if is_tied:
        module[1].weight = module[0].weight
    return module


def frozen(is_frozen: bool) -> nn.Module:
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    module[1].bias.requires_grad_(not is_frozen)
    return module


Make = Callable[[bool], nn.Module]  # gives another module on the rank for which it is asked to
DIFFERENCES: dict[str, tuple[Make, str]] = {
    "order": (
        lambda other: named("key", "query", "value") if other else named("query", "key", "value"),
        r"rank 0 has module query where rank \d has module key; .*sort what you take from one",
    ),
    "shape": (
        lambda other: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3 if other else 4)),
        r"parameter 1\.weight has shape = \[4, 4\] on rank 0 and \[3, 4\] on rank \d",
    ),
    "dtype": (
        lambda other: nn.Linear(4, 4, dtype=torch.bfloat16 if other else torch.float32),
        r"parameter weight has dtype = torch\.float32 on rank 0 and torch\.bfloat16 on rank \d",
    ),
    "frozen": (
        frozen,
        r"parameter 1\.bias has requires_grad = True on rank 0 and False on rank \d",
    ),
    "tied": (
        tied,
        r"parameter 1\.weight has .*the same as = nothing on rank 0 and 0\.weight on rank \d",
    ),
    "class": (
        lambda other: nn.Sequential(nn.Linear(4, 4), nn.Tanh() if other else nn.ReLU()),
        r"module 1 has class = ReLU on rank 0 and Tanh on rank \d",
    ),
    "buffer": (
        lambda other: with_buffer(nn.Linear(4, 4), torch.ones(2 + other)),
        r"buffer scale has shape = \[2\] on rank 0 and \[3\] on rank \d",
    ),
    "more": (
        lambda other: named("a", "b") if other else named("a"),
        r"rank 0 has nothing more where rank \d has module b",
    ),
}


@pytest.mark.parametrize("what", DIFFERENCES)
def test_ranks_whose_modules_differ_are_told_where(world: World, what: str) -> None:
    make, message = DIFFERENCES[what]
    module = make(world.rank > 0 and world.rank + 1 == world.size)
    if world.size == 1:
        hpczero.initialize(module, spec_of(1), world).close()
        return
    with pytest.raises(InputError, match=message) as caught:
        hpczero.initialize(module, spec_of(1), world)
    assert f"on rank {world.size - 1}" in str(
        caught.value
    ) or f"where rank {world.size - 1} " in str(caught.value)


def test_only_values_and_memory_may_differ(world: World) -> None:
    torch.manual_seed(world.rank)
    with torch.device("meta" if world.rank else "cpu"):
        module = tied(True)
    hpczero.initialize(module, spec_of(2), world).close()


class Factory:
    """The factory that model.family names; the test tells it its rank."""

    rank = 0

    def __call__(self, model: Model) -> nn.Module:
        return named("query", "key") if self.rank else named("key", "query")


factory = Factory()


def test_modules_made_by_name_are_compared_too(world: World) -> None:
    factory.rank = world.rank
    spec = Spec.model_validate({"model": {"family": f"{__name__}:factory"}} | spec_of(1))
    grid = Grid.build(spec.parallel, world.node_of_rank)
    if world.size == 1:
        make_user_model(spec, world, grid)
        return
    with pytest.raises(InputError, match=r"rank 0 has module key where rank 1 has module query"):
        make_user_model(spec, world, grid)


@pytest.mark.parametrize("stage", [0, 3])
def test_a_module_has_one_engine_at_a_time(world: World, stage: int) -> None:
    module = tied(False)
    with hpczero.initialize(module, spec_of(stage), world) as engine:
        for again in (module, nn.Sequential(nn.Linear(4, 4), module[1])):
            with pytest.raises(InputError, match=r"weight is trained by another engine already"):
                hpczero.initialize(again, spec_of(stage), world)
        engine.backward(engine(torch.ones(2, 4)).sum())
        assert engine.step().grad_norm > 0


def test_a_hook_that_would_see_no_gradient_is_refused(world: World) -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    hook = module[1].weight.register_post_accumulate_grad_hook(lambda own: own.grad.mul_(0.5))
    with pytest.raises(InputError, match=r"1\.weight has a hook for p\.grad.*register_hook"):
        hpczero.initialize(module, spec_of(0), world)
    hook.remove()
    hpczero.initialize(module, spec_of(0), world).close()


def test_parameters_made_in_inference_mode_are_refused(world: World) -> None:
    with torch.inference_mode():
        module = nn.Linear(4, 4)
    with pytest.raises(InputError, match=r"weight was made in torch\.inference_mode"):
        hpczero.initialize(module, spec_of(0), world)
