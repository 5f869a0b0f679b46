"""The cuts of a user's module into stages, without MPI."""

import torch
from torch import nn

from hpczero.parallel.pipeline.user_stages import stage_of
from hpczero.spec.schema import Parallel


class WideLookup(nn.Module):
    """A table with far more weights than all layers behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10_000, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def layers(self) -> list[nn.Module]:
        return [self.table, *self.blocks]

    def loss(self, output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return (output.sum(-1) - targets).square().sum()


def test_a_table_that_is_looked_up_is_no_work() -> None:
    """Or the first stage would have the table alone, and idle."""
    module = WideLookup()
    stages = [stage_of(module, Parallel(pipeline=2), stage) for stage in range(2)]
    assert [stage.chunks for stage in stages] == [
        [[module.table, *module.blocks[:2]]],
        [[*module.blocks[2:]]],
    ]
