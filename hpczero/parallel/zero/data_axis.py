"""How the data ranks exchange gradients and weights: what the engine asks for, and the way by messages (the other: `comm.node.NodeGroup`)."""

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Protocol

import torch
from torch import Tensor

from hpczero.comm.group import Group, Work, shard
from hpczero.comm.node_group import LocalSum
from hpczero.device import Device
from hpczero.parallel.zero.unit import Unit


class DataAxis(Protocol):
    """Shard r of a tensor belongs to place r. All ranks start these in the same order; a tensor belongs to an operation until it is done."""

    group: Group
    rank: int
    size: int
    shared: bool  # whether ranks of a node see one copy of the weights
    neighbours: int  # the ranks that see that copy, this one among them
    device: Device  # where its tensors are

    def allocate(self, once: Mapping[str, int], each: Mapping[str, int]) -> dict[str, Tensor]:
        """Blocks that other ranks see too, by name; what is left out, each rank allocates for itself."""

    def written(self, elements: int, sharded: bool) -> slice:
        """Which elements of the weights this rank writes after a step."""

    def reduce(self, tensor: Tensor, sums: LocalSum) -> Work:
        """`sums` gets what every rank has in its `tensor`, in an order that is the same on all ranks."""

    def gather(self, tensor: Tensor, copies: bool = False, name: str = "") -> Work:
        """Every rank's own shard of `tensor` comes to all; `copies`: to a tensor of its own on each, even if the axis shares memory. Ranks that
        gather tensors of different names do not meet.
        """

    def node_barrier(self) -> Work:
        """What ranks have written in memory that others see is there."""

    def all_gather(self, values: Tensor) -> Tensor:
        """[ranks, ...]: the same few values of all ranks."""

    def close(self) -> None: ...


class Messages:
    """Every rank has tensors of its own."""

    shared = False
    neighbours = 1

    def __init__(self, group: Group, gathers: Group) -> None:
        """`gathers`: of the same ranks. Gathers follow the order of forward and backward, sums that in which gradients are complete, which may
        differ between ranks: each has its own numbers. Where they start in one order, one group may be both.
        """
        self.group, self.gathers, self.rank, self.size = group, gathers, group.rank, group.size
        self.device = group.device

    def allocate(self, once: Mapping[str, int], each: Mapping[str, int]) -> dict[str, Tensor]:
        return {}

    def written(self, elements: int, sharded: bool) -> slice:
        return shard(elements, self.size, self.rank) if sharded else slice(0, elements)

    def reduce(self, tensor: Tensor, sums: LocalSum) -> Work:
        everyone = range(self.size)
        own = tensor[shard(tensor.numel(), self.size, self.rank)]
        return self.group.start_reduce_scatter(
            own, tensor, combine=lambda window, parts: sums.into_shard(window, parts, everyone)
        )

    def gather(self, tensor: Tensor, copies: bool = False, name: str = "") -> Work:
        return self.gathers.start_all_gather(
            tensor, tensor[shard(tensor.numel(), self.size, self.rank)], name
        )

    def node_barrier(self) -> Work:
        return self.group.start_barrier()

    def all_gather(self, values: Tensor) -> Tensor:
        return self.group.stack(values)

    def close(self) -> None:
        pass


# Parameters that a step leaves out: AdamW as PyTorch has it.
#
# A parameter without a gradient on every rank (frozen, or in no loss) is neither stepped nor decayed,
# and its bias correction counts its own updates. A gradient on one rank is one for all. hpczero's own
# models give every parameter a gradient in every step; only modules of users are asked.
#
# A rank says which parameters it has no gradient for as one number. Only where the ranks' numbers
# differ do they exchange the whole list.
class AbsentGradients:
    """`missed`: name -> updates of the model that left the parameter out. The same on all ranks."""

    def __init__(self, units: Sequence[Unit], axis: DataAxis, agrees: bool) -> None:
        """With `agrees` false every parameter always counts as having a gradient."""
        self._units, self._axis, self._agrees = units, axis, agrees
        self._parameters = [
            (unit, index) for unit in units for index in range(len(unit.parameters))
        ]
        self.missed: dict[str, int] = {}
        self._now: dict[Unit, frozenset[int]] = {}  # of units that miss any: which parameters

    def agree(self, tied: Mapping[Unit, Group]) -> None:
        """Collective. Settle which parameters this step leaves out; `tied` units lie on several stages."""
        if not self._agrees:
            return
        own = [
            number
            for number, (unit, index) in enumerate(self._parameters)
            if index not in unit.present
        ]
        numbers = (
            self._axis.all_gather(torch.tensor([_digest(own)], dtype=torch.int64))
            .flatten()
            .tolist()
        )
        absent = own if len(set(numbers)) == 1 else self._without_any(own)
        self._now = {}
        for number in absent:
            unit, index = self._parameters[number]
            self._now[unit] = self._now.get(unit, frozenset()) | {index}
        for unit, group in tied.items():
            has = [index not in self.of(unit) for index in range(len(unit.parameters))]
            everyones = group.stack(torch.tensor(has, dtype=torch.uint8)).amax(0).tolist()
            self._now[unit] = frozenset(
                index for index, anyone_has in enumerate(everyones) if not anyone_has
            )

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
        return {
            unit.layout.slots[index].parameter.name
            for unit, absent in self._now.items()
            for index in absent
        }


def _digest(numbers: Sequence[int]) -> int:
    if not numbers:
        return 0
    return int.from_bytes(blake2b(repr(numbers).encode(), digest_size=7).digest()) + 1
