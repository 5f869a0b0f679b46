"""The norm of the gradient: of all of it, or of each replica's own."""

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from hpczero.comm.group import Group
from hpczero.parallel.zero.agreement import Agreement
from hpczero.parallel.zero.data_axis import DataAxis
from hpczero.parallel.zero.unit import Unit


class GradientNorm:
    """Blocks, then shards, are added in a fixed order: the same on each rank and at each stage."""

    def __init__(
        self,
        units: Sequence[Unit],
        axis: DataAxis,
        tensor: Group | None,
        others: Sequence[Group],
        alike: Agreement | None,
        counted_elsewhere: Collection[Unit],
    ) -> None:
        """`others`: groups along the other axes; `alike`: compares what must be alike."""
        self._units = [unit for unit in units if unit not in counted_elsewhere]
        self._axis = axis
        self._tensor = tensor
        self._others = others
        self._alike = alike

    def own_and_common(self, rates: int, workers: int) -> Tensor:
        """Return the norm of this worker's gradient, and the common one. Collective.

        `workers`: the replicas whose gradients differ, else 1. The common norm is the root of the
        mean of the workers' squares. Neither is finite where any worker's is not; both are
        -infinity where ranks differ in what they must have in common. `rates`: see `Agreement`.
        """
        squares = self._squares()
        if self._alike:
            totals, alike = self._alike.totals(squares, self._units, rates, workers)
            return self._of_totals(totals).where(alike, -torch.inf)
        shards = self._axis.group.stack(squares).view(-1, self._axis.size)  # [replicas, shards]
        totals = shards[:workers].sum(1)
        for group in self._others:
            totals = group.stack(totals).sum(0)
        return self._of_totals(totals)

    def _of_totals(self, totals: Tensor) -> Tensor:
        """Return this worker's norm, and the common one, from the workers' sums of squares."""
        if len(totals) == 1:
            return totals.sqrt().expand(2)
        assert self._axis.replicas
        common = totals.mean().sqrt()
        own = totals[self._axis.replicas.number].sqrt().where(common.isfinite(), common)
        return torch.stack([own, common])

    def _squares(self) -> Tensor:
        """Return the sum of squares of this rank's shards."""
        zero = torch.zeros((), dtype=torch.float64, device=self._axis.device.torch)
        squares = torch.stack([zero, *(unit.squares.double().sum() for unit in self._units)]).sum()
        if self._tensor and self._tensor.rank:  # what all tensor ranks hold counts once
            shared = (unit.squares_held_by_all() for unit in self._units)
            squares -= sum(shared, torch.zeros_like(squares))
        return squares
