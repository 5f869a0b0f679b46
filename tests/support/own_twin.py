"""Workers of a loop of one's own, simulated in one process."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from hpczero.model.shapes import Layer
from hpczero.parallel.zero.engine import Engine
from hpczero.spec.schema import Spec
from tests.support.own_loops import SAMPLES, batch
from tests.support.workers_twin import Twin, Values

LossOf = Callable[[Any, int, int, int], Tensor]  # of module, step, data rank, data ranks


def loss_of(module: Any, step: int, rank: int, size: int) -> Tensor:
    """Return a rank's part of a step's mean loss, as in `own_loops`."""
    x, y = batch(step)
    own = slice(rank, None, size)
    return functional.mse_loss(module(x[own]).float(), y[own], reduction="sum") / SAMPLES


def layers_in(engine: Engine) -> list[Layer]:
    """Return the layers as an engine has them: what is sent is cut as they are."""
    layouts = [unit.layout for unit in engine.units]
    return [Layer(one.name, tuple(slot.parameter for slot in one.slots)) for one in layouts]


class OwnTwin(Twin):
    """Workers that train a module by plain PyTorch."""

    def __init__(
        self,
        spec: Spec,
        ranks: tuple[int, int, int],
        module: nn.Module,
        layers: Sequence[Layer],
        loss_of: LossOf = loss_of,
    ) -> None:
        """`ranks`: workers, data ranks of each, tensor ranks."""
        self.spec = spec
        self.workers, self.shards, self.tensor = ranks
        self.layers = list(layers)
        self.decays = {p.name: p.decays for layer in layers for p in layer.parameters}
        apart = spec.optimizer.outer.every > 0
        self.models = [copy.deepcopy(module) for _ in range(self.workers if apart else 1)]
        self.losses = []
        self.outer = {}
        self._exchanges = {}
        self._loss_of = loss_of

    def _gradients(self, step: int) -> list[Values]:
        found = []
        total = 0.0
        data_ranks = self.workers * self.shards
        for worker in range(self.workers):
            model = self.models[min(worker, len(self.models) - 1)]
            model.zero_grad()
            for rank in range(worker * self.shards, (worker + 1) * self.shards):
                loss = self._loss_of(model, step, rank, data_ranks)
                total += float(loss.detach())
                (loss * self.workers).backward()
            found.append({n: p.grad.clone() for n, p in model.named_parameters()})
        self.losses.append(total)
        return found
