"""How the data ranks exchange gradients and weights: what the engine asks for, and the way by messages (the other: `comm.node.NodeGroup`)."""

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

from hpczero.comm.group import Group, Work, shard
from hpczero.comm.node_group import LocalSum
from hpczero.device import Device


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

    def settle(self) -> Work:
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
        return self.group.start_reduce_scatter(own, tensor, combine=lambda window, parts: sums.into_shard(window, parts, everyone))

    def gather(self, tensor: Tensor, copies: bool = False, name: str = "") -> Work:
        return self.gathers.start_all_gather(tensor, tensor[shard(tensor.numel(), self.size, self.rank)], name)

    def settle(self) -> Work:
        return self.group.start_barrier()

    def all_gather(self, values: Tensor) -> Tensor:
        return self.group.stack(values)

    def close(self) -> None:
        pass
