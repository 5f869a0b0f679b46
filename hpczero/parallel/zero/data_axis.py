"""Exchanges among the data ranks: gradients, weights, and which parameters a step leaves out.

`DataAxis` is what the engine asks for. `Messages` carries it out by messages,
`comm.node_axis.NodeAxis` with one copy of the weights per node. Either may be the inner axis of
`ShardsAndReplicas`.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from typing import Any, Protocol

import torch
from torch import Tensor

from hpczero.comm.group import Group, Work, shard
from hpczero.comm.node_axis import LocalSum, ShardMessages
from hpczero.device import Device
from hpczero.parallel.zero.unit import Unit


@dataclass(frozen=True)
class Replicas:
    """The data ranks that have the same shards: two groups of them, with collectives of their own.

    An exchange (`parallel.replicas.exchange`) has its first pass in one, its second in the other.
    `first_passes`: the exchanges whose second pass has not begun, the oldest first.
    """

    group: Group
    averages: Group
    first_passes: deque[Any] = field(default_factory=deque)

    @property
    def count(self) -> int:
        return self.group.size

    @property
    def number(self) -> int:
        """The number of this rank's replica."""
        return self.group.rank


class DataAxis(Protocol):
    """Collective operations over the data ranks; shard r of a tensor belongs to rank r.

    All ranks start them in one order. A tensor belongs to an operation until it is done.
    `group`: all data ranks. `rank` and `size` are of those among which states are cut.
    """

    group: Group
    rank: int
    size: int
    shared: bool  # the ranks of a node have one copy of the weights
    neighbours: int  # number of ranks that have that copy, this one included
    device: Device  # of its tensors

    @property
    def replicas(self) -> Replicas | None:
        """The data ranks that have the same shards as this one, if states have copies."""

    def allocate(self, once: Mapping[str, int], each: Mapping[str, int]) -> dict[str, Tensor]:
        """Return blocks that other ranks see too, by name; a rank allocates others for itself."""

    def written(self, elements: int, sharded: bool) -> slice:
        """Return the elements of the weights that this rank writes after a step."""

    def reduce(self, tensor: Tensor, sums: LocalSum) -> Work:
        """Start a reduce-scatter; `sums` adds up, in an order that is the same on all ranks."""

    def gather(
        self,
        tensor: Tensor,
        per_rank: bool = False,
        name: str = "",
        messages: ShardMessages | None = None,
    ) -> Work:
        """Start an all-gather: every rank's shard of `tensor` comes to all.

        `per_rank`: each rank has a tensor of its own, even if the axis shares memory. Gathers of
        different names do not meet. `messages` stand for the shards.
        """

    def node_barrier(self) -> Work:
        """Start a barrier after which writes to memory that ranks share are seen by all."""

    def close(self) -> None: ...


class Messages:
    """Every rank has tensors of its own, and sends them."""

    replicas = None
    shared = False
    neighbours = 1

    def __init__(self, group: Group, gathers: Group) -> None:
        """`gathers`: a second group of the same ranks, for gathers.

        Gathers follow the order of forward and backward, sums the order in which gradients are
        complete. Their interleaving may differ between ranks, so that each needs a group with its
        own sequence numbers. Where they start in one order, one group may be both.
        """
        self.group = group
        self.gathers = gathers
        self.rank = group.rank
        self.size = group.size
        self.device = group.device

    def allocate(self, once: Mapping[str, int], each: Mapping[str, int]) -> dict[str, Tensor]:
        return {}

    def written(self, elements: int, sharded: bool) -> slice:
        return shard(elements, self.size, self.rank) if sharded else slice(0, elements)

    def reduce(self, tensor: Tensor, sums: LocalSum) -> Work:
        ranks = range(self.size)
        return self.group.start_reduce_scatter(
            tensor[shard(tensor.numel(), self.size, self.rank)],
            tensor,
            combine=lambda window, parts: sums.into_shard(window, parts, ranks),
        )

    def gather(
        self,
        tensor: Tensor,
        per_rank: bool = False,
        name: str = "",
        messages: ShardMessages | None = None,
    ) -> Work:
        if messages is None:
            own_shard = tensor[shard(tensor.numel(), self.size, self.rank)]
            return self.gathers.start_all_gather(tensor, own_shard, name)
        # They arrive at the end of the tensor's own memory.
        arriving = tensor.view(torch.uint8)[-self.size * messages.size :].view(self.size, -1)
        messages.write(arriving[self.rank], self.rank)
        read = partial(_read, messages, arriving, tensor)
        return self.gathers.start_all_gather(arriving, arriving[self.rank], name, read)

    def node_barrier(self) -> Work:
        return self.group.start_barrier()

    def close(self) -> None:
        pass


