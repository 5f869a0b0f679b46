"""The update: new master weights, and the weights that follow, once the gradient is summed.

`start` comes when the first weights are there. A step is `begin`, then `step` for every unit, which
may be carried out later: `complete` waits for it. What an update keeps of the owned elements
besides the master weights are flat fp32 tensors (`states`); the rest is data (`facts`).
`AdamWUpdate` is the kernel: the gradient's norm stays on the device, and where it is not finite the
step changes nothing. `torch_update.TorchUpdate` is an optimizer of PyTorch,
`offload.offloaded_adamw.OffloadedAdamW` the kernel on states that lie elsewhere.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hpczero.device import Device
from hpczero.errors import InputError
from hpczero.parallel.zero.bad_gradients import BadGradient
from hpczero.parallel.zero.buffers import Arena
from hpczero.parallel.zero.data_axis import AbsentGradients
from hpczero.parallel.zero.unit import Unit
from hpczero.parallel.zero.weights import Weights
from hpczero_kernels.adamw import AdamWBuffers, AdamWScalars, adamw, scalars_of_step
from hpczero_kernels.dispatch import CUDA, choose

_SWAPPED = 1 << 20  # elements that are exchanged at a time
FACTS_OF_ADAMW = {"optimizer": "adamw"}
FROZEN = "frozen"  # the update after which the second moment stayed as it was
_SCALARS = {"lr", "betas", "eps"}  # options that are scalars of the kernel


@dataclass(frozen=True)
class Step:
    """A step that is to be carried out.

    `number`: of updates, from 1. `lr`: the schedule's learning rate; `own_lr`: parameter -> the
    rate that it has in this step. `norm`: the gradient's true norm, one fp64 number on the device.
    `read_norms` waits for it, and for that of all replicas, which differs where gradients do. The
    gradients are `scale` times too large.
    `changed`: units whose gradients are not those of `take_gradient` any more.
    """

    number: int
    lr: float
    own_lr: Mapping[str, float]
    norm: Tensor
    read_norms: Callable[[], list[float]]
    scale: float
    changed: Sequence[Unit]


@dataclass(frozen=True)
class StepResult:
    grad_norm: float
    loss_scale: float
    bad: BadGradient | None = None


class Update(ABC):
    """An update of the owned elements of all units, and the average of the weights, if wanted."""

    def __init__(self, weights: Weights, absent: AbsentGradients) -> None:
        """`absent`: which parameters a step leaves out."""
        self.units = weights.units
        self.settings = weights.settings
        self.absent = absent
        self.average: dict[Unit, Tensor] = {}
        if self.settings.update.average is not None:
            arena = weights.arena
            self.average = {unit: take_zeros(arena, "average", unit) for unit in self.units}

    @abstractmethod
    def reads_on_host(self) -> bool:
        """Return True if `begin` and `step` read on the host what the device computes."""

    @abstractmethod
    def begin(self, step: Step) -> None:
        """Begin a step, when the gradient's norm has been asked for."""

    @abstractmethod
    def step(self, unit: Unit) -> None:
        """Step a unit's owned elements; the weights that this rank writes follow."""

    def take_gradient(self, unit: Unit, is_last: bool) -> None:  # noqa: B027
        """Begin to use a unit's sum of gradients, unless another one of this step comes."""

    @property
    def gradients_differ(self) -> bool:
        """True if each replica steps by its own gradient, so that these are not summed."""
        return False

    @property
    def trains_apart(self) -> bool:
        """True if replicas have weights of their own between exchanges."""
        return False

    @property
    def is_exchanging(self) -> bool:
        """True, on all ranks alike, while replicas exchange what `take_over` completes."""
        return False

    def come_together(self, unit: Unit) -> None:
        """Make the weights of replicas that train apart their mean; the rank's weights follow."""
        raise NotImplementedError

    def begin_gradients(self) -> None:  # noqa: B027
        """Begin what goes on during a step's forward and backward; called once or more."""

    def poll(self) -> None:  # noqa: B027
        """Move on what goes on meanwhile."""

    def take_over(self) -> list[Unit]:
        """Complete what `begin_gradients` has begun; return units that have new weights for it."""
        return []

    def carried_out(self, number: int) -> None:
        """Follow an update that has been carried out. Collective."""
        self.follow_average()

    def drop_gradients(self) -> None:  # noqa: B027
        """Forget what was taken in this step."""

    @property
    def is_behind(self) -> bool:
        """True while steps that have been asked for go on."""
        return False

    def complete(self, unit: Unit) -> None:  # noqa: B027
        """Return once the unit's step is carried out; StorageFailed: it never will be."""

    def refuse_after_failure(self) -> None:  # noqa: B027
        """Raise what a step has failed with, if one has: the states are half of it, for good."""

    def states(self, unit: Unit) -> dict[str, Tensor]:
        """Return what is kept of the unit's owned elements besides the master weights, by name."""
        return {"average": self.average[unit]} if self.average else {}

    @abstractmethod
    def facts(self) -> dict[str, Any]:
        """Return, as JSON, what else belongs to the state; equal on all ranks. Collective."""

    @abstractmethod
    def restore(self, facts: Mapping[str, Any]) -> None:
        """Take over `facts`, after the `states` have been filled."""

    def common_weights(self, unit: Unit) -> Tensor:
        """Return the owned weights in fp32 that stand for the model; equal on all replicas."""
        return unit.master

    def own_states(self, unit: Unit) -> dict[str, Tensor]:
        """Return the states of the owned elements that each replica has of its own, by name."""
        return {}

    def dealt_states(self, unit: Unit) -> dict[str, Tensor]:
        """Return the states of which each replica has those of its part (`sizes.part_of`)."""
        return {}

    def dealt_part(self, unit: Unit, replica: int) -> slice:
        """Return the elements, of those owned, of which a replica has dealt states."""
        raise NotImplementedError

    def numbers(self) -> dict[str, float]:
        """Return the numbers that belong to the state; equal on all ranks."""
        return {}

    def take_numbers(self, numbers: Mapping[str, float], updates: int) -> None:  # noqa: B027
        """Take over such numbers, those of a state after so many updates."""

    def memory(self) -> dict[str, int]:
        """Return the bytes of memory that it has besides the arena's, by kind."""
        return {}

    def close(self) -> None:  # noqa: B027
        """End its threads."""

    def refuse_other(self, name: str, facts: Mapping[str, Any]) -> None:
        """Raise InputError if the facts are another optimizer's."""
        if facts["optimizer"] != name:
            raise InputError(
                f"these are states of another optimizer: of {facts['optimizer']}, not of {name}"
            )

    def rate(self, step: Step, name: str) -> float:
        """Return the learning rate of a parameter in a step.

        The schedule scales the groups' own rates as it does the spec's.
        """
        if name in step.own_lr:
            return step.own_lr[name]
        of_group: float | None = self.settings.update.options.get(name, {}).get("lr")
        return step.lr if of_group is None else of_group * (step.lr / self.settings.optimizer.lr)

    def start(self) -> None:
        """Begin with the present weights, which are the first ones."""
        self.begin_average()

    # -- the average of the weights

    @property
    def has_average(self) -> bool:
        """True if other weights stand for the model (`swap_average`)."""
        return bool(self.average)

    def begin_average(self) -> None:
        """Let the average begin with the present weights."""
        for unit, average in self.average.items():
            average.copy_(unit.master)

    def follow_average(self) -> None:
        """Let the average follow an update that has been carried out."""
        for unit, average in self.average.items():
            self.follow(average, unit.master)

    def follow(self, average: Tensor, master: Tensor) -> None:
        """Let elements of the average follow their master weights, which have been stepped."""
        assert self.settings.update.average
        average.lerp_(master, 1.0 - self.settings.update.average)

    def swap_average(self, unit: Unit) -> None:
        """Exchange the average and the master weights; the weights that this rank writes follow."""
        swap_with_master(unit, self.average[unit])


