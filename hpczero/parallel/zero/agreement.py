"""The numbers that ranks must have in common where the module, or the loop, is somebody else's.

All ranks: the learning rates of a step. Tensor ranks: the loss, and the gradients of parameters
that all of them hold. A difference means that somebody computes with other numbers than its
neighbours believe; training would go on, and be wrong. All is compared to the bit, in the messages
that make the gradient's norm: where it differs, the norm is -infinity, and the step changes
nothing.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NoReturn
from zlib import crc32

import torch

from hpczero.comm.group import Group
from hpczero.errors import HpczeroError
from hpczero.parallel.zero.data_axis import DataAxis
from hpczero.parallel.zero.unit import Unit

_BITS = 1 << 32


def checksum_of_rates(lr: float, own_lr: Mapping[str, float]) -> int:
    """Return a number for a step's learning rates (`own_lr`: of single parameters)."""
    return crc32(repr((lr, sorted(own_lr.items()))).encode())


class Agreement:
    """The comparisons of an engine's ranks."""

    def __init__(self, axis: DataAxis, tensor: Group | None, pipeline: Group | None) -> None:
        self._data = axis.group
        self._shards = axis.size  # the first ranks of the data axis have them
        self._tensor = tensor
        self._others = [group for group in (tensor, pipeline) if group]

    def compare_losses(self, loss: torch.Tensor) -> None:
        """Raise HpczeroError on all ranks unless tensor ranks have the same loss. Collective."""
        if self._tensor is None:
            return
        own = loss.detach().reshape(1).double()
        losses = self._tensor.stack(own).flatten().tolist()
        if len(set(map(repr, losses))) > 1:  # as text: NaN is not equal to itself
            shown = ", ".join(f"{other!r}" for other in losses)
            raise HpczeroError(
                f"the ranks of a tensor group have different losses ({shown}) and must have the"
                " same: do they get the same samples (those of engine.rank, not of the rank in"
                " MPI's world)? Is the output of a column used as a whole? Do they draw random"
                " numbers differently, outside of the module?"
            )

    def totals(
        self, squares: torch.Tensor, units: Sequence[Unit], rates: int, workers: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the sum of squares of each worker's gradient, and if ranks are alike. Collective.

        `squares`: that of this rank's shards, in fp64; `rates`: `checksum_of_rates`; `workers`: the
        replicas whose gradients differ, else 1.
        """
        bits = self._checksum(units) if self._tensor else torch.zeros_like(squares)
        of_data = self._data.stack(torch.stack([squares, bits, torch.full_like(squares, rates)]))
        of_workers = of_data.view(-1, self._shards, 3)[:workers]
        totals, bits = of_workers[..., 0].sum(1), of_workers[..., 1].sum()
        common = _common(of_data[:, 2])
        for group in self._others:
            of_ranks = group.stack(torch.cat([totals, torch.stack([bits, common])]))
            totals = of_ranks[:, :workers].sum(0)
            common = _common(of_ranks[:, workers + 1])
            bits = _common(of_ranks[:, workers]) if group is self._tensor else bits
        is_alike = ~common.isnan() & (~bits.isnan() | ~totals.sum().isfinite())
        return totals, is_alike

    def _checksum(self, units: Sequence[Unit]) -> torch.Tensor:
        """Return a number that follows from the bits of this shard's gradients of what all hold."""
        total = units[0].squares.new_zeros((), dtype=torch.int64)
        for _, gradient in _held_by_all(units):
            total += _bits(gradient)
        return total.remainder(_BITS).double()

    def refuse(self, units: Sequence[Unit], lr: float, checksum: int) -> NoReturn:
        """Raise HpczeroError on all ranks: the norm was -infinity. Collective."""
        of_ranks = self._data.stack(torch.tensor([lr, checksum], dtype=torch.float64))
        for group in self._others:
            of_ranks = group.stack(of_ranks).flatten(0, 1)
        if len(set(of_ranks[:, 1].tolist())) > 1:
            rates = of_ranks[:, 0].tolist()
            shown = "lr = " + ", ".join(f"{other:.9g}" for other in rates)
            if len(set(rates)) == 1:
                shown = "those of single parameters"
            raise HpczeroError(
                f"step(lr=...): the ranks give different learning rates ({shown}), and the"
                " step was left out: a schedule that follows a loss must follow one that all ranks"
                " have, not each its own"
            )
        raise HpczeroError(
            "the ranks of a tensor group have different gradients of"
            f" {self._first_that_differs(units)}, which all of them"
            " hold, and the step was left out: a module inside of a cut region (a norm of heads)"
            ' needs the role "replicated"; a value that all ranks have (of the residual stream)'
            " enters a cut region through columns alone"
        )

    def _first_that_differs(self, units: Sequence[Unit]) -> str:
        assert self._tensor
        slots = [slot for unit in units for slot in unit.layout.slots]
        names = [slot.parameter.name for slot in slots if not slot.is_split]
        sums = torch.zeros(len(names), dtype=torch.int64)
        for name, gradient in _held_by_all(units):
            sums[names.index(name)] += _bits(gradient).cpu()
        sums = self._data.stack(sums)[: self._shards].sum(0)
        of_ranks = self._tensor.stack(sums)
        differing = (of_ranks != of_ranks[0]).any(0).nonzero().flatten().tolist()
        return names[differing[0]] if differing else "a parameter"


def _common(values: torch.Tensor) -> torch.Tensor:
    """Return what all values are; NaN: they differ."""
    return values[0].where((values == values[0]).all(), torch.nan)


def _held_by_all(units: Sequence[Unit]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the summed gradients, in this rank's shards, of parameters that are not split."""
    for unit in units:
        first = unit.shard.start
        for slot, part in unit.layout.spans(first, unit.shard.stop):
            if not slot.is_split:
                yield (
                    slot.parameter.name,
                    unit.reduced_shard[part.start - first : part.stop - first],
                )


def _bits(gradient: torch.Tensor) -> torch.Tensor:
    """Return the sum of the elements' bits: it does not depend on how they are cut into shards."""
    kind = torch.int32 if gradient.dtype == torch.float32 else torch.int16
    return gradient.view(kind).sum(dtype=torch.int64)
