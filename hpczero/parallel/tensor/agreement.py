"""What tensor ranks must have in common: the loss, and the gradients of what all of them hold.

A difference means that somebody computes with other numbers than its neighbours believe; training
would go on, and be wrong. Both are compared to the bit.
"""

from collections.abc import Iterator, Sequence

import torch

from hpczero.comm.group import Group
from hpczero.errors import HpczeroError
from hpczero.parallel.zero.unit import Unit

_BITS = 1 << 32


class TensorRanks:
    """The comparisons of a group of tensor ranks."""

    def __init__(self, group: Group, data: Group, data_ranks: int) -> None:
        """`data`: the group of this rank's data axis, whose first `data_ranks` have the shards."""
        self.group = group
        self._data = data
        self._data_ranks = data_ranks

    def compare_losses(self, loss: torch.Tensor) -> None:
        """Raise HpczeroError on all ranks unless they have the same loss. Collective."""
        own = loss.detach().reshape(1).double()
        losses = self.group.stack(own).flatten().tolist()
        if len(set(map(repr, losses))) > 1:  # as text: NaN is not equal to itself
            shown = ", ".join(f"{other!r}" for other in losses)
            raise HpczeroError(
                f"the ranks of a tensor group have different losses ({shown}) and must have the"
                " same: do they get the same samples (those of engine.rank, not of the rank in"
                " MPI's world)? Is the output of a column used as a whole? Do they draw random"
                " numbers differently, outside of the module?"
            )

    def checksum(self, units: Sequence[Unit]) -> torch.Tensor:
        """Return a number that follows from the bits of this shard's gradients of what all hold."""
        total = units[0].squares.new_zeros((), dtype=torch.int64)
        for _, gradient in _held_by_all(units):
            total += _bits(gradient)
        return total.remainder(_BITS).double()

    def compare_gradients(self, units: Sequence[Unit]) -> None:
        """Raise HpczeroError that names the first gradient that differs. Collective."""
        slots = [slot for unit in units for slot in unit.layout.slots]
        names = [slot.parameter.name for slot in slots if not slot.is_split]
        sums = torch.zeros(len(names), dtype=torch.int64)
        for name, gradient in _held_by_all(units):
            sums[names.index(name)] += _bits(gradient).cpu()
        sums = self._data.stack(sums)[: self._data_ranks].sum(0)
        of_ranks = self.group.stack(sums)
        differing = (of_ranks != of_ranks[0]).any(0).nonzero().flatten().tolist()
        first = names[differing[0]] if differing else "a parameter"
        raise HpczeroError(
            f"the ranks of a tensor group have different gradients of {first}, which all of them"
            " hold, and the step was left out: a module inside of a cut region (a norm of heads)"
            ' needs the role "replicated"; a value that all ranks have (of the residual stream)'
            " enters a cut region through columns alone"
        )


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
