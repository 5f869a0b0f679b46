"""Updates by hpczero's kernels, span by span: AdamW, and what others have in common with it."""

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from torch import Tensor

from hpczero.device import Device
from hpczero.parallel.zero.data_axis import AbsentGradients
from hpczero.parallel.zero.unit import Unit
from hpczero.parallel.zero.update import Step, Update, take_zeros
from hpczero.parallel.zero.weights import Weights
from hpczero_kernels.adamw import AdamWBuffers, AdamWScalars, adamw, scalars_of_step
from hpczero_kernels.dispatch import CUDA, choose

FACTS_OF_ADAMW = {"optimizer": "adamw"}
FROZEN = "frozen"  # the update after which the second moment stayed as it was
_SCALARS = {"lr", "betas", "eps"}  # options that are scalars of the kernel

Buffers = TypeVar("Buffers")


@dataclass(frozen=True)
class StepSpan(Generic[Buffers]):
    """Consecutive owned elements of one parameter, stepped in one go."""

    elements: slice  # of the unit's owned ones
    state: Buffers
    decay: float
    name: str  # of the parameter


class KernelUpdate(Update, Generic[Buffers]):
    """The update `name`, by a kernel.

    `continues`: the updates of which it goes on with the states.
    Parameters with the same learning rate, betas, eps and count of updates share their scalars. In
    hpczero's own models all do; only those of groups, or that have missed updates, have others.
    """

    name: str
    continues: frozenset[str]

    def __init__(
        self, weights: Weights, absent: AbsentGradients, device: Device | None = None
    ) -> None:
        """`device`: that computes, if it is not the weights'."""
        super().__init__(weights, absent)
        self._device = device or weights.device
        self._pool = weights.pool
        options = self.settings.update.options.items()
        self._in_groups = [name for name, of_group in options if _SCALARS & of_group.keys()]
        # of the last step, with the parameters that it left out
        self._spans: dict[Unit, tuple[frozenset[int], list[StepSpan[Buffers]]]] = {}
        self._common: AdamWScalars  # of this step, as are the following
        self._scalars: dict[str, AdamWScalars]  # of parameters that have others

    @abstractmethod
    def buffers(self, unit: Unit, elements: slice, weights: Tensor | None) -> Buffers:
        """Return what the kernel gets of some of a unit's owned elements."""

    @abstractmethod
    def step_span(self, span: StepSpan[Buffers]) -> None:
        """Step the elements of a span."""

    def moments(self, weights: Weights) -> dict[Unit, Tensor]:
        """Take a moment of all units, one after the other: a checkpoint copies few long spans."""
        return {unit: take_zeros(weights.arena, "moments", unit) for unit in self.units}

    def reads_on_host(self) -> bool:
        return choose(self.name, self.units[0].master) != CUDA

    def begin(self, step: Step) -> None:
        optimizer = self.settings.optimizer
        options = self.settings.update.options
        missed = self.absent.missed
        common = step.number, step.lr, optimizer.betas, optimizer.eps
        made = {common: self._made(step, *common)}
        self._common = made[common]
        self._scalars = {}
        for name in {*self._in_groups, *step.own_lr, *self.absent.behind()}:
            of_group = options.get(name, {})
            own = (
                step.number - missed.get(name, 0),
                self.rate(step, name),
                tuple(of_group.get("betas", optimizer.betas)),
                of_group.get("eps", optimizer.eps),
            )
            if own not in made:
                made[own] = self._made(step, *own)
            self._scalars[name] = made[own]

    def _made(
        self, step: Step, number: int, lr: float, betas: tuple[float, float], eps: float
    ) -> AdamWScalars:
        scalars = scalars_of_step(number, lr, betas, eps)
        on_device = AdamWScalars(self._device.put(scalars.values))
        on_device.follow(step.norm, self.settings.train.grad_clip, step.scale)
        return on_device

    def step(self, unit: Unit) -> None:
        for span in self.spans_to_step(unit, self.absent.of(unit)):
            self.step_span(span)

    def scalars_of(self, name: str) -> AdamWScalars:
        """Return the scalars of a parameter in this step."""
        return self._scalars.get(name, self._common)

    def spans_to_step(self, unit: Unit, absent: frozenset[int]) -> list[StepSpan[Buffers]]:
        """Return the owned elements, without those of the `absent` parameters."""
        left_out, spans = self._spans.get(unit, (None, []))
        if left_out != absent:
            spans = list(self._spans_of(unit, absent))
            self._spans[unit] = absent, spans
        return spans

    def _spans_of(self, unit: Unit, absent: frozenset[int]) -> Iterator[StepSpan[Buffers]]:
        names = {unit.layout.slots[index].parameter.name for index in absent}
        for slot, part, weights in unit.owned_parts():
            parameter = slot.parameter
            if parameter.name in names:
                continue
            elements = slice(part.start - unit.owned.start, part.stop - unit.owned.start)
            decay = self.settings.optimizer.weight_decay if parameter.decays else 0.0
            of_group = self.settings.update.options.get(parameter.name, {})
            yield StepSpan(
                elements,
                self.buffers(unit, elements, weights),
                of_group.get("weight_decay", decay),
                parameter.name,
            )

    def facts(self) -> dict[str, Any]:
        """Return the name alone: the engine has the counts of updates."""
        return {"optimizer": self.name}

    def restore(self, facts: Mapping[str, Any]) -> None:
        self.refuse_others(self.continues, facts["optimizer"])


AdamWSpan = StepSpan[AdamWBuffers]


class AdamWUpdate(KernelUpdate[AdamWBuffers]):
    name = "adamw"
    continues = frozenset({"adamw", "lamb", "one_bit_adam"})

    def __init__(
        self, weights: Weights, absent: AbsentGradients, device: Device | None = None
    ) -> None:
        super().__init__(weights, absent, device)
        self.moment1 = self.moments(weights)
        self.moment2 = self.moments(weights)

    def buffers(self, unit: Unit, elements: slice, weights: Tensor | None) -> AdamWBuffers:
        return AdamWBuffers(
            unit.master[elements],
            self.moment1[unit][elements],
            self.moment2[unit][elements],
            unit.gradient_to_step[elements],
            weights,
        )

    def step_span(self, span: AdamWSpan) -> None:
        adamw(span.state, span.decay, self.scalars_of(span.name), self._pool)

    def states(self, unit: Unit) -> dict[str, Tensor]:
        moments = {"moment1": self.moment1[unit], "moment2": self.moment2[unit]}
        return moments | super().states(unit)

    def take_numbers(self, numbers: Mapping[str, float], updates: int) -> None:
        """Let a second moment that was frozen (1-bit Adam) count as one of all updates so far."""
        _, beta2 = self.settings.optimizer.betas
        frozen = int(numbers.get(FROZEN, 0))
        if 0 < frozen < updates:
            factor = (1.0 - beta2**updates) / (1.0 - beta2**frozen)
            for moment in self.moment2.values():
                moment.mul_(factor)
