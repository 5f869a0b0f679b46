"""Modules of users trained by hpczero and by plain PyTorch, and the comparison of both."""

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn

import hpczero
from hpczero.comm.world import World
from hpczero.spec.schema import Spec
from tests.support.models import (
    CLASSES,
    SIDE,
)

WAYS = list(product((0, 1, 2, 3), (False, True)))  # stage, node-shared


def ways(number: int, everything: bool) -> list[tuple[int, bool]]:
    """Every stage once, node-shared where stage + number is odd; with `everything` all ways."""
    return [
        (stage, shared) for stage, shared in WAYS if everything or shared == (stage + number) % 2
    ]


STEPS = 4


EPS = 1e-6


SAMPLES = 24


SHARE_SAMPLES = pytest.mark.ranks(1, 2, 3, 4, 6, 8)  # each rank has as many as the others


SHARE_HALVES = pytest.mark.ranks(1, 2, 3, 4, 6)  # and as many in each of two backwards


Loss = Callable[
    [Any, slice], torch.Tensor
]  # of an engine (or module) on these samples of the batch


def spec_of(stage: int, shared: bool, precision: str = "fp32") -> dict[str, Any]:
    return {
        "train": {"precision": precision, "steps": STEPS},
        "optimizer": {"lr": 1e-2, "eps": EPS},
        "zero": {"stage": stage, "node_shared": shared},
    }


def made(kind: Callable[[], nn.Module], seed: int = 3) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return kind()


def images() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(SAMPLES, 3, SIDE, SIDE, generator=generator), torch.randint(
        CLASSES, (SAMPLES,), generator=generator
    )


def of_images(module: Any, part: slice) -> torch.Tensor:
    x, y = images()
    loss: torch.Tensor = module(x[part], y[part])
    return loss / SAMPLES


def of_tokens(module: Any, part: slice) -> torch.Tensor:
    tokens = torch.randint(40, (SAMPLES, 9), generator=torch.Generator().manual_seed(2))
    loss: torch.Tensor = module(tokens[part])["loss"]
    return loss / 100


def of_skipping(module: Any, part: slice) -> torch.Tensor:
    """Half of the samples do not use every layer."""
    tokens = torch.randint(40, (SAMPLES, 9), generator=torch.Generator().manual_seed(2))
    halves = [
        (tokens[index : index + 1], 2 * index >= SAMPLES) for index in range(part.start, part.stop)
    ]
    return torch.stack([module(one, skip=skip)["loss"] for one, skip in halves]).sum() / 100


def of_vectors(module: Any, part: slice) -> torch.Tensor:
    loss: torch.Tensor = module(
        torch.randn(SAMPLES, 16, generator=torch.Generator().manual_seed(2))[part]
    )
    return loss / 100


def alone(kind: Callable[[], nn.Module], loss: Loss) -> tuple[list[float], dict[str, torch.Tensor]]:
    """PyTorch itself, on one rank: AdamW as hpczero does it, with clipping, weight decay for
    matrices only, and the cosine schedule.
    """
    from hpczero.optim.learning_rate import learning_rate

    module, spec = made(kind), Spec.model_validate(spec_of(0, False))
    trained = [own for own in module.parameters() if own.requires_grad]
    groups = [{"params": [own for own in trained if own.dim() > 1], "weight_decay": 0.1}]
    groups.append({"params": [own for own in trained if own.dim() < 2], "weight_decay": 0.0})
    optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), eps=EPS)
    losses = []
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(spec, step)
        total = loss(module, slice(0, SAMPLES))
        total.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total.item())
    return losses, {name: tensor.clone() for name, tensor in module.state_dict().items()}


def parts(rank: int, size: int, backwards: int) -> Iterator[slice]:
    """This rank's samples, in so many pieces; at 1, 2, 3 and 4 ranks."""
    width = SAMPLES // size // backwards
    for number in range(backwards):
        start = (rank * backwards + number) * width
        yield slice(start, start + width)


def trained(
    world: World,
    kind: Callable[[], nn.Module],
    loss: Loss,
    spec: dict[str, Any],
    backwards: int = 1,
    hint: bool = False,
    **how: bool,
) -> tuple[list[float], dict[str, torch.Tensor]]:
    losses = []
    with hpczero.initialize(made(kind, seed=3 + world.rank), spec, world, **how) as engine:
        for _ in range(STEPS):
            total = torch.zeros(1, dtype=torch.float64)
            for number, part in enumerate(parts(engine.rank, engine.size, backwards)):
                part_loss = loss(engine, part)
                engine.backward(part_loss, last=hint and number + 1 == backwards)
                total += part_loss.item()
            engine.step()
            with torch.no_grad():  # between steps nothing is left behind
                loss(engine, slice(0, 1))
            world.everyone.all_reduce(total)
            losses.append(total.item())
        return losses, engine.full_state_dict()


def assert_same(
    one: tuple[list[float], dict[str, torch.Tensor]],
    other: tuple[list[float], dict[str, torch.Tensor]],
    rank: int,
) -> None:
    assert one[0] == pytest.approx(other[0], rel=1e-5)
    if rank:
        assert not other[1]
        return
    assert one[1].keys() == other[1].keys()
    for name, tensor in one[1].items():
        assert (tensor - other[1][name]).float().norm() <= 2e-4 * tensor.float().norm() + 1e-6, name
