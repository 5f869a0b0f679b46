"""Plain PyTorch with the methods of an engine that examples call: what they are compared with."""

from collections.abc import Mapping
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from hpczero.optim.learning_rate import learning_rate
from hpczero.spec.load import from_dict


class Plain:
    """A module trained by torch.optim.AdamW on one rank, as an engine does it."""

    rank, size = 0, 1
    dtype, device = torch.float32, torch.device("cpu")

    def __init__(self, module: nn.Module, spec: Mapping[str, Any]) -> None:
        self.module = module
        self.spec = from_dict(spec).spec
        self.steps = 0
        self.engine = SimpleNamespace(running=nullcontext)
        self._trained = [own for own in module.parameters() if own.is_floating_point()]
        settings = self.spec.optimizer
        matrices = [own for own in self._trained if own.dim() > 1]
        others = [own for own in self._trained if own.dim() < 2]
        groups = [
            {"params": matrices, "weight_decay": settings.weight_decay},
            {"params": others, "weight_decay": 0.0},
        ]
        self._optimizer = torch.optim.AdamW(groups, 1.0, settings.betas, settings.eps)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self.module(*arguments, **named)

    def backward(self, loss: torch.Tensor, last: bool = False) -> None:
        """Add the gradients of this module alone."""
        asked = [own for own in self._trained if own.requires_grad]
        gradients = torch.autograd.grad(loss, asked, allow_unused=True)
        for own, gradient in zip(asked, gradients, strict=True):
            if gradient is not None:
                gradient = gradient.to_dense() if gradient.is_sparse else gradient
                own.grad = gradient if own.grad is None else own.grad + gradient

    def step(self) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate(self.spec, self.steps)
        nn.utils.clip_grad_norm_(self._trained, self.spec.train.grad_clip)
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.steps += 1
