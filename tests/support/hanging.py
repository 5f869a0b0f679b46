"""A user's own model, whose rank 1 sleeps in its forward once a file `hang` lies where it runs.

`family = "tests.support.hanging:build"`: so this rank skips the collectives that follow.
"""

import os
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

HANG = Path("hang")
RANK = 1


class Bigrams(nn.Module):
    def __init__(self, vocab: int, hidden: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, hidden)
        self.head = nn.Linear(hidden, vocab)

    def forward(self, batch: Any) -> torch.Tensor:
        if int(os.environ["PMI_RANK"]) == RANK and HANG.exists():
            time.sleep(1000)
        logits = self.head(self.embedding(batch.tokens)).float()
        return functional.cross_entropy(
            logits.flatten(0, 1), batch.targets.flatten(), reduction="sum"
        )


def build(model: Any) -> nn.Module:
    return Bigrams(model.vocab, model.hidden)
