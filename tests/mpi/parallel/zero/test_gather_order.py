"""Ranks gather alike at stage 3, whatever one of them still holds of what was gathered."""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

import hpczero
from hpczero.comm.group import Work
from hpczero.comm.world import World
from hpczero.parallel.zero.gather import Gatherer
from hpczero.parallel.zero.unit import Unit

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.ranks(2, 3, 4),
    pytest.mark.usual(2),
    pytest.mark.usefixtures("poisoned_regions"),
]

WIDTH, STEPS = 8, 4


def net() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(7)))


def inputs(step: int) -> torch.Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))


def by_pytorch() -> list[float]:
    module, losses = net(), []
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for step in range(STEPS):
        loss = module(inputs(step)).square().sum()
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return losses


def trained(world: World, module: nn.Module) -> tuple[list[float], Any]:
    spec = {
        "train": {"precision": "fp32", "steps": STEPS, "grad_clip": 0},
        "zero": {"stage": 3, "node_shared": False},
    }
    losses = []
    with hpczero.initialize(module, spec, world, optimizer="SGD") as engine:
        for step in range(STEPS):
            loss = engine(inputs(step)).square().sum()
            engine.backward(loss / engine.size)
            engine.step(lr=0.1)
            losses.append(loss.item())
        return losses, engine.engine.gatherer.loans


@pytest.mark.filterwarnings("ignore:zero.stage = 3 takes more memory")
@pytest.mark.parametrize("many", [1, 3, 20])
def test_a_rank_that_keeps_views_of_its_weights(world: World, many: int) -> None:
    """A loop that logs does that; what it has kept of the present step has its values."""
    module, kept = net(), deque[tuple[torch.Tensor, torch.Tensor]](maxlen=many)

    def keep(layer: nn.Module, _: object) -> None:
        weight = layer.weight
        assert isinstance(weight, torch.Tensor)
        kept.append((weight.detach()[1:], weight.detach()[1:].clone()))

    def compare(*_: object) -> None:
        assert all(torch.equal(view, copied) for view, copied in list(kept)[-7:][:many])

    if world.rank == world.size - 1:
        for layer in module:
            layer.register_forward_pre_hook(keep)
        module.register_forward_hook(compare)
    losses, loans = trained(world, module)
    assert losses == pytest.approx(by_pytorch(), rel=1e-5)
    assert bool(loans.instead) == (world.rank == world.size - 1)


def test_a_library_that_lets_go_late(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """gloo's threads do, on each rank at another moment: that costs no memory either."""
    held, begin = deque[torch.Tensor](maxlen=4), Gatherer.__init__

    def holding(
        gatherer: Gatherer,
        units: Sequence[Unit],
        memory: torch.Tensor,
        start: Callable[[Unit, torch.Tensor], Work],
    ) -> None:
        def start_and_hold(unit: Unit, buffer: torch.Tensor) -> Work:
            held.append(buffer.view(torch.uint8))
            return start(unit, buffer)

        begin(gatherer, units, memory, start_and_hold if world.rank else start)

    monkeypatch.setattr(Gatherer, "__init__", holding)
    losses, loans = trained(world, net())
    assert losses == pytest.approx(by_pytorch(), rel=1e-5)
    assert not loans.still_seen
    assert not loans.instead
