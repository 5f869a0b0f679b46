"""The input of a model: one micro-batch, and what its random choices depend on."""

from dataclasses import dataclass, replace

import torch

from hpczero.device import Device


@dataclass(frozen=True)
class MicroBatch:
    """Tokens and targets [samples, seq], and each sample's position in the global batch [samples].

    `by_sample` asks hpczero's own models for one loss per sample [samples], as evaluations need.
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
