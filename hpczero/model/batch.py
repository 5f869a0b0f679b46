"""What a model is given: one micro-batch, and what its random choices depend on."""

from dataclasses import dataclass, replace

import torch

from hpczero.device import Device


@dataclass(frozen=True)
class MicroBatch:
    """Legend: [samples, seq] for tokens and targets, [samples] for the positions of the samples in the global batch.

    `by_sample` asks hpczero's own models for a loss of each sample [samples] in place of one of all: what an evaluation wants.
    """

    tokens: torch.Tensor
    targets: torch.Tensor
    samples: torch.Tensor
    step: int
    seed: int
    by_sample: bool = False

    def on(self, device: Device) -> "MicroBatch":
        return replace(
            self,
            tokens=device.put(self.tokens),
            targets=device.put(self.targets),
            samples=device.put(self.samples),
        )

    @property
    def token_count(self) -> int:
        return self.targets.numel()
