"""A vision transformer: a class token and positions beside its blocks.

mpirun -n 2 python examples/vit.py
"""

import torch
from torch import nn
from torch.nn import functional

import hpczero

SAMPLES, SIDE, PATCH, CLASSES, WIDTH, HEADS = 12, 16, 4, 10, 48, 4
SPEC = {
    "name": "vit",
    "train": {"steps": 20, "precision": "fp32"},
    "optimizer": {"lr": 2e-3, "eps": 1e-6},
    "zero": {"stage": 3},
}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.before_attention = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.before_mlp = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x):
        qkv = self.qkv(self.before_attention(x)).unflatten(-1, (3, HEADS, -1))
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(query, key, value)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.mlp(self.before_mlp(x))


class VisionTransformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, PATCH, PATCH)
        self.token = nn.Parameter(torch.zeros(1, 1, WIDTH))
        self.positions = nn.Parameter(torch.randn(1, (SIDE // PATCH) ** 2 + 1, WIDTH) * 0.02)
        self.blocks = nn.Sequential(*(Block() for _ in range(3)))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, images):
        patches = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(images), -1, -1), patches], 1) + self.positions
        return self.head(self.norm(self.blocks(x)[:, 0]))


def build():
    return VisionTransformer()


def samples(step, rank, size):
    generator = torch.Generator().manual_seed(step)
    images = torch.randn(SAMPLES, 3, SIDE, SIDE, generator=generator)
    classes = (images[:, 0].mean((1, 2)) * 40).long().clamp(-5, 4) + 5
    return images[rank::size], classes[rank::size]


def loop(engine):
    """Train; yield this rank's part of each step's loss."""
    while engine.steps < engine.spec.train.steps:
        images, classes = samples(engine.steps, engine.rank, engine.size)
        logits = engine(images.to(engine.device, engine.dtype)).float()
        loss = functional.cross_entropy(logits, classes.to(engine.device), reduction="sum")
        loss = loss / SAMPLES
        engine.backward(loss, last=True)
        engine.step()
        yield loss.item()


if __name__ == "__main__":
    with hpczero.initialize(build(), SPEC) as engine:
        engine.resume()
        for loss in loop(engine):
            print(f"step {engine.steps}, rank {engine.rank}: {loss:.4f}")
        engine.save()
