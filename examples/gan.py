"""A GAN: two models, two engines, two runs.

mpirun -n 2 python examples/gan.py
"""

import torch
from torch import nn
from torch.nn import functional

import hpczero

SAMPLES, NOISE, WIDTH = 24, 8, 32
SPEC = {
    "train": {"steps": 20, "precision": "fp32"},
    "optimizer": {"lr": 2e-3, "eps": 1e-6, "betas": [0.5, 0.9]},
    "zero": {"stage": 1},
}


def build_generator():
    return nn.Sequential(nn.Linear(NOISE, WIDTH), nn.GELU(), nn.Linear(WIDTH, 2))


def build_discriminator():
    return nn.Sequential(
        nn.Linear(2, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, 1)
    )


def samples(step, rank, size):
    """Return noise, and points on a circle."""
    generator = torch.Generator().manual_seed(step)
    noise = torch.randn(SAMPLES, NOISE, generator=generator)
    angle = torch.rand(SAMPLES, 1, generator=generator) * 6.28
    return noise[rank::size], torch.cat([angle.sin(), angle.cos()], 1)[rank::size]


def loop(generator, discriminator):
    """Train both in turns; yield this rank's part of the two losses of each step."""
    while generator.steps < generator.spec.train.steps:
        noise, real = samples(generator.steps, generator.rank, generator.size)
        noise = noise.to(generator.device, generator.dtype)
        real = real.to(discriminator.device, discriminator.dtype)

        with torch.no_grad():
            made = generator(noise)
        judged = functional.softplus(-discriminator(real)) + functional.softplus(
            discriminator(made)
        )
        judging = judged.float().sum() / SAMPLES
        discriminator.backward(judging)
        discriminator.step()

        discriminator.module.requires_grad_(False)  # its gradients are not asked for
        making = functional.softplus(-discriminator(generator(noise))).float().sum() / SAMPLES
        generator.backward(making)
        discriminator.module.requires_grad_(True)
        generator.step()
        yield judging.item(), making.item()


if __name__ == "__main__":
    with hpczero.World.start() as world:
        generator = hpczero.initialize(build_generator(), SPEC | {"name": "gan.maker"}, world)
        discriminator = hpczero.initialize(
            build_discriminator(), SPEC | {"name": "gan.judge"}, world
        )
        with generator, discriminator:
            begins = min(generator.resume().step, discriminator.resume().step)
            if generator.steps != discriminator.steps:  # killed between two saves
                generator.load(f"runs/gan.maker/checkpoints/step-{begins:08d}")
                discriminator.load(f"runs/gan.judge/checkpoints/step-{begins:08d}")
            for judging, making in loop(generator, discriminator):
                print(f"step {generator.steps}, rank {world.rank}: {judging:.4f} {making:.4f}")
                if generator.steps % 10 == 0:
                    discriminator.save()
                    generator.save()
