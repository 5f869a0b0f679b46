"""A user's torch.set_default_dtype changes neither initial values nor a step, to the bit."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

import hpczero
from hpczero.comm.world import World
from tests.support.user_modules import WAYS

pytestmark = [pytest.mark.mpi, pytest.mark.usual(2)]


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def spec_of(stage: int, shared: bool, precision: str) -> dict[str, Any]:
    train = {"precision": precision, "steps": 4}
    return {
        "train": train,
        "optimizer": {"lr": 1e-2},
        "zero": {"stage": stage, "node_shared": shared},
    }


def module(on: str) -> nn.Module:
    """With an embedding, whose gradient is its rows, and a part that must wait for a slot."""
    with torch.random.fork_rng(), torch.device(on):
        torch.manual_seed(4)
        layers = [nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4)]
        return nn.Sequential(nn.Embedding(40, 16), *layers)


def trained(
    world: World, spec: dict[str, Any], dtype: torch.dtype, on: str
) -> tuple[list[float], Any]:
    net, tokens = module(on), torch.arange(24).view(4, 6)[world.rank % 4 :]
    norms = []
    with default_dtype(dtype), hpczero.initialize(net, spec, world) as engine:
        first = engine.full_state_dict()
        for _ in range(2):
            engine.backward(engine(tokens).float().square().sum())
            norms.append(engine.step().grad_norm)
        return norms, [first, engine.full_state_dict()]


@pytest.mark.parametrize(("stage", "shared"), WAYS)
@pytest.mark.ranks(1, 2, 3)
@pytest.mark.few(1)
def test_the_default_type_of_tensors_changes_no_bit(world: World, stage: int, shared: bool) -> None:
    for precision, on in (("fp32", "cpu"), ("bf16", "meta")):
        spec = spec_of(stage, shared, precision)
        norms, states = trained(world, spec, torch.float32, on)
        for dtype in (torch.float64, torch.bfloat16, torch.float16):
            other_norms, other_states = trained(world, spec, dtype, on)
            assert other_norms == norms
            for state, other in zip(states, other_states, strict=True):
                assert all(torch.equal(other[name], tensor) for name, tensor in state.items())
                assert all(other[name].dtype == torch.float32 for name in state)
