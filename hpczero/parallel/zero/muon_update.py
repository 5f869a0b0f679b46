"""Muon (Jordan et al. 2024): the step of a matrix is its momentum with all singular values near 1.

    m = mu m + (1 - mu) g;   n = mu m + (1 - mu) g                     (Nesterov)
    w = w (1 - lr decay) - lr 0.2 sqrt(longer side) orthogonalised(n)

The factor makes steps about as long as AdamW's (Liu et al. 2025), so that a rate is good for both:
AdamW steps what is no matrix, embeddings and the head. A matrix is orthogonalised whole, by one of
the data and tensor ranks, which divide the matrices among them (`whole_matrices`).
"""

from math import isfinite, sqrt

import torch
from torch import Tensor

from hpczero.optim.matrices import STEPS, is_matrix, stack_dim, stack_shape
from hpczero.parallel.layout import ParameterSlot
from hpczero.parallel.zero.data_axis import AbsentGradients
from hpczero.parallel.zero.kernel_update import AdamWSpan, AdamWUpdate
from hpczero.parallel.zero.unit import Unit
from hpczero.parallel.zero.update import Step
from hpczero.parallel.zero.weights import Weights
from hpczero.parallel.zero.whole_matrices import PieceOf, WholeMatrices
from hpczero.spec.optimizer import Optimizer

_COEFFICIENTS = 3.4445, -4.7750, 2.0315  # of x, x^3 and x^5: singular values end in 0.7 to 1.2
_LENGTH = 0.2  # of AdamW's steps: the root of their mean square
_LEAST = 1e-7  # norm


def orthogonalised(stack: Tensor) -> Tensor:
    """Return matrices [..., rows, columns] with singular values near 1, by Newton and Schulz."""
    is_tall = stack.shape[-2] > stack.shape[-1]
    x = stack.mT if is_tall else stack
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + _LEAST)
    first, third, fifth = _COEFFICIENTS
    for _ in range(STEPS):
        square = x @ x.mT
        x = first * x + (third * square + fifth * (square @ square)) @ x
    return x.mT if is_tall else x


class MuonUpdate(AdamWUpdate):
    name = "muon"
    # not the other way: the second moment of matrices stays 0
    continues = frozenset({"muon", "adamw", "lamb"})

    def __init__(self, weights: Weights, absent: AbsentGradients) -> None:
        super().__init__(weights, absent)
        is_half = self.settings.train.precision != "fp32"
        travels = torch.bfloat16 if is_half else torch.float32
        self._whole = WholeMatrices(weights, travels)
        # a GPU's products are many times as fast in half precision, a CPU's are not
        self._computed = travels if self._device.has_queues else torch.float32
        self._matrices = self._whole.parameters
        self._now: Step | None = None  # None: it is left out
        self._orthogonal: dict[str, Tensor] = {}  # of matrices that this rank owns

    def left_by(self, others: Optimizer) -> list[str]:
        """Return the matrices of these options that are none here."""
        return [
            slot.parameter.name
            for unit in self.units
            for slot in unit.layout.slots
            if is_matrix(slot.parameter, others) and slot.parameter.name not in self._matrices
        ]

    def reads_on_host(self) -> bool:
        return True

    def begin(self, step: Step) -> None:
        super().begin(step)
        norm, _ = step.read_norms()
        self._now = step if isfinite(norm) and norm >= 0 else None
        self._orthogonal = {}
        if self._now is None:
            return
        clip = self.settings.train.grad_clip
        factor = (min(1.0, clip / (norm + 1e-6)) if clip else 1.0) / step.scale
        for unit in self.units:
            whole = self._whole.gather(unit, self._directions(unit, factor))
            for name, direction in whole.items():
                dim = stack_dim(self._matrices[name])
                way = orthogonalised(direction.to(self._computed).movedim(dim, 0))
                self._orthogonal[name] = way.movedim(0, dim)

    def _directions(self, unit: Unit, factor: float) -> PieceOf:
        momentum = self.settings.optimizer.momentum
        absent = self.absent.of(unit)
        left_out = {unit.layout.slots[index].parameter.name for index in absent}

        def direction(slot: ParameterSlot, piece: slice) -> Tensor:
            """Let the momentum of a piece follow its gradient; return the way to go."""
            part = slice(piece.start - unit.owned.start, piece.stop - unit.owned.start)
            moment = self.moment1[unit][part]
            if slot.parameter.name in left_out:
                return moment
            gradient = unit.gradient_to_step[part].float() * factor
            moment.lerp_(gradient, 1.0 - momentum)
            return gradient.lerp_(moment, momentum)

        return direction

    def step(self, unit: Unit) -> None:
        spans = self.spans_to_step(unit, self.absent.of(unit))
        for span in spans:
            if span.name not in self._matrices:
                self.step_span(span)
        if self._now is None:
            return
        steps = self._whole.scatter(unit, self._orthogonal)
        done = dict.fromkeys(steps, 0)  # elements
        for span in spans:
            if span.name in steps:
                first = done[span.name]
                count = span.elements.stop - span.elements.start
                self._take(span, steps[span.name][first : first + count], self._now)
                done[span.name] = first + count

    def _take(self, span: AdamWSpan, way: Tensor, step: Step) -> None:
        """Step the elements of a span."""
        rate = self.rate(step, span.name)
        _, *sides = stack_shape(self._matrices[span.name])
        master = span.state.master
        master.mul_(1.0 - rate * span.decay)
        master.add_(way.float(), alpha=-rate * _LENGTH * sqrt(max(sides)))
        if span.state.weights is not None:
            span.state.weights.copy_(master)
