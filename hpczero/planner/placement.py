"""The data ranks of each node: how many there are, and what they share (pure).

Only ranks that have one copy of the states, shards of it, share memory.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hpczero.comm.grid import Grid
from hpczero.parallel.states import shares_nodes
from hpczero.spec.schema import Spec


@dataclass(frozen=True)
class Placement:
    """The data ranks of one node that have shards of one copy of the same part of the model."""

    shards: int  # ranks on all nodes
    on_node: int  # of them, on this node
    shared: bool  # these share one copy of the weights
    stage: int = 0
    tensor_rank: int = 0
    replicas: int = 1

    @property
    def data_ranks(self) -> int:
        return self.shards * self.replicas

    def part_of_rank(self, counted: Mapping[str, int]) -> dict[str, int]:
        """Return a rank's bytes by kind, with an equal part of the weights that a node shares."""
        sharers = {"weights": self.on_node} if self.shared else {}
        return {kind: size // sharers.get(kind, 1) for kind, size in counted.items()}


def nodes_of_ranks(ranks_on_nodes: Mapping[int, int]) -> list[int]:
    """Return the node of each rank, with the nodes in order."""
    return [node for node, count in sorted(ranks_on_nodes.items()) for _ in range(count)]


def placements(spec: Spec, grid: Grid) -> dict[int, list[Placement]]:
    """Return node -> one placement for each copy of each part of the model that its ranks have."""
    by_node: dict[int, list[Placement]] = {node: [] for node in sorted(set(grid.node_of_rank))}
    divided = grid.shards_and_replicas(spec.zero.shard_ranks)
    for group in divided.groups("shard"):
        for node, place in _on_nodes(spec, divided, group).items():
            by_node[node].append(place)
    return by_node


def placement(spec: Spec, grid: Grid, rank: int) -> Placement:
    divided = grid.shards_and_replicas(spec.zero.shard_ranks)
    return _on_nodes(spec, divided, divided.ranks(rank, "shard"))[grid.node_of_rank[rank]]


def _on_nodes(spec: Spec, divided: Grid, group: Sequence[int]) -> dict[int, Placement]:
    """Return node -> placement of its ranks in a group, which has one copy of one part."""
    on_nodes = Counter(divided.node_of_rank[rank] for rank in group)
    part_of_model = divided.coordinate(group[0], "pipeline"), divided.coordinate(group[0], "tensor")
    shared = shares_nodes(spec.zero, on_nodes.values(), divided.nodes_cut_data_alike)
    replicas = divided.size("replica")
    return {
        node: Placement(len(group), count, shared, *part_of_model, replicas)
        for node, count in on_nodes.items()
    }
