"""The update: new master weights, and the weights that follow, once the gradient is summed.

`start` comes when the first weights are there. A step is `begin`, then `step` for every unit, which
may be carried out later: `complete` waits for it. What an update keeps of the owned elements
besides the master weights are flat fp32 tensors (`states`); the rest is data (`facts`).
`kernel_update` and those named after an optimizer step by hpczero's kernels: the gradient's norm
stays on the device, and where it is not finite the step changes nothing. `torch_update` has an
optimizer of PyTorch, `offload.offloaded_adamw` the kernel on states that lie elsewhere.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hpczero.errors import InputError
from hpczero.parallel.zero.bad_gradients import BadGradient
from hpczero.parallel.zero.buffers import Arena
from hpczero.parallel.zero.data_axis import AbsentGradients
from hpczero.parallel.zero.unit import Unit
from hpczero.parallel.zero.weights import Weights
from hpczero.text import join_words

_SWAPPED = 1 << 20  # elements that are exchanged at a time


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

    def refuse_others(self, known: Collection[str], name: str) -> None:
        """Raise InputError unless an optimizer whose states these are is known."""
        if name not in known:
            raise InputError(
                f"these are states of another optimizer: of {name}, not of "
                f"{join_words(sorted(known), 'or')}"
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