def _read(messages: ShardMessages, arrived: Tensor, tensor: Tensor) -> None:
    """Read all messages, which lie at the end of the tensor's memory.

    As a message is no longer than a shard, no shard reaches into the messages of later ones. The
    last shards reach into their own.
    """
    for rank, (message, own) in enumerate(zip(arrived, tensor.chunk(len(arrived)), strict=True)):
        after = len(arrived) - rank - 1
        overlaps = (after + 1) * message.nbytes > after * own.nbytes
        messages.read(message.clone() if overlaps else message, rank, own)


class ShardsAndReplicas:
    """States are cut into shards among some data ranks, `inside`; the others have copies of them.

    Reductions and gathers stay inside. The engine sums the shards over `replicas` once a step.
    """

    def __init__(self, group: Group, inside: DataAxis, replicas: Replicas) -> None:
        """`group`: all data ranks, those `inside` one after the other, then the next replica's."""
        self.group = group
        self.replicas: Replicas | None = replicas
        self.rank = inside.rank
        self.size = inside.size
        self.shared = inside.shared
        self.neighbours = inside.neighbours
        self.device = inside.device
        self.allocate = inside.allocate
        self.written = inside.written
        self.reduce = inside.reduce
        self.gather = inside.gather
        self.node_barrier = inside.node_barrier
        self.close = inside.close


class AbsentGradients:
    """Parameters that a step leaves out, with PyTorch's meaning of AdamW.

    A parameter without a gradient on every rank (frozen, or in no loss) is neither stepped nor
    decayed, and its bias correction counts its own updates. A gradient on one rank is one for all.
    hpczero's own models give every parameter a gradient in every step; only users' modules are
    asked.

    A rank says which parameters it has no gradient for as one number. Only where the ranks' numbers
    differ do they exchange the whole list.

    `missed`: name -> updates of the model that left the parameter out; equal on all ranks.
    """

    def __init__(self, units: Sequence[Unit], axis: DataAxis, agrees: bool) -> None:
        """With `agrees` false every parameter always counts as having a gradient."""
        self._units = units
        self._axis = axis
        self._agrees = agrees
        self._parameters = [
            (unit, index) for unit in units for index in range(len(unit.parameters))
        ]
        self.missed: dict[str, int] = {}
        self._absent: dict[Unit, frozenset[int]] = {}  # in this step; index in the unit

    def agree(self, tied: Mapping[Unit, Group]) -> None:
        """Find the parameters that this step leaves out; `tied` units lie on several stages.

        Collective.
        """
        if not self._agrees:
            return
        missing = [
            number
            for number, (unit, index) in enumerate(self._parameters)
            if index not in unit.present
        ]
        digest = torch.tensor([_digest(missing)], dtype=torch.int64)
        digests = self._axis.group.stack(digest).flatten().tolist()
        absent = missing if len(set(digests)) == 1 else self._missing_everywhere(missing)
        self._absent = {}
        for number in absent:
            unit, index = self._parameters[number]
            self._absent[unit] = self._absent.get(unit, frozenset()) | {index}
        for unit, group in tied.items():
            has = [index not in self.of(unit) for index in range(len(unit.parameters))]
            any_has = group.stack(torch.tensor(has, dtype=torch.uint8)).amax(0).tolist()
            self._absent[unit] = frozenset(index for index, had in enumerate(any_has) if not had)

    def _missing_everywhere(self, missing: Sequence[int]) -> list[int]:
        has = torch.ones(len(self._parameters), dtype=torch.uint8)
        has[torch.tensor(missing, dtype=torch.int64)] = 0
        any_has: torch.Tensor = self._axis.group.stack(has).amax(0)
        return (any_has == 0).nonzero().flatten().tolist()

    def of(self, unit: Unit) -> frozenset[int]:
        """Return the indices of the unit's parameters that this step leaves out."""
        return self._absent.get(unit, frozenset())

    def behind(self) -> set[str]:
        """Return the parameters that this step updates, and that others have left out."""
        return self.missed.keys() - self._names()

    def updated(self) -> None:
        """Count the step, which has been carried out."""
        for name in self._names():
            self.missed[name] = self.missed.get(name, 0) + 1

    def begin_step(self) -> None:
        """Forget which gradients there were."""
        for unit in self._units:
            unit.present.clear()

    def _names(self) -> set[str]:
        return {
            unit.layout.slots[index].parameter.name
            for unit, absent in self._absent.items()
            for index in absent
        }


def _digest(numbers: Sequence[int]) -> int:
    if not numbers:
        return 0
    return int.from_bytes(blake2b(repr(numbers).encode(), digest_size=7).digest()) + 1
