"""Numbers of many types in one model: what is trained takes `train.precision`, the rest stays.

mpirun -n 2 python examples/dtypes.py
"""

import torch
from torch import nn

import hpczero

SAMPLES, WIDTH, IDS = 24, 24, 11
SPEC = {
    "name": "dtypes",
    "train": {"steps": 20, "precision": "fp32"},
    "optimizer": {"lr": 3e-3, "eps": 1e-6},
    "zero": {"stage": 2},
}


class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        self.ids = nn.Embedding(IDS, WIDTH)
        self.scale = nn.Parameter(torch.tensor(0.5, dtype=torch.float64))
        self.table = nn.Parameter(  # whole numbers are no weights: they stay as they are
            torch.randint(0, 255, (IDS, WIDTH), generator=generator, dtype=torch.uint8),
            requires_grad=False,
        )
        self.register_buffer("seen", torch.zeros(IDS, dtype=torch.int64))
        self.register_buffer("shift", torch.randn(WIDTH, generator=generator).half())
        self.register_buffer("rounded", torch.randn(WIDTH, generator=generator).bfloat16())
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, ids):
        if self.training:
            self.seen += torch.bincount(ids, minlength=IDS)
        x = self.ids(ids).float() + self.table[ids].float() / 255
        x = x + self.shift.float() * self.rounded.float()
        x = (x.double() * self.scale).float()  # here in double precision
        dtype = self.head.weight.dtype
        return self.head(torch.tanh(self.frozen(x.to(dtype))))


def build():
    return Mixed()


def samples(step, rank, size):
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(0, IDS, (SAMPLES,), generator=generator)
    return ids[rank::size], (ids[rank::size].float() / IDS).unsqueeze(1)


def loop(engine):
    """Train; yield this rank's part of each step's loss."""
    while engine.steps < engine.spec.train.steps:
        ids, wanted = samples(engine.steps, engine.rank, engine.size)
        found = engine(ids.to(engine.device)).float()
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