@dataclass(frozen=True)
class StepSpan:
    """Consecutive owned elements of one parameter, stepped in one go."""

    elements: slice  # of the unit's owned ones
    state: AdamWBuffers
    decay: float
    name: str  # of the parameter


class AdamWUpdate(Update):
    """AdamW by hpczero's kernel.

    Parameters with the same learning rate, betas, eps and count of updates share their scalars. In
    hpczero's own models all do; only those of groups, or that have missed updates, have others.
    """

    def __init__(
        self, weights: Weights, absent: AbsentGradients, device: Device | None = None
    ) -> None:
        """Take the first moments of all units, then the second ones.

        So a checkpoint copies few long spans. `device`: that computes, if it is not the weights'.
        """
        super().__init__(weights, absent)
        self._device = device or weights.device
        self._pool = weights.pool
        arena = weights.arena
        self.moment1 = {unit: take_zeros(arena, "moments", unit) for unit in self.units}
        self.moment2 = {unit: take_zeros(arena, "moments", unit) for unit in self.units}
        options = self.settings.update.options.items()
        self._in_groups = [name for name, of_group in options if _SCALARS & of_group.keys()]
        # of the last step, with the parameters that it left out
        self._spans: dict[Unit, tuple[frozenset[int], list[StepSpan]]] = {}
        self._common: AdamWScalars  # of this step, as are the following
        self._scalars: dict[str, AdamWScalars]  # of parameters that have others

    def reads_on_host(self) -> bool:
        return choose("adamw", self.units[0].master) != CUDA

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

    def step_span(self, span: StepSpan) -> None:
        scalars = self._scalars.get(span.name, self._common)
        adamw(span.state, span.decay, scalars, self._pool)

    def spans_to_step(self, unit: Unit, absent: frozenset[int]) -> list[StepSpan]:
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
                self.moment1[unit][elements],
                self.moment2[unit][elements],
                unit.gradient_to_step[elements],
                weights,
            )
            decay = self.settings.optimizer.weight_decay if parameter.decays else 0.0
            of_group = self.settings.update.options.get(parameter.name, {})
            yield StepSpan(elements, state, of_group.get("weight_decay", decay), parameter.name)

    def states(self, unit: Unit) -> dict[str, Tensor]:
        moments = {"moment1": self.moment1[unit], "moment2": self.moment2[unit]}
        return moments | super().states(unit)

    def facts(self) -> dict[str, Any]:
        """Return the name alone: the engine has the counts of updates."""
        return dict(FACTS_OF_ADAMW)

    def restore(self, facts: Mapping[str, Any]) -> None:
        self.refuse_other("adamw", facts)

    def take_numbers(self, numbers: Mapping[str, float], updates: int) -> None:
        """Let a second moment that was frozen (1-bit Adam) count as one of all updates so far."""
        _, beta2 = self.settings.optimizer.betas
        frozen = int(numbers.get(FROZEN, 0))
        if 0 < frozen < updates:
            factor = (1.0 - beta2**updates) / (1.0 - beta2**frozen)
            for moment in self.moment2.values():
                moment.mul_(factor)


def swap_with_master(unit: Unit, others: Tensor) -> None:
    """Exchange a unit's master weights for others; the weights that this rank writes follow."""
    for start in range(0, others.numel(), _SWAPPED):
        part = slice(start, start + _SWAPPED)
        kept = unit.master[part].clone()
        unit.master[part] = others[part]
        others[part] = kept
    unit.weights_from_master()


def take_zeros(arena: Arena, kind: str, unit: Unit) -> Tensor:
    """Take an fp32 tensor of zeros for the unit's owned elements."""
    values = arena.take(kind, unit.master.numel(), torch.float32)
    return values if kind in arena.of_zeros else values.zero_()
