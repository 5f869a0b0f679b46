"""The input of a model: one micro-batch, and what its random choices depend on."""

from dataclasses import dataclass, replace
from typing import Any

import torch

from hpczero.device import Device
from hpczero.model.key_value_cache import KeyValueCache


@dataclass(frozen=True)
class MicroBatch:
    """Tokens and targets [samples, seq], and each sample's position in the global batch [samples].

    `by_sample` asks hpczero's own models for one loss per sample [samples], as evaluations need.

    `positions` [samples, seq] are those of the tokens in their documents, `weights` [samples, seq]
    those of the targets in the loss, in fp32. `documents` holds, for each sample, the ends of its
    documents in order, the last of them seq: attention stays inside of each. None of the three
    is there where a sample is one document: positions 0, 1, ... and weights 1.

    With a `cache` the tokens follow those that are in it.

    Where tokens are masked, the targets [samples, targets] are those at the `target_positions` of
    the same shape; one that is not used has weight 0. `segments` [samples, seq] are 1 at the tokens
    of a second sentence; `labels` [samples]: 1 where the two do not follow one another.

    T5: the tokens are the encoder's, then those that the decoder reads; the targets [samples,
    decoder's positions] are what it predicts, without `target_positions`.
    """

    tokens: torch.Tensor
    targets: torch.Tensor
    samples: torch.Tensor
    step: int
    seed: int
    by_sample: bool = False
    positions: torch.Tensor | None = None
    weights: torch.Tensor | None = None
    documents: tuple[tuple[int, ...], ...] | None = None
    cache: KeyValueCache | None = None
    target_positions: torch.Tensor | None = None
    segments: torch.Tensor | None = None
    labels: torch.Tensor | None = None

    def on(self, device: Device) -> "MicroBatch":
        tensors: dict[str, Any] = {
            name: device.put(value)
            for name, value in vars(self).items()
            if isinstance(value, torch.Tensor)
        }
        return replace(self, **tensors)

    @property
    def reach(self) -> int:
        """A number that all positions of tokens are below."""
        return self.cache.capacity if self.cache else self.tokens.shape[1]

    @property
    def token_count(self) -> int:
        return self.tokens.numel()

    @property
    def loss_weight(self) -> float:
        """The sum of the targets' weights."""
        return sum(self.weight_of_samples())

    def weight_of_samples(self) -> list[float]:
        """Return the sum of the targets' weights in each sample."""
        if self.weights is None:
            return [float(self.targets.shape[1])] * len(self.samples)
        weights: list[float] = self.weights.double().sum(1).tolist()
        return weights
