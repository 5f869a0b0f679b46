"""Local steps: each replica trains by itself, and an outer optimizer joins them now and then.

DiLoCo (Douillard et al. 2023), streamed (Douillard et al. 2025). The outer weights are the same on
all replicas. The units take turns in fragments; every H updates a fragment has its turn:

    d = outer weights - own weights
    d = the average of d over the replicas (`exchange`), in fp32, bf16, or 8 or 4 bits
    momentum = mu momentum + d
    outer weights = outer weights - lr (d + mu momentum)              (Nesterov)
    own weights = outer weights

Messages are sent when the next step's forward begins, and what they bring is taken over before that
step's update, so that they travel while it computes, and between two steps nothing is on its way.

In the first `begin` updates gradients are summed, and all weights are the same: there are no turns.
"""

from collections.abc import Mapping, Sequence

from torch import Tensor

from hpczero.parallel.replicas.exchange import Errors
from hpczero.parallel.replicas.turns import fragment_of_update, fragments_of
from hpczero.parallel.replicas.unit_exchange import Exchanger, UnitExchange
from hpczero.parallel.zero.data_axis import AbsentGradients, Replicas
from hpczero.parallel.zero.kernel_update import AdamWUpdate
from hpczero.parallel.zero.unit import Unit
from hpczero.parallel.zero.update import Step, swap_with_master
from hpczero.parallel.zero.weights import Weights

JOINED, APART = "joined", "apart"  # names of numbers in a checkpoint


class LocalSteps(AdamWUpdate):
    """AdamW on the replica's own gradient, and the outer step."""

    trains_apart = True
    has_average = True  # the outer weights

    def __init__(
        self, weights: Weights, absent: AbsentGradients, replicas: Replicas, tied: Sequence[Unit]
    ) -> None:
        """`tied`: units that other stages have too, and that have the first turn on each."""
        super().__init__(weights, absent)
        self._outer_options = self.settings.optimizer.outer
        self._exchanger = Exchanger(weights, replicas, self._outer_options.precision)
        self._exact = Exchanger(weights, replicas, "fp32")
        self.outer = {unit: unit.master.clone() for unit in self.units}
        self.momentum = {unit: unit.master.new_zeros(unit.master.shape) for unit in self.units}
        self.errors = self._exchanger.no_errors()
        untied = [unit for unit in self.units if unit not in tied]
        sizes = [unit.layout.size for unit in untied]
        self._fragments = [
            [untied[index] for index in fragment]
            for fragment in fragments_of(sizes, self._outer_options.fragments)
        ]
        self._fragments[0] += tied
        self._updates = 0  # that were carried out
        self._joined = 0  # the update after which a fragment had its last turn
        self._in_flight: dict[Unit, UnitExchange] = {}
        self._d = self.units[0].master.new_empty(max(unit.master.numel() for unit in self.units))

    @property
    def gradients_differ(self) -> bool:
        return self._updates >= self._outer_options.begin

    def memory(self) -> dict[str, int]:
        kept = [self._d, *self.outer.values(), *self.momentum.values()]
        errors = sum(each.nbytes for each in self.errors.values())
        return {"exchange": errors + sum(tensor.nbytes for tensor in kept)}

    def begin_average(self) -> None:
        """Begin with the present weights, the same on all replicas, as the outer ones."""
        for unit in self.units:
            self.outer[unit].copy_(unit.master)

    def swap_average(self, unit: Unit) -> None:
        swap_with_master(unit, self.outer[unit])

    def come_together(self, unit: Unit) -> None:
        mean = self._exact.start(unit, unit.master, Errors())
        mean.wait()
        mean.decode(unit.master)
        self.outer[unit].copy_(unit.master)
        unit.weights_from_master()

    # -- turns

    def begin_gradients(self) -> None:
        if self._joined == self._updates:
            return
        options = self._outer_options
        self._joined = self._updates
        turn = fragment_of_update(self._updates, options.every, options.fragments)
        if turn is None:
            return
        for unit in self._fragments[turn]:
            d = self._d[: unit.master.numel()]
            d.copy_(self.outer[unit]).sub_(unit.master)
            self._in_flight[unit] = self._exchanger.start(unit, d, self.errors[unit])

    @property
    def is_exchanging(self) -> bool:
        return bool(self._in_flight)

    def poll(self) -> None:
        for exchange in self._in_flight.values():
            if not exchange.poll():
                return

    def take_over(self) -> list[Unit]:
        """Complete what is in flight; return the units that have new weights."""
        changed = []
        mu, lr = self._outer_options.momentum, self._outer_options.lr
        for unit, exchange in self._in_flight.items():
            exchange.wait()
            d = self._d[: unit.master.numel()]
            exchange.decode(d)
            momentum, outer = self.momentum[unit], self.outer[unit]
            momentum.mul_(mu).add_(d)
            outer.sub_(d, alpha=lr).sub_(momentum, alpha=lr * mu)
            unit.master.copy_(outer)
            unit.weights_from_master()
            changed.append(unit)
        self._in_flight.clear()
        return changed

    def begin(self, step: Step) -> None:
        self.begin_gradients()
        self.take_over()
        super().begin(step)

    def carried_out(self, number: int) -> None:
        self._updates = number
        if number <= self._outer_options.begin:
            self.begin_average()
            self._joined = number

    # -- what a checkpoint has besides

    def common_weights(self, unit: Unit) -> Tensor:
        return self.outer[unit]

    def states(self, unit: Unit) -> dict[str, Tensor]:
        return {"outer_momentum": self.momentum[unit]}

    def own_states(self, unit: Unit) -> dict[str, Tensor]:
        moments = {"moment1": self.moment1[unit], "moment2": self.moment2[unit]}
        sent = self.errors[unit].sent
        return {"weights": unit.master} | moments | ({} if sent is None else {"outer_error": sent})

    def dealt_states(self, unit: Unit) -> dict[str, Tensor]:
        served = self.errors[unit].served
        return {} if served is None else {"served_outer_error": served}

    def dealt_part(self, unit: Unit, replica: int) -> slice:
        return self._exchanger.part(unit.master.numel(), replica)

    def numbers(self) -> dict[str, float]:
        return {JOINED: self._joined, APART: int(self.gradients_differ)}

    def take_numbers(self, numbers: Mapping[str, float], updates: int) -> None:
        super().take_numbers(numbers, updates)
        self._updates = updates
        self._joined = int(numbers.get(JOINED, updates))
