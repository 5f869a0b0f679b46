"""Workers of a loop of one's own, simulated in one process."""

import copy
from typing import Any

from torch import Tensor
from torch.nn import functional

from hpczero.parallel.user_module import layers_of
from hpczero.spec.schema import Spec
from tests.support.own_loops import SAMPLES, Small, batch
from tests.support.user_modules import made
from tests.support.workers_twin import Twin, Values


def loss_of(module: Any, step: int, rank: int, size: int) -> Tensor:
    """Return a rank's part of a step's mean loss."""
    x, y = batch(step)
    own = slice(rank, None, size)
    return functional.mse_loss(module(x[own]).float(), y[own], reduction="sum") / SAMPLES


class OwnTwin(Twin):
    """Workers that train `Small` on the batches of `own_loops`, by plain PyTorch."""

    def __init__(self, spec: Spec, workers: int, shards: int, seed: int) -> None:
        self.spec = spec
        self.workers = workers
        self.shards = shards
        self.tensor = 1
        module = made(Small, seed)
        self.layers = [layer for _, layer in layers_of(module) if layer.parameters]
        self.decays = {p.name: p.decays for layer in self.layers for p in layer.parameters}
        apart = spec.optimizer.outer.every > 0
        self.models = [copy.deepcopy(module) for _ in range(workers if apart else 1)]
        self.losses = []
        self.outer = {}
        self._exchanges = {}

    def _gradients(self, step: int) -> list[Values]:
        found = []
        total = 0.0
        data_ranks = self.workers * self.shards
        for worker in range(self.workers):
            model = self.models[min(worker, len(self.models) - 1)]
            model.zero_grad()
            for rank in range(worker * self.shards, (worker + 1) * self.shards):
                loss = loss_of(model, step, rank, data_ranks)
                total += float(loss.detach())
                (loss * self.workers).backward()
            found.append({n: p.grad.clone() for n, p in model.named_parameters()})
        self.losses.append(total)
        return found
