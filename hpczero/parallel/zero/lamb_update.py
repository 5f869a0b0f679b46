"""LAMB (You et al. 2020): AdamW whose step of each matrix is as long as its weights say.

    w = w - lr (|w| / |u|) u;    u: the step of AdamW, with the decay

Both norms are those of the logical parameter: sums of squares of all ranks that have elements of it
are added up, in fp64, between the two passes of the kernel. A fused map has one ratio. Where either
norm is 0, for biases and for vectors (norms) the ratio is 1; the bias of a fused map decays.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby

import torch
from torch import Tensor

from hpczero.model.shapes import Parameter
from hpczero.parallel.zero.data_axis import AbsentGradients
from hpczero.parallel.zero.kernel_update import AdamWSpan, AdamWUpdate
from hpczero.parallel.zero.unit import Unit
from hpczero.parallel.zero.update import Step
from hpczero.parallel.zero.weights import Weights
from hpczero_kernels.lamb import block_count, lamb_moments, lamb_step


class LambUpdate(AdamWUpdate):
    name = "lamb"

    def __init__(self, weights: Weights, absent: AbsentGradients) -> None:
        super().__init__(weights, absent)
        slots = [slot for unit in self.units for slot in unit.layout.slots]
        self._row_of = {slot.parameter.name: row for row, slot in enumerate(slots)}
        self._groups = [group for group in (weights.axis.group, weights.tensor) if group]
        self._holders = self._numbers([_holders(weights, slot.is_split) for slot in slots])
        adapts = self._numbers([_adapts(slot.parameter) for slot in slots])
        self._adapts = adapts.bool().unsqueeze(1)
        self._ratios: Tensor  # of this step, by row

    def _numbers(self, values: Sequence[float]) -> Tensor:
        made = torch.tensor(values, dtype=torch.float64)
        return made.to(self._device.torch)

    def begin(self, step: Step) -> None:
        super().begin(step)
        spans = [span for unit in self.units for span in self._joined(unit)]
        blocks = [block_count(span.elements.stop - span.elements.start) for span in spans]
        squares = self.units[0].master.new_empty(sum(blocks), 2)
        pieces = squares.split(blocks) if blocks else ()
        for span, of_span in zip(spans, pieces, strict=True):
            scalars = self.scalars_of(span.name)
            lamb_moments(span.state, span.decay, scalars, of_span, self._pool)
        self._ratios = self._made_ratios(self._summed(spans, blocks, squares))

    def _joined(self, unit: Unit) -> Iterator[AdamWSpan]:
        """Yield the owned elements to step, one span for each parameter.

        The cut between what this rank writes for its node and what others write would be one in
        the order of the sums: stages on unlike nodes would step a tied parameter differently.
        """
        spans = self.spans_to_step(unit, self.absent.of(unit))
        for _, of_parameter in groupby(spans, key=lambda span: span.name):
            first, *others = of_parameter
            if others:
                elements = slice(first.elements.start, others[-1].elements.stop)
                state = self.buffers(unit, elements, None)
                first = replace(first, elements=elements, state=state)
            yield first

    def _summed(self, spans: Sequence[AdamWSpan], blocks: Sequence[int], squares: Tensor) -> Tensor:
        """Return the sums of squares of each parameter, over all ranks: fp64 [parameters, 2].

        Blocks of a parameter lie one after the other, and are added in this order.
        """
        totals = squares.new_zeros(len(self._row_of), 2, dtype=torch.float64)
        numbered = zip((self._row_of[span.name] for span in spans), blocks, strict=True)
        counts = {
            row: sum(count for _, count in each)
            for row, each in groupby(numbered, key=lambda pair: pair[0])
        }
        if counts:
            rows, lengths = (
                torch.tensor(list(values), dtype=torch.int64, device=squares.device)
                for values in (counts.keys(), counts.values())
            )
            totals[rows] = torch.segment_reduce(squares.double(), "sum", lengths=lengths, axis=0)
        for group in self._groups:
            group.all_reduce(totals)
        return totals / self._holders.unsqueeze(1)

    def _made_ratios(self, totals: Tensor) -> Tensor:
        of_weights, of_steps = totals.split(1, dim=1)
        applies = self._adapts & (of_weights > 0) & (of_steps > 0)
        ratios: Tensor = (of_weights / of_steps).sqrt().where(applies, 1.0)
        return ratios.flatten().float()

    def step(self, unit: Unit) -> None:
        for span in self.spans_to_step(unit, self.absent.of(unit)):
            row = self._row_of[span.name]
            ratio = self._ratios[row : row + 1]
            lamb_step(span.state, span.decay, self.scalars_of(span.name), ratio, self._pool)


def _adapts(parameter: Parameter) -> bool:
    """Return True if the step of a parameter is as long as its weights say."""
    return parameter.decays and not parameter.is_bias


def _holders(weights: Weights, is_split: bool) -> int:
    """Return how many data and tensor ranks step each element of a parameter."""
    axis = weights.axis
    copies = axis.group.size // axis.size if weights.sharded.optimizer else axis.group.size
    alike = weights.tensor.size if weights.tensor and not is_split else 1
    return copies * alike
