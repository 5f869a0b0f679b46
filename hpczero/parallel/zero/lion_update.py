"""Lion (Chen et al. 2023): steps of one length, by the sign of a momentum, the only moment."""

from torch import Tensor

from hpczero.parallel.zero.data_axis import AbsentGradients
from hpczero.parallel.zero.kernel_update import KernelUpdate, StepSpan
from hpczero.parallel.zero.unit import Unit
from hpczero.parallel.zero.weights import Weights
from hpczero_kernels.lion import LionBuffers, lion


class LionUpdate(KernelUpdate[LionBuffers]):
    name = "lion"
    continues = frozenset({"lion"})

    def __init__(self, weights: Weights, absent: AbsentGradients) -> None:
        super().__init__(weights, absent)
        self.moment1 = self.moments(weights)

    def buffers(self, unit: Unit, elements: slice, weights: Tensor | None) -> LionBuffers:
        return LionBuffers(
            unit.master[elements],
            self.moment1[unit][elements],
            unit.gradient_to_step[elements],
            weights,
        )

    def step_span(self, span: StepSpan[LionBuffers]) -> None:
        lion(span.state, span.decay, self.scalars_of(span.name), self._pool)

    def states(self, unit: Unit) -> dict[str, Tensor]:
        return {"moment1": self.moment1[unit]} | super().states(unit)
