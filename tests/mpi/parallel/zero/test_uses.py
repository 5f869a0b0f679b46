"""Parameters that a module works with several times in one backward: as an embedding and as a
linear map, and inside a backward of its own.
"""

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import hpczero
from hpczero.comm.world import World
from hpczero.errors import HpczeroError

pytestmark = [pytest.mark.mpi, pytest.mark.usual(2)]

SHARE_SAMPLES = pytest.mark.ranks(1, 2, 3, 4)


def spec_of(stage: int, precision: str = "bf16") -> dict[str, Any]:
    return {
        "train": {"precision": precision, "steps": 4},
        "optimizer": {"lr": 1e-2},
        "zero": {"stage": stage, "node_shared": False},
    }


class Tied(nn.Module):
    """A weight that is looked up in ("e") and mapped with ("l"), in any order, with layers
    between its uses so that its unit waits for a slot.
    """

    def __init__(self, uses: str) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.uses = uses
        self.embedding = nn.Embedding(40, 16)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in uses)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for use, layer in zip(self.uses, self.layers, strict=True):
            weight = self.embedding.weight
            x = torch.tanh(layer(x)) + (
                self.embedding(tokens.flip(1))
                if use == "e"
                else nn.functional.linear(x, weight).tanh() @ weight / 40
            )
        return x.float().square().sum() / 100


class Reentrant(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first, self.again = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = checkpoint(lambda y: self.again(y).tanh(), self.first(x), use_reentrant=True)
        return self.again(inner).square().sum()


@SHARE_SAMPLES
@pytest.mark.parametrize("uses", ["le", "el", "lle", "ele", "eel"])
@pytest.mark.few(3)
def test_every_stage_adds_up_the_uses_of_a_weight_in_one_order(world: World, uses: str) -> None:
    tokens = torch.randint(40, (12, 6), generator=torch.Generator().manual_seed(2))
    own = tokens[world.rank :: world.size]
    weights = []
    for stage in range(4):
        with hpczero.initialize(Tied(uses), spec_of(stage), world, accumulates=False) as engine:
            for _ in range(3):
                engine.backward(engine(own), last=True)
                engine.step()
            weights.append(engine.full_state_dict())
    if world.rank == 0:
        for found in weights[1:]:
            assert all(torch.equal(found[name], expected) for name, expected in weights[0].items())


@SHARE_SAMPLES
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_gradient_after_the_sum_of_its_unit_is_an_error(world: World, stage: int) -> None:
    with hpczero.initialize(
        Reentrant(), spec_of(stage, "fp32"), world, accumulates=False
    ) as engine:
        loss = engine(torch.ones(2, 16))
        with pytest.raises(HpczeroError, match="use_reentrant=False"):
            engine.backward(loss, last=True)
