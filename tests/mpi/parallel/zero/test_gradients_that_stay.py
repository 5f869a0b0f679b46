"""A step has the gradients of its own engine's backwards alone: not another engine's, nor those
of a backward that failed.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import hpczero
from hpczero.comm.world import World
from hpczero.errors import HpczeroError
from hpczero.parallel.zero.parameters import gradient_left
from tests.support.user_modules import WAYS, made

pytestmark = [pytest.mark.mpi, pytest.mark.usual(2)]

WIDTH, LR, STEPS = 16, 1e-2, 3
EVERY_WAY = pytest.mark.parametrize(("stage", "shared"), WAYS)


def spec_of(stage: int, shared: bool) -> dict[str, Any]:
    train = {"precision": "fp32", "steps": STEPS, "grad_clip": 0}
    optimizer = {"lr": LR, "eps": 1e-6, "weight_decay": 0}
    return {"train": train, "optimizer": optimizer, "zero": {"stage": stage, "node_shared": shared}}


def layers(count: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(count)))


def generator() -> nn.Module:
    return layers(3)


def discriminator() -> nn.Module:
    return nn.Sequential(layers(3), nn.Linear(WIDTH, 1))


def samples(rank: int, size: int) -> torch.Tensor:
    return torch.randn(6, 4, WIDTH, generator=torch.Generator().manual_seed(2))[rank::size]


def loss_of_discriminator(d: Any, g: Any, real: torch.Tensor) -> torch.Tensor:
    return (
        functional.softplus(-d(real)) + functional.softplus(d(g(real.flip(1)).detach()))
    ).sum() / 10


def loss_of_generator(d: Any, g: Any, real: torch.Tensor) -> torch.Tensor:
    return functional.softplus(-d(g(real.flip(1)))).sum() / 10


def by_pytorch() -> list[dict[str, torch.Tensor]]:
    g, d = made(generator), made(discriminator)
    optimizers = [torch.optim.AdamW(m.parameters(), LR, (0.9, 0.95), 1e-6, 0) for m in (g, d)]
    for _ in range(STEPS):
        for loss_of, optimizer in zip(
            (loss_of_generator, loss_of_discriminator), optimizers, strict=True
        ):
            for each in optimizers:
                each.zero_grad()
            loss_of(d, g, samples(0, 1)).backward()
            optimizer.step()
    return [module.state_dict() for module in (g, d)]


@EVERY_WAY
@pytest.mark.ranks(1, 2, 3)
@pytest.mark.few(2)
def test_two_engines_of_which_one_trains_through_the_other_equal_pytorch(
    world: World, stage: int, shared: bool, recwarn: pytest.WarningsRecorder
) -> None:
    spec = spec_of(stage, shared) | {"schedule": {"name": "constant", "warmup_steps": 0}}
    own = samples(world.rank, world.size)
    with (
        hpczero.initialize(made(generator), spec, world) as g,
        hpczero.initialize(made(discriminator), spec, world) as d,
    ):
        for _ in range(STEPS):
            g.backward(loss_of_generator(d, g, own))
            g.step()
            d.backward(loss_of_discriminator(d, g, own))
            d.step()
        found = [g.full_state_dict(), d.full_state_dict()]
    if world.rank == 0:
        for ours, theirs in zip(found, by_pytorch(), strict=True):
            for name, tensor in theirs.items():
                assert (tensor - ours[name]).norm() <= 1e-4 * tensor.norm() + 1e-6, name
    told = [
        str(each.message) for each in recwarn if "another engine's backward" in str(each.message)
    ]
    assert len(told) == (world.rank == 0), told


class Fails(torch.autograd.Function):
    """Raises in backward while it is told to."""

    told = False

    @staticmethod
    def forward(context: Any, x: torch.Tensor, may: bool) -> torch.Tensor:
        context.may = may
        return x.clone()

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        if Fails.told and context.may:
            raise ValueError("on purpose")
        return gradient, None


class FailingNet(nn.Module):
    """Backward fails below the layer of this number."""

    def __init__(self, fails_at: int) -> None:
        super().__init__()
        self.parts = layers(6)
        self.fails_at = fails_at

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, part in enumerate(self.parts):
            x = part(Fails.apply(x, number == self.fails_at))
        return x


@contextmanager
def failing() -> Iterator[None]:
    Fails.told = True
    try:
        with pytest.raises(ValueError, match="on purpose"):
            yield
    finally:
        Fails.told = False


def norm_of_step(engine: Any, last: bool) -> float:
    loss = engine(samples(engine.rank, engine.size)).square().sum()
    engine.backward(loss, last=last)
    norm: float = engine.step(lr=1e-12).grad_norm
    return norm


@EVERY_WAY
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.ranks(1, 2, 3)
@pytest.mark.few(6)
def test_zero_grad_removes_what_a_failed_backward_has_left(
    world: World, stage: int, shared: bool, last: bool
) -> None:
    gathers = stage == 3 and not (shared and world.size > 1)
    # Ranks may fail in different places, where none waits for what another one no longer gathers.
    place = 2 + world.rank % 2 if gathers else 1 + world.rank
    with hpczero.initialize(
        made(lambda: FailingNet(place)), spec_of(stage, shared), world
    ) as engine:
        first = norm_of_step(engine, last)
        for _ in range(2):
            engine.backward(engine(samples(engine.rank, engine.size)).sum())
            with failing():
                loss = engine(samples(engine.rank, engine.size)).square().sum()
                engine.backward(loss, last=last)
            with pytest.raises(HpczeroError, match=r"raised an error.* engine\.zero_grad\(\)"):
                engine.backward(torch.ones(1, requires_grad=True))
            with pytest.raises(HpczeroError, match=r"raised an error.* engine\.zero_grad\(\)"):
                engine.step()
            engine.zero_grad()
            assert norm_of_step(engine, last) == pytest.approx(first, rel=1e-6)


@EVERY_WAY
@pytest.mark.few(3)
def test_zero_grad_leaves_a_batch_out(world: World, stage: int, shared: bool) -> None:
    with hpczero.initialize(made(generator), spec_of(stage, shared), world) as engine:
        engine.zero_grad()
        first = norm_of_step(engine, True)
        for last in (False, True):
            engine.backward(1000 * engine(torch.ones(2, WIDTH)).sum(), last=last)
            engine.zero_grad()
            with pytest.raises(HpczeroError, match="backward comes before it"):
                engine.step()
            assert norm_of_step(engine, last) == pytest.approx(first, rel=1e-6)


@EVERY_WAY
def test_a_backward_past_the_engine_is_an_error_that_changes_nothing(
    world: World, stage: int, shared: bool
) -> None:
    with hpczero.initialize(made(generator), spec_of(stage, shared), world) as engine:
        first = norm_of_step(engine, False)
        engine.backward(engine(samples(engine.rank, engine.size)).square().sum())
        with pytest.raises(
            HpczeroError, match=r"a gradient of 2\.0\.\w+ came outside of engine\.backward"
        ):
            engine(torch.ones(2, WIDTH)).sum().backward()
        assert all(gradient_left(own) is None for own in engine.module.parameters())
        assert engine.step(lr=1e-12).grad_norm == pytest.approx(first, rel=1e-6)
        (of_input,) = torch.autograd.grad(
            engine(x := torch.ones(2, WIDTH, requires_grad=True)).sum(), [x]
        )
        assert of_input.any()
        assert norm_of_step(engine, False) == pytest.approx(first, rel=1e-6)
