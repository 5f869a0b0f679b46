"""A model on meta: no rank has all of it, at no time.

mpirun -n 2 python examples/meta.py
"""

import torch
from torch import nn

import hpczero

SAMPLES, WIDTH, LAYERS = 24, 32, 4
SPEC = {
    "name": "meta",
    "train": {"steps": 20, "precision": "fp32"},
    "optimizer": {"lr": 3e-3, "eps": 1e-6},
    "zero": {"stage": 3},
}


class Scale(nn.Module):
    """A module that is none of PyTorch's says itself how it begins."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.empty(WIDTH))
        self.register_buffer("floor", torch.empty(()))
        self.reset_parameters()

    def reset_parameters(self):
        nn.init.constant_(self.scale, 0.5)
        nn.init.constant_(self.floor, -1.0)

    def forward(self, x):
        return (x * self.scale).clamp_min(self.floor.item())


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.scale = Scale()

    def forward(self, x):
        return x + self.scale(self.down(torch.tanh(self.up(self.norm(x)))))


def build():
    with torch.device("meta"):
        return nn.Sequential(*(Block() for _ in range(LAYERS)), nn.Linear(WIDTH, 1))


def samples(step, rank, size):
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(SAMPLES, WIDTH, generator=generator)
    return x[rank::size], x[rank::size].mean(1, keepdim=True).sin()


def loop(engine):
    """Train; yield this rank's part of each step's loss."""
    while engine.steps < engine.spec.train.steps:
        x, wanted = samples(engine.steps, engine.rank, engine.size)
        found = engine(x.to(engine.device, engine.dtype)).float()
        loss = (found - wanted.to(engine.device)).square().sum() / SAMPLES
        engine.backward(loss, last=True)
        engine.step()
        yield loss.item()


if __name__ == "__main__":
    with hpczero.initialize(build(), SPEC) as engine:
        engine.resume()
        for loss in loop(engine):
            print(f"step {engine.steps}, rank {engine.rank}: {loss:.4f}")
        engine.save()
