"""Modules that several families are made of, in plain PyTorch that knows no parallelism.

Legend: [samples, seq, hidden].
"""

from collections.abc import Iterable

import torch
from torch import nn

from hpczero.model import maps
from hpczero.model.batch import MicroBatch
from hpczero.spec.schema import Model
from hpczero_kernels.dropout import ActivationWindow
from hpczero_kernels.operations import OPERATIONS
from hpczero_kernels.random import key_of


class Layered(nn.Module):
    """A model of layers and lists of layers, in their order: first "embedding", last "head".

    The head has the embedding's vectors where it is tied.
    """

    def __init__(self, model: Model, **parts: nn.Module | Iterable[nn.Module]) -> None:
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part if isinstance(part, nn.Module) else nn.ModuleList(part))
        if model.tied_embeddings:
            logits = self.get_submodule("head.logits")
            logits.weight = self.get_submodule("embedding.lookup").tokens

    def layers(self) -> list[nn.Module]:
        found: list[nn.Module] = []
        for part in self.children():
            found += part if isinstance(part, nn.ModuleList) else [part]
        return found

    def forward(self, batch: MicroBatch) -> torch.Tensor:
        """Return the targets' summed cross-entropy in fp32; one per sample if `batch.by_sample`."""
        x = batch.tokens
        for layer in self.layers():
            x = layer(x, batch)
        return x


class Dropout(nn.Module):
    """Dropout that depends on (seed, step, sample, site, index), not on the order of execution."""

    def __init__(self, model: Model, site: str) -> None:
        super().__init__()
        self.probability = model.dropout
        self.site = site
        self.dropout = OPERATIONS[model.kernels].dropout

    def forward(
        self,
        x: torch.Tensor,
        batch: MicroBatch,
        residual: torch.Tensor | None = None,
        place: ActivationWindow | None = None,
    ) -> torch.Tensor:
        """Return x after dropout, added to the residual stream if there is one."""
        if not self.training or self.probability == 0:
            return x if residual is None else residual + x
        key = key_of(batch.seed, "dropout", self.site, batch.step)
        return self.dropout(x, self.probability, key, batch.samples, place, residual)


class Linear(nn.Module):
    def __init__(self, inputs: int, outputs: int, bias: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        self.bias = nn.Parameter(torch.empty(outputs)) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return maps.linear(x, self.weight, self.bias)


class StackedLinear(nn.Module):
    """Several linear maps of the same input, in one weight [maps, outputs, inputs].

    A range of outputs of all maps is then one rectangle of the weight, which tensor ranks can own.
    """

    def __init__(self, inputs: int, maps: int, outputs: int, bias: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(maps, outputs, inputs))
        self.bias = nn.Parameter(torch.empty(maps, outputs)) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., inputs] -> [..., maps, outputs]"""
        bias = None if self.bias is None else self.bias.flatten()
        stacked = maps.linear(x, self.weight.flatten(0, 1), bias)
        return stacked.unflatten(-1, self.weight.shape[:2])


class CrossEntropy(nn.Module):
    """Logits [samples, seq, vocab], targets [samples, seq] -> loss in fp32, summed over targets.

    `weights` [samples, seq]: of the targets in the sum. `by_sample` returns one sum per sample.
    """

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.vocab = model.vocab
        self.cross_entropy = OPERATIONS[model.kernels].cross_entropy

    def forward(
        self,
        logits: torch.Tensor,
        targets: torch.Tensor,
        weights: torch.Tensor | None = None,
        by_sample: bool = False,
    ) -> torch.Tensor:
        if by_sample:
            of_samples = [None] * len(targets) if weights is None else weights
            samples = zip(logits, targets, of_samples, strict=True)
            losses = [self.cross_entropy(*sample) for sample in samples]
            return torch.stack(losses) if losses else logits.new_zeros(0, dtype=torch.float32)
        of_rows = None if weights is None else weights.flatten()
        return self.cross_entropy(logits.flatten(0, 1), targets.flatten(), of_rows)
