"""The update: new master weights, and the weights that follow, once the gradient is summed.

A step goes `begin`, then `step` for every unit, then `end`. What an update keeps of the owned
elements besides the master weights are flat fp32 tensors (`states`); the rest is data (`facts`).
`AdamWUpdate` is the kernel: the gradient's norm stays on the device, which leaves the step out if
that is not finite. `torch_update.TorchUpdate` is an optimizer of PyTorch.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hpczero.parallel.zero.data_axis import AbsentGradients
from hpczero.parallel.zero.unit import Unit
from hpczero.parallel.zero.weights import Weights
from hpczero_kernels.adamw import AdamWBuffers, AdamWScalars, adamw, scalars_of_step
from hpczero_kernels.dispatch import CUDA, choose


@dataclass(frozen=True)
class Step:
    """A step that is to be carried out.

    `number`: of updates, from 1. `lr`: the schedule's learning rate. `norm`: the gradient's true
    norm, one fp64 number on the device; `read_norm` waits for it. The gradients are `scale` times
    too large.
    """

    number: int
    lr: float
    norm: Tensor
    read_norm: Callable[[], list[float]]
    scale: float


class Update:
    """An update of the owned elements of all units."""

    def __init__(self, weights: Weights, absent: AbsentGradients) -> None:
        """`absent`: which parameters a step leaves out."""
        self.units = weights.units
        self.settings = weights.settings
        self.absent = absent

    def reads_on_host(self) -> bool:
        """Return True if `begin` and `step` read on the host what the device computes."""
        raise NotImplementedError

    def begin(self, step: Step) -> None:
        raise NotImplementedError

    def step(self, unit: Unit) -> None:
        """Step a unit's owned elements; the weights that this rank writes follow."""
        raise NotImplementedError

    def states(self, unit: Unit) -> dict[str, Tensor]:
        """Return what is kept of the unit's owned elements besides the master weights, by name."""
        raise NotImplementedError

    def facts(self) -> dict[str, Any]:
        """Return, as JSON, what else belongs to the state; equal on all ranks. Collective."""
        raise NotImplementedError

    def restore(self, facts: Mapping[str, Any]) -> None:
        """Take over `facts`, after the `states` have been filled."""
        raise NotImplementedError


@dataclass(frozen=True)
class StepSpan:
    """Consecutive owned elements of one parameter, stepped in one go."""

    state: AdamWBuffers
    decay: float
    name: str  # of the parameter


class AdamWUpdate(Update):
    """AdamW by hpczero's kernel."""

    def __init__(self, weights: Weights, absent: AbsentGradients) -> None:
        """Take the first moments of all units, then the second ones.

        So a checkpoint copies few long spans.
        """
        super().__init__(weights, absent)
        self._device = weights.device
        self._pool = weights.pool
        for unit in self.units:
            unit.moment1 = _zeros(weights, unit)
        for unit in self.units:
            unit.moment2 = _zeros(weights, unit)
        # of the last step, with the parameters that it left out
        self._spans: dict[Unit, tuple[frozenset[int], list[StepSpan]]] = {}
        self._scalars: dict[int, AdamWScalars] = {}  # by updates that have left a parameter out

    def reads_on_host(self) -> bool:
        return choose("adamw", self.units[0].master) != CUDA

    def begin(self, step: Step) -> None:
        optimizer = self.settings.optimizer
        self._scalars = {}
        for missed in self.absent.counts():
            number = step.number - missed
            scalars = scalars_of_step(number, step.lr, optimizer.betas, optimizer.eps)
            on_device = AdamWScalars(self._device.put(scalars.values))
            on_device.follow(step.norm, self.settings.train.grad_clip, step.scale)
            self._scalars[missed] = on_device

    def step(self, unit: Unit) -> None:
        missed = self.absent.missed
        for span in self._spans_to_step(unit, self.absent.of(unit)):
            adamw(span.state, span.decay, self._scalars[missed.get(span.name, 0)], self._pool)

    def _spans_to_step(self, unit: Unit, absent: frozenset[int]) -> list[StepSpan]:
        """Return the owned elements, without those of the `absent` parameters."""
        left_out, spans = self._spans.get(unit, (None, []))
        if left_out != absent:
            spans = list(self._spans_of(unit, absent))
            self._spans[unit] = absent, spans
        return spans

    def _spans_of(self, unit: Unit, absent: frozenset[int]) -> Iterator[StepSpan]:
        names = {unit.layout.slots[index].parameter.name for index in absent}
        for slot, part, weights in unit.owned_parts():
            parameter = slot.parameter
            if parameter.name in names:
                continue
            elements = slice(part.start - unit.owned.start, part.stop - unit.owned.start)
            state = AdamWBuffers(
                unit.master[elements],
                unit.moment1[elements],
                unit.moment2[elements],
                unit.gradient_to_step[elements],
                weights,
            )
            decay = self.settings.optimizer.weight_decay if parameter.decays else 0.0
            yield StepSpan(state, decay, parameter.name)

    def states(self, unit: Unit) -> dict[str, Tensor]:
        return {"moment1": unit.moment1, "moment2": unit.moment2}

    def facts(self) -> dict[str, Any]:
        """Return the name alone: the engine has the counts of updates."""
        return {"optimizer": "adamw"}

    def restore(self, facts: Mapping[str, Any]) -> None:
        pass


def _zeros(weights: Weights, unit: Unit) -> Tensor:
    return weights.arena.take("moments", unit.master.numel(), torch.float32).zero_()
