"""The ranks of a group on equal nodes, in closed form: no rank is listed (pure).

It says the same as `comm.grid.Grid` where every node has as many ranks. Of groups that lie in
different ways on the nodes the slowest counts: the one on most nodes.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby, permutations
from math import gcd

from hpczero.comm.grid import impossible, impossible_shards
from hpczero.errors import InputError
from hpczero.model.families import known, layers
from hpczero.planner.allocation import Allocation
from hpczero.planner.sent import GroupVolumes, RepeatedRanks
from hpczero.planner.volumes import Volumes
from hpczero.spec.rules import AXES, axes_in_order
from hpczero.spec.schema import Parallel, Spec

_FIRST_MEMBERS = 64  # groups that are looked at, of those along an axis


@dataclass(frozen=True)
class Spread:
    """The ranks of one group, and the groups of the same axis that share its nodes.

    `on_nodes`: its ranks on each node that has some, in order.
    """

    ranks: int
    on_nodes: tuple[int, ...]
    beside: int = 1

    @property
    def nodes(self) -> int:
        return len(self.on_nodes)

    @property
    def on_one(self) -> int:
        """The most ranks on one node."""
        return max(self.on_nodes)


@lru_cache(maxsize=4096)
def spreads(
    sizes: tuple[tuple[str, int], ...], nodes: Allocation, shard_ranks: int | str = "all"
) -> dict[str, Spread]:
    """Return axis -> its slowest group; `sizes` are those of the axes, innermost first.

    Besides them there are "shard" and "replica", into which `shard_ranks` divides the data ranks.
    """
    found = {}
    stride = 1
    for axis, size in sizes:
        found[axis] = _slowest(stride, size, nodes)
        if axis == "data":
            shards = _shards(shard_ranks, stride, size, nodes)
            found["shard"] = _slowest(stride, shards, nodes)
            found["replica"] = _slowest(stride * shards, size // shards, nodes)
        stride *= size
    found["world"] = Spread(nodes.ranks, _on_nodes(0, 1, nodes.ranks, nodes))
    return found


def _slowest(stride: int, size: int, nodes: Allocation) -> Spread:
    groups = {_on_nodes(first, stride, size, nodes) for first in _firsts(stride, size, nodes)}
    on_nodes = max(groups, key=lambda each: (len(each), -min(each), each))
    return Spread(size, on_nodes, max(1, nodes.most // max(on_nodes)))


def _shards(shard_ranks: int | str, stride: int, data: int, nodes: Allocation) -> int:
    """Return the data ranks that have one copy, as `Grid.shards_and_replicas` divides them."""
    if shard_ranks == "all" or (shard_ranks == "node" and nodes.count == 1):
        return data
    if shard_ranks == "node":  # a node's end may divide neighbours along the axis anywhere, or not
        each = nodes.ranks_per_node
        return 1 if each % stride else gcd(data, each // stride)
    assert isinstance(shard_ranks, int)
    if data % shard_ranks:
        raise InputError(impossible_shards(data, shard_ranks))
    return shard_ranks


def _firsts(stride: int, size: int, nodes: Allocation) -> Iterator[int]:
    """Yield the places where some groups begin: those of the first blocks, at both ends."""
    for block in range(min(_FIRST_MEMBERS, nodes.ranks // (stride * size))):
        first = block * stride * size
        yield from {first, first + stride - 1}


def _on_nodes(first: int, stride: int, size: int, nodes: Allocation) -> tuple[int, ...]:
    each = nodes.ranks_per_node
    if first // each == (first + (size - 1) * stride) // each:
        return (size,)
    if stride >= each and stride % each == 0:
        return (1,) * size
    placed = (place // each for place in range(first, first + size * stride, stride))
    return tuple(len(list(same)) for _, same in groupby(placed))


def sizes_of(parallel: Parallel, nodes: Allocation) -> dict[str, int]:
    """Return the sizes of the axes; the data axis has the ranks that the others leave."""
    others = parallel.tensor * parallel.pipeline
    if nodes.ranks % others:
        raise InputError(impossible(parallel, nodes.ranks))
    data = nodes.ranks // others
    return {"tensor": parallel.tensor, "data": data, "pipeline": parallel.pipeline}


def in_order(spec: Spec, nodes: Allocation) -> tuple[tuple[str, int], ...]:
    """Return the axes with their sizes, innermost first.

    The order "auto" is the one that sends the fewest bytes between nodes, as `volumes.resolved`
    decides it.
    """
    sizes = sizes_of(spec.parallel, nodes)
    axes = axes_in_order(spec.parallel)
    if axes is not None:
        return tuple((axis, sizes[axis]) for axis in axes)
    choices = [tuple((axis, sizes[axis]) for axis in order) for order in permutations(AXES)]
    above_one = sum(size > 1 for size in sizes.values())
    if nodes.count == 1 or above_one < 2 or not known(spec.model):
        return choices[0]
    return min(choices, key=_Between(spec, nodes, sizes["data"]).total)


class _Between:
    """Bytes between nodes by the order of the axes."""

    def __init__(self, spec: Spec, nodes: Allocation, data_ranks: int) -> None:
        self._nodes = nodes
        self._shard_ranks = spec.zero.shard_ranks
        self._stages = range(spec.parallel.pipeline)
        self._volumes = Volumes(spec, layers(spec.model), data_ranks)

    def total(self, sizes: tuple[tuple[str, int], ...]) -> int:
        found = spreads(sizes, self._nodes, self._shard_ranks)
        divided = found["replica"].ranks > 1
        axes = [axis for axis, _ in sizes] + ["shard", "replica"] * divided
        return sum(
            self._of_axis(axis, found) * (self._nodes.ranks // found[axis].ranks)
            for axis in axes
            if found[axis].ranks > 1 and found[axis].nodes > 1
        )

    def _of_axis(self, axis: str, found: Mapping[str, Spread]) -> int:
        """Return the bytes of an axis's groups on average: those of the stages differ."""
        volumes, on_nodes, shards = self._volumes, found[axis].on_nodes, found["shard"].ranks
        batches, among_data = volumes.batches(0), volumes.among_data
        in_8_bits = volumes.spec.compresses_gathers and found["shard"].nodes > 1
        if axis == "pipeline":
            return _between(volumes.of_pipeline(0, batches, on_nodes, shards))
        divided = found["replica"].ranks > 1
        ways = {
            "tensor": lambda stage: volumes.of_tensor(stage, batches, on_nodes, shards, 0),
            "data": lambda stage: among_data.of_data(stage, 0, on_nodes, True, in_8_bits),
            "shard": lambda stage: among_data.of_shards(stage, 0, on_nodes, True, in_8_bits),
            "replica": lambda stage: among_data.of_replicas(stage, 0, shards, 0, on_nodes),
        }
        if divided:
            ways["data"] = lambda stage: among_data.of_all(stage, 0, shards, on_nodes)
        sent = [_between(ways[axis](stage)) for stage in self._stages]
        return sum(sent) // len(sent)


def _between(alike: Iterable[RepeatedRanks]) -> int:
    return sum(total.all.between for total in GroupVolumes(alike).totals.values())
