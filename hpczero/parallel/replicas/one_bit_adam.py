"""1-bit Adam between replicas (Tang et al. 2021): after a warm-up, signs of the momentum are sent.

Warm-up: AdamW on the gradient of all replicas. Then the second moment v is frozen. A step of each
replica, with its own gradient g, clipped by its own norm:

    m = beta1 m + (1 - beta1) g
    u = m / (sqrt(v / correction2) + eps)                    (0 where v is 0)
    u = the average over the replicas of u, as signs with a scale for each block (`exchange`)
    m = u (sqrt(v / correction2) + eps)
    w = w (1 - lr decay) - lr u / correction1

A parameter without a gradient on every rank stays as it is, with its momentum and its errors; its
corrections count its own updates.

The paper sends m. Here u is sent, the same but for a constant factor of each element, so that the
elements of a block, which share a scale, are steps of like sizes: otherwise those with a small v
would take steps of the size of the others' momentum.
"""

from collections.abc import Mapping
from math import isfinite

import torch
from torch import Tensor

from hpczero.parallel.replicas.unit_exchange import Exchanger, UnitExchange
from hpczero.parallel.zero.data_axis import AbsentGradients, Replicas
from hpczero.parallel.zero.kernel_update import FROZEN, AdamWUpdate
from hpczero.parallel.zero.unit import Unit
from hpczero.parallel.zero.update import Step
from hpczero.parallel.zero.weights import Weights
from hpczero_kernels.frozen_adamw import own_steps, take_steps

_STABLE = 0.96  # of the norm of the second moment, now and 1 / (1 - beta2) updates ago
_LOOKED, _NORM = "variance_seen", "variance_norm"


