"""Loops of one's own whose replicas exchange less than gradients, for tests of them."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

import hpczero
from hpczero.comm.world import World
from hpczero.train.initialize import Training
from tests.support.own_loops import Loop, Small
from tests.support.replicas import METHODS, own_spec_of
from tests.support.user_modules import made

SEED = 1  # no sign hangs by a rounding: gradients off by 6e-8 of their largest, the same losses
STEPS = 12
LOCAL = [name for name in METHODS if "local" in name]


@contextmanager
def looping(world: World, spec: dict[str, Any]) -> Iterator[Loop]:
    """Yield a loop on nodes of two ranks; on two ranks, on two nodes."""
    nodes = world.part(range(world.size), 1 + (world.size > 2))
    with hpczero.initialize(made(Small, SEED + world.rank), spec, nodes) as engine:
        yield Loop(engine, nodes)
    nodes.close()


def spec_of(method: str, stage: int, folder: str = "runs", **tables: Any) -> dict[str, Any]:
    tables = {"optimizer": {"eps": 1e-4}, "train": {"grad_clip": 0.7}} | tables
    return own_spec_of(method, folder, zero={"stage": stage}, **tables)


def here(engine: Training) -> dict[str, Tensor]:
    """Return the weights of this rank's replica."""
    with engine.gathered(engine.module.parameters()):
        return {name: own.detach().clone() for name, own in engine.module.named_parameters()}


def are_equal(world: World, weights: dict[str, Tensor]) -> bool:
    """Return True if all ranks have them, to the bit."""
    found = [world.everyone.stack(values) for values in weights.values()]
    return all(torch.equal(values[0], other) for values in found for other in values)


def parameters_of(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: values for name, values in state.items() if name != "seen"}
