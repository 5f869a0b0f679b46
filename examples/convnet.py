"""A convolutional network; each rank has samples of its own.

mpirun -n 2 python examples/convnet.py
"""

import torch
from torch import nn
from torch.nn import functional

import hpczero

SAMPLES, SIDE, CLASSES = 24, 8, 10
SPEC = {
    "name": "convnet",
    "train": {"steps": 20, "precision": "fp32"},
    "optimizer": {"lr": 3e-3, "eps": 1e-6},
    "zero": {"stage": 2},
}


def build():
    def block(inner, outer, stride):
        return nn.Sequential(
            nn.Conv2d(inner, outer, 3, stride, padding=1), nn.GroupNorm(4, outer), nn.ReLU()
        )

    features = nn.Sequential(block(3, 16, 1), block(16, 32, 2), block(32, 32, 1))
    return nn.Sequential(
        features, nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, CLASSES))
    )


def samples(step, rank, size):
    """Return this rank's images and classes: some of the same ones on any number of ranks."""
    generator = torch.Generator().manual_seed(step)
    images = torch.randn(SAMPLES, 3, SIDE, SIDE, generator=generator)
    classes = (images.mean((1, 2, 3)) * 60).long().clamp(-5, 4) + 5
    return images[rank::size], classes[rank::size]


def loop(engine):
    """Train; yield this rank's part of each step's loss."""
    while engine.steps < engine.spec.train.steps:
        images, classes = samples(engine.steps, engine.rank, engine.size)
        logits = engine(images.to(engine.device, engine.dtype))
        wanted = classes.to(engine.device)
        loss = functional.cross_entropy(logits.float(), wanted, reduction="sum") / SAMPLES
        engine.backward(loss, last=True)
        engine.step()
        yield loss.item()


if __name__ == "__main__":
    with hpczero.initialize(build(), SPEC) as engine:
        engine.resume()
        for loss in loop(engine):
            print(f"step {engine.steps}, rank {engine.rank}: {loss:.4f}")
        engine.save()
