"""A module whose steps leave layers out, trained by hpczero and by plain PyTorch."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

import hpczero
from hpczero.comm.world import World
from hpczero.optim.learning_rate import learning_rate
from hpczero.spec.schema import Spec
from hpczero.train.initialize import Training
from tests.support.user_modules import SAMPLES, made, parts

STEPS, WIDTH = 20, 20
ADAMW = torch.optim.AdamW  # as hpczero's kernel does it
GROUPS: dict[str, dict[str, Any]] = {
    "*.bias": {"weight_decay": 0.05, "lr": 2e-2},
    "layers.0.*": {"lr": 2e-3},
}

Result = tuple[list[float], dict[str, torch.Tensor]]


class Chain(nn.Module):
    """Layers that a step may leave out; larger than the 64 elements at which shards are cut."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.scale = nn.Parameter(torch.ones(WIDTH, dtype=torch.float32))

    def forward(self, x: torch.Tensor, used: set[int]) -> torch.Tensor:
        for number in sorted(used):
            x = torch.tanh(self.layers[number](x) * self.scale)
        return (x - 0.3).square().sum() / SAMPLES


def in_group(name: str) -> dict[str, Any]:
    """The options that GROUPS give a parameter."""
    if name.endswith(".bias"):
        return GROUPS["*.bias"]
    return GROUPS["layers.0.*"] if name.startswith("layers.0.") else {}


def rates(step: int) -> dict[str, Any]:
    """The arguments of a step: one number, or a rate for some, or nothing."""
    if step % 3 == 0:
        return {"lr": 4e-3}
    return {"lr": {"layers.3.*": 1e-3, "*.bias": 6e-3}} if step % 3 == 1 else {}


def rate_of(step: int, name: str, scheduled: float, factor: float) -> float:
    """The rate that `rates` give a parameter, whose group has `factor` times the spec's."""
    if step % 3 == 0:
        return 4e-3 * factor
    if step % 3 == 1 and name.startswith("layers.3."):
        return 1e-3
    return 6e-3 if step % 3 == 1 and name.endswith(".bias") else scheduled


def used_in(step: int) -> set[int]:
    return {0, 3} | ({1} if step % 3 == 0 else set()) | ({2} if step >= 4 else set())


def samples(part: slice) -> torch.Tensor:
    generator = torch.Generator().manual_seed(2)
    return torch.randn((SAMPLES, WIDTH), generator=generator, dtype=torch.float32)[part]


def spec_of(
    stage: int, shared: bool, lr: float = 1e-2, precision: str = "fp32", **optimizer: Any
) -> dict[str, Any]:
    no_overflow = {"loss_scale": 256.0} if precision == "fp16" else {}
    return {
        "train": {"precision": precision, "steps": STEPS, **no_overflow},
        "optimizer": {"lr": lr, **optimizer},
        "zero": {"stage": stage, "node_shared": shared},
    }


def one_step(engine: Training, step: int, **how: Any) -> float:
    """Do a step; return the loss of the whole batch."""
    total = torch.zeros(1, dtype=torch.float64)
    for part in parts(engine.rank, engine.size, 1):
        loss = engine(samples(part).to(engine.dtype), used_in(step))
        engine.backward(loss)
        total += loss.item()
    engine.step(**how)
    engine.engine.axis.group.all_reduce(total)
    return total.item()


def by_hpczero(
    world: World,
    spec: dict[str, Any],
    own_rates: bool = False,
    kind: type[Chain] = Chain,
    **wanted: Any,
) -> Result:
    with hpczero.initialize(made(kind, 3 + world.rank), spec, world, **wanted) as engine:
        arguments = [rates(step) if own_rates else {} for step in range(STEPS)]
        losses = [one_step(engine, step, **arguments[step]) for step in range(STEPS)]
        return losses, engine.full_state_dict()


def by_pytorch(
    optimizer: Any,
    options: dict[str, Any],
    lr: float,
    groups: bool = False,
    own_rates: bool = False,
    kind: type[Chain] = Chain,
) -> Result:
    module, spec = made(kind), Spec.model_validate(spec_of(0, False, lr))
    kind = getattr(torch.optim, optimizer) if isinstance(optimizer, str) else optimizer
    named = list(module.named_parameters())
    of_names = [(in_group(name) if groups else {}) for name, _ in named]
    each = [
        {"params": [own], "name": name, **of}
        for (name, own), of in zip(named, of_names, strict=True)
    ]
    if optimizer is ADAMW:
        each = [{"weight_decay": 0.1 * (group["params"][0].dim() > 1), **group} for group in each]
    stepper = kind(each, lr=lr, **options)
    losses = []
    for step in range(STEPS):
        rate = learning_rate(spec, step)
        for (name, _), of, group in zip(named, of_names, stepper.param_groups, strict=True):
            group["lr"] = of.get("lr", lr) * rate / lr
            if own_rates:
                group["lr"] = rate_of(step, name, group["lr"], of.get("lr", lr) / lr)
        stepper.zero_grad()
        loss = module(samples(slice(0, SAMPLES)), used_in(step))
        loss.backward()
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        stepper.step()
        losses.append(loss.item())
    return losses, module.state_dict()


def assert_close(found: Result, expected: Result, rank: int) -> None:
    assert found[0] == pytest.approx(expected[0], rel=1e-5)
    for name, tensor in (expected[1] if rank == 0 else {}).items():
        assert (tensor - found[1][name]).norm() <= 1e-4 * tensor.norm(), name


def assert_equal(one: Result, other: Result) -> None:
    assert one[0] == other[0]
    assert all(torch.equal(tensor, other[1][name]) for name, tensor in one[1].items())


@contextmanager
def begun(
    world: World, stage: int, shared: bool, steps: int, **wanted: Any
) -> Iterator[tuple[Training, list[float]]]:
    """Yield an engine after so many steps, and their losses."""
    with hpczero.initialize(made(Chain), spec_of(stage, shared), world, **wanted) as engine:
        yield engine, [one_step(engine, step) for step in range(steps)]


def saved(engine: Training) -> dict[str, Any]:
    inner = engine.engine
    return {
        "facts": inner.update.facts(),
        "missed": dict(inner.absent.missed),
        "flat": [
            {"master": unit.master.clone()}
            | {name: state.clone() for name, state in inner.update.states(unit).items()}
            for unit in inner.units
        ],
    }


def load(engine: Training, state: Mapping[str, Any], steps: int) -> None:
    inner = engine.engine
    for unit, flat in zip(inner.units, state["flat"], strict=True):
        own = {"master": unit.master} | inner.update.states(unit)
        assert own.keys() == flat.keys()
        for name, values in flat.items():
            own[name].copy_(values)
    inner.update.restore(state["facts"])
    inner.updates = engine.steps = steps
    inner.absent.missed = dict(state["missed"])
    inner.renew(lambda unit: unit.weights_from_master())