class OneBitAdam(AdamWUpdate):
    """`frozen`: the update after which the second moment was frozen; 0: it is not yet."""

    def __init__(self, weights: Weights, absent: AbsentGradients, replicas: Replicas) -> None:
        super().__init__(weights, absent)
        self._exchanger = Exchanger(weights, replicas, "1bit")
        self.errors = self._exchanger.no_errors()
        self._groups = weights.groups  # that have the other elements of this replica's model
        self.frozen = 0
        self._seen = 0, 0.0  # the update after which v was looked at last, and its norm then
        self._step: Step | None = None
        self._in_flight: dict[Unit, UnitExchange] = {}
        self._unchanged: dict[Unit, list[tuple[Tensor, Tensor]]] = {}  # states, and their values
        largest = max(unit.master.numel() for unit in self.units)
        self._u = self.units[0].master.new_empty(largest)

    @property
    def gradients_differ(self) -> bool:
        return self.frozen > 0

    def memory(self) -> dict[str, int]:
        errors = sum(each.nbytes for each in self.errors.values())
        return {"exchange": errors + self._u.nbytes}

    def reads_on_host(self) -> bool:
        return self.gradients_differ or super().reads_on_host()

    def begin(self, step: Step) -> None:
        if not self.gradients_differ:
            super().begin(step)
            return
        norm, _ = step.read_norms()
        self._step = step if isfinite(norm) else None
        if self._step is None:
            return
        clip = self.settings.train.grad_clip
        factor = (min(1.0, clip / (norm + 1e-6)) if clip else 1.0) / step.scale
        for unit in self.units:
            variance = self._living(unit)
            u = self._own_step(unit, factor)
            self._in_flight[unit] = self._exchanger.start(unit, u, self.errors[unit], variance)

    def _living(self, unit: Unit) -> Tensor:
        """Return the variance, 0 where the step leaves parameters out; keep what they have."""
        variance = self.moment2[unit]
        absent = self._absent_elements(unit)
        if not absent:
            return variance
        variance = variance.clone()
        errors = self.errors[unit]
        dealt = self.dealt_part(unit, self._exchanger.replicas.number)
        assert errors.sent is not None
        assert errors.served is not None
        kept = []
        for part in absent:
            variance[part] = 0
            served = [
                min(max(end - dealt.start, 0), errors.served.numel())
                for end in (part.start, part.stop)
            ]
            kept += [self.moment1[unit][part], errors.sent[part], errors.served[slice(*served)]]
        self._unchanged[unit] = [(state, state.clone()) for state in kept]
        return variance

    def _absent_elements(self, unit: Unit) -> list[slice]:
        """Return the owned elements of parameters that this step leaves out."""
        names = {unit.layout.slots[index].parameter.name for index in self.absent.of(unit)}
        first = unit.owned.start
        return [
            slice(part.start - first, part.stop - first)
            for slot, part in unit.layout.spans(first, unit.owned.stop)
            if slot.parameter.name in names
        ]

    def _own_step(self, unit: Unit, factor: float) -> Tensor:
        """Update the momentum by this replica's gradient; return u."""
        beta1 = self.settings.optimizer.betas[0]
        moment = self.moment1[unit]
        u = self._u[: moment.numel()]
        own_steps(
            moment,
            unit.gradient_to_step,
            self.moment2[unit],
            u,
            beta1,
            (1.0 - beta1) * factor,
            *self._of_roots(),
            self._pool,
        )
        return u

    def _of_roots(self) -> tuple[float, float]:
        """Return what the variance is multiplied by, and eps."""
        optimizer = self.settings.optimizer
        return 1.0 / (1.0 - optimizer.betas[1] ** self.frozen), optimizer.eps

    def step(self, unit: Unit) -> None:
        if not self.gradients_differ:
            super().step(unit)
            return
        if self._step is None:
            return
        exchange = self._in_flight.pop(unit)
        exchange.wait()
        u = self._u[: unit.master.numel()]
        exchange.decode(u)
        beta1, _ = self.settings.optimizer.betas
        for span in self.spans_to_step(unit, self.absent.of(unit)):
            part, lr = span.elements, self.rate(self._step, span.name)
            number = self._step.number - self.absent.missed.get(span.name, 0)
            take_steps(
                u[part],
                self.moment2[unit][part],
                self.moment1[unit][part],
                unit.master[part],
                1.0 - lr * span.decay,
                lr / (1.0 - beta1**number),
                *self._of_roots(),
                self._pool,
            )
        for state, values in self._unchanged.pop(unit, ()):
            state.copy_(values)
        unit.weights_from_master()
        for other in self._in_flight.values():
            if not other.poll():  # second passes begin in one order on all ranks
                return

    def carried_out(self, number: int) -> None:
        """Freeze the second moment if it is time, after an update. Collective."""
        if self.frozen:
            return
        if self._is_time(number):
            self.frozen = number
            self._scale_late_variances()

    def _is_time(self, number: int) -> bool:
        """Return True if the second moment is to be frozen after this update. Collective."""
        if wanted := self.settings.optimizer.freeze:
            return number >= wanted
        _, beta2 = self.settings.optimizer.betas
        before, norm_before = self._seen
        if number - before < round(1.0 / (1.0 - beta2)):
            return False
        norm = self._norm_of_variance()
        alike = min(norm, norm_before) >= _STABLE * max(norm, norm_before)
        self._seen = number, norm
        return bool(before and alike and norm and number >= self.settings.warmup_steps)

    def _scale_late_variances(self) -> None:
        """Scale second moments of fewer updates, so that the correction of all is right for them.

        Those of parameters that had a gradient in some updates only.
        """
        _, beta2 = self.settings.optimizer.betas
        for unit in self.units:
            for span in self.spans_to_step(unit, frozenset()):
                updates = self.frozen - self.absent.missed.get(span.name, 0)
                if 0 < updates < self.frozen:
                    factor = (1.0 - beta2**self.frozen) / (1.0 - beta2**updates)
                    self.moment2[unit][span.elements].mul_(factor)

    def _norm_of_variance(self) -> float:
        """Return the sum of the second moments; of what several ranks hold, more than once."""
        sums = [self.moment2[unit].sum(dtype=torch.float64) for unit in self.units]
        total = torch.stack(sums).sum()
        for group in self._groups:
            total = group.stack(total).sum()
        return float(total)

    # -- what a checkpoint has besides

    def own_states(self, unit: Unit) -> dict[str, Tensor]:
        sent = self.errors[unit].sent
        assert sent is not None
        return {"error": sent}

    def dealt_states(self, unit: Unit) -> dict[str, Tensor]:
        served = self.errors[unit].served
        assert served is not None
        return {"served_error": served}

    def dealt_part(self, unit: Unit, replica: int) -> slice:
        return self._exchanger.part(unit.master.numel(), replica)

    def numbers(self) -> dict[str, float]:
        before, norm = self._seen
        return {FROZEN: self.frozen, _LOOKED: before, _NORM: norm}

    def take_numbers(self, numbers: Mapping[str, float], updates: int) -> None:
        self.frozen = int(numbers.get(FROZEN, 0))
        self._seen = int(numbers.get(_LOOKED, 0)), float(numbers.get(_NORM, 0.0))
