"""A critic with a gradient penalty: a gradient inside of the loss (Gulrajani et al. 2017).

mpirun -n 2 python examples/gradient_penalty.py
"""

import torch
from torch import nn

import hpczero

SAMPLES, WIDTH = 24, 32
SPEC = {
    "name": "critic",
    "train": {"steps": 20, "precision": "fp32"},
    "optimizer": {"lr": 2e-3, "eps": 1e-6},
    "zero": {"stage": 2},
}


def build():
    return nn.Sequential(
        nn.Sequential(nn.Linear(4, WIDTH), nn.SiLU()),
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.SiLU()),
        nn.Linear(WIDTH, 1),
    )


def samples(step, rank, size):
    generator = torch.Generator().manual_seed(step)
    real = torch.randn(SAMPLES, 4, generator=generator) + 1
    fake = torch.randn(SAMPLES, 4, generator=generator)
    share = torch.rand(SAMPLES, 1, generator=generator)
    return [one[rank::size] for one in (real, fake, share)]


def loop(engine):
    """Train; yield this rank's part of each step's loss."""
    while engine.steps < engine.spec.train.steps:
        real, fake, share = (
            one.to(engine.device, engine.dtype)
            for one in samples(engine.steps, engine.rank, engine.size)
        )
        between = (share * real + (1 - share) * fake).requires_grad_()
        (slope,) = torch.autograd.grad(engine(between).sum(), between, create_graph=True)
        penalty = (slope.float().norm(dim=1) - 1).square().sum()
        loss = ((engine(fake) - engine(real)).float().sum() + 10 * penalty) / SAMPLES
        engine.backward(loss)
        engine.step()
        yield loss.item()


if __name__ == "__main__":
    with hpczero.initialize(build(), SPEC) as engine:
        engine.resume()
        for loss in loop(engine):
            print(f"step {engine.steps}, rank {engine.rank}: {loss:.4f}")
        engine.save()
