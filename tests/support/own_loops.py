"""A loop of one's own, whose batches do not depend on the ranks."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import hpczero
from hpczero.comm.world import World
from hpczero.train.saved_states import common_states
from tests.support.user_modules import made

SAMPLES = 12  # of a step, over all ranks
STEPS = 8
WIDTH = 10


class Small(nn.Module):
    """A little of everything: an embedding, a norm, a parameter of its own, a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 24)
        self.blocks = nn.Sequential(nn.GELU(), nn.Linear(24, 24), nn.LayerNorm(24), nn.Tanh())
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.head = nn.Linear(24, 1)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        x = self.first(x.to(self.first.weight.dtype))
        return self.head(self.blocks(x)) * self.scale


def spec_of(folder: str, stage: int = 1, shared: bool = False, **more: Any) -> dict[str, Any]:
    tables: dict[str, Any] = {
        "name": "loop",
        "output": folder,
        "train": {"steps": STEPS, "precision": "fp32"},
        "optimizer": {"lr": 1e-2, "eps": 1e-6},
        "zero": {"stage": stage, "node_shared": shared},
    }
    for name, table in more.items():
        tables[name] = {**tables.get(name, {}), **table}
    return tables


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(SAMPLES, WIDTH, generator=generator)
    return x, x.sum(1, keepdim=True).sin()


class Loop:
    """Steps of an engine; `losses` by step, over all ranks."""

    def __init__(self, engine: Any, world: World) -> None:
        self.engine = engine
        self.world = world
        self.own = torch.Generator().manual_seed(engine.rank)  # each rank's
        self.losses: dict[int, float] = {}
        self.drawn: list[float] = []

    @property
    def random(self) -> Mapping[str, torch.Generator]:
        return {"own": self.own}

    def extra(self) -> dict[str, Any]:
        return {"losses": torch.tensor(list(self.losses.values()), dtype=torch.float64)}

    def step(self) -> None:
        engine = self.engine
        x, y = batch(engine.steps)
        own = slice(engine.rank, None, engine.size)
        loss = functional.mse_loss(engine(x[own]).float(), y[own], reduction="sum") / SAMPLES
        engine.backward(loss)
        engine.step()
        total = loss.detach().double().view(1)
        self.world.everyone.all_reduce(total)
        self.losses[engine.steps] = total.item()
        self.drawn.append(torch.rand((), generator=self.own).item())

    def run(self, until: int = STEPS) -> "Loop":
        while self.engine.steps < until:
            self.step()
        return self


def states(engine: Any) -> list[torch.Tensor]:
    """Everything that a step changes on this rank."""
    own = engine.engine
    return [state.clone() for unit in own.units for state in common_states(own, unit).values()]


def started(world: World, spec: Mapping[str, Any], **how: Any) -> Any:
    return hpczero.initialize(made(Small, seed=3 + world.rank), dict(spec), world, **how)
