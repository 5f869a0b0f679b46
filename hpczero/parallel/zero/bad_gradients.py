"""Gradients that are not finite: in which tensor, and on which rank, the first one was."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hpczero.comm.group import Group
from hpczero.parallel.zero.data_axis import DataAxis
from hpczero.parallel.zero.unit import Unit

_UNKNOWN = -1  # a rank


@dataclass(frozen=True)
class BadGradient:
    """The first tensor, from the loss backwards, whose gradient was not finite on some rank.

    No tensor: only the sum over ranks was not finite. No rank: the rank is not known.
    """

    tensor: str | None
    data_rank: int | None

    def __str__(self) -> str:
        if self.tensor is None:
            return "only the sum over the ranks"
        where = "" if self.data_rank is None else f" of data rank {self.data_rank}"
        return f"first in {self.tensor}{where}"


class BadGradients:
    """Those of a step. `noted_on_host`: sums are looked at as they are made.

    Else the host would wait for a device's sums; then only the sums are left to look at.
    """

    def __init__(
        self, units: Sequence[Unit], axis: DataAxis, names_backwards: Sequence[str]
    ) -> None:
        """`names_backwards`: all parameters of the model."""
        self._units = units
        self._axis = axis
        self._names = names_backwards
        self._bad: list[tuple[int, int]] = []  # (index of the name, data rank)
        self.noted_on_host = not axis.device.has_queues

    def clear(self) -> None:
        self._bad.clear()

    def note(
        self, unit: Unit, first: int, parts: list[Tensor], ranks: Sequence[int], out: Tensor
    ) -> None:
        """Note which tensors of which ranks made a sum, of elements from `first` on, not finite.

        The `ranks` are those among which states are cut. An earlier sum of the step that was not
        finite has been noted before. A sum may have been written over one of its parts: that part
        is to blame if no other is.
        """
        before = self._axis.group.rank - self._axis.rank  # data ranks of other replicas
        for slot, elements in unit.layout.spans(first, first + out.numel()):
            within = slice(elements.start - first, elements.stop - first)
            parts_of_ranks = zip(ranks, parts, strict=True)
            bad = [
                (rank, part) for rank, part in parts_of_ranks if not part[within].isfinite().all()
            ]
            intact = [(rank, part) for rank, part in bad if part.data_ptr() != out.data_ptr()]
            if bad:
                index = self._names.index(slot.parameter.name)
                self._bad += [(index, before + rank) for rank, _ in intact or bad]

    def first(self, others: Sequence[Group] = ()) -> BadGradient:
        """Return which gradient, also of the other groups, made a sum not finite. Collective."""
        if not self.noted_on_host:  # the sums tell the rank where there is one
            before = self._axis.group.rank - self._axis.rank
            rank = _UNKNOWN - before if self._axis.group.size > 1 else 0
            for unit in self._units:
                shard = unit.reduced_shard
                self.note(unit, unit.shard.start, [shard], [rank], shard)
        none_bad = len(self._names)
        index, rank = min(self._bad, default=(none_bad, 0))
        for group in (self._axis.group, *others):
            firsts = group.stack(torch.tensor([index, rank], dtype=torch.int64))
            index, rank = min(map(tuple, firsts.tolist()))
        self._bad.clear()
        if index == none_bad:
            return BadGradient(None, None)
        return BadGradient(self._names[index], None if rank == _UNKNOWN else rank)
