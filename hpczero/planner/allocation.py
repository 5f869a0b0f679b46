"""The nodes that a job has, with the ranks on each (pure)."""

from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Allocation:
    """All ranks of a job, dealt out node by node: only the last node can have fewer."""

    ranks: int
    ranks_per_node: int

    @classmethod
    def of_nodes(cls, count: int, ranks_per_node: int) -> "Allocation":
        """Return so many full nodes."""
        return cls(count * ranks_per_node, ranks_per_node)

    @property
    def count(self) -> int:
        """The number of nodes."""
        return -(-self.ranks // self.ranks_per_node)

    @property
    def most(self) -> int:
        """The ranks of the fullest node."""
        return min(self.ranks, self.ranks_per_node)

    @cached_property
    def node_of_rank(self) -> list[int]:
        return [rank // self.ranks_per_node for rank in range(self.ranks)]
