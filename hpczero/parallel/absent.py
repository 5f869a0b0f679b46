"""Parameters that a step leaves out: AdamW as PyTorch has it.

A parameter without a gradient on every rank (frozen, or in no loss) is neither stepped nor decayed,
and its bias correction counts its own updates. A gradient on one rank is one for all. hpczero's own
models give every parameter a gradient in every step; only modules of users are asked.

A rank says which parameters it has no gradient for as one number. Only where the ranks' numbers
differ do they exchange the whole list.
"""

from collections.abc import Mapping, Sequence
from hashlib import blake2b

import torch

from hpczero.comm.group import Group
from hpczero.parallel.zero.data_axis import DataAxis
from hpczero.parallel.zero.unit import Unit


class AbsentGradients:
    """`missed`: name -> updates of the model that left the parameter out. The same on all ranks."""

    def __init__(self, units: Sequence[Unit], axis: DataAxis, agrees: bool) -> None:
        """With `agrees` false every parameter always counts as having a gradient."""
        self._units, self._axis, self._agrees = units, axis, agrees
        self._parameters = [(unit, index) for unit in units for index in range(len(unit.parameters))]
        self.missed: dict[str, int] = {}
        self._now: dict[Unit, frozenset[int]] = {}  # of units that miss any: which parameters

    def agree(self, tied: Mapping[Unit, Group]) -> None:
        """Collective. Settle which parameters this step leaves out; `tied` units lie on several stages."""
        if not self._agrees:
            return
        own = [number for number, (unit, index) in enumerate(self._parameters) if index not in unit.present]
        numbers = self._axis.all_gather(torch.tensor([_digest(own)], dtype=torch.int64)).flatten().tolist()
        absent = own if len(set(numbers)) == 1 else self._without_any(own)
        self._now = {}
        for number in absent:
            unit, index = self._parameters[number]
            self._now[unit] = self._now.get(unit, frozenset()) | {index}
        for unit, group in tied.items():
            has = [index not in self.of(unit) for index in range(len(unit.parameters))]
            everyones = group.stack(torch.tensor(has, dtype=torch.uint8)).amax(0).tolist()
            self._now[unit] = frozenset(index for index, anyone_has in enumerate(everyones) if not anyone_has)

    def _without_any(self, own: Sequence[int]) -> list[int]:
        has = torch.ones(len(self._parameters), dtype=torch.uint8)
        has[torch.tensor(own, dtype=torch.int64)] = 0
        everyones: torch.Tensor = self._axis.all_gather(has).amax(0)
        return (everyones == 0).nonzero().flatten().tolist()

    def of(self, unit: Unit) -> frozenset[int]:
        return self._now.get(unit, frozenset())

    def counts(self) -> set[int]:
        """Return how many updates those parameters have missed that this step updates."""
        return {0, *(self.missed[name] for name in self.missed.keys() - self._names())}

    def updated(self) -> None:
        """The step has been carried out."""
        for name in self._names():
            self.missed[name] = self.missed.get(name, 0) + 1

    def begin_step(self) -> None:
        """Forget which gradients there were."""
        for unit in self._units:
            unit.present.clear()

    def _names(self) -> set[str]:
        return {unit.layout.places[index].parameter.name for unit, absent in self._now.items() for index in absent}


def _digest(numbers: Sequence[int]) -> int:
    if not numbers:
        return 0
    return int.from_bytes(blake2b(repr(numbers).encode(), digest_size=7).digest()) + 1
