"""What a rank holds of the model states at each stage of ZeRO (Rajbhandari et al. 2020), in bytes (pure).

A stage is data: what is cut into shards over the data ranks. The engine allocates exactly these sizes and the planner predicts them.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from hpczero.parallel.layout import UnitLayout
from hpczero.spec.schema import Zero

SLOTS = 2  # unit-sized buffers in flight where gradients, or parameters, are sharded


@dataclass(frozen=True)
class Sharded:
    optimizer: bool
    gradients: bool
    parameters: bool

    @classmethod
    def at_stage(cls, stage: int, node_shared: bool) -> "Sharded":
        """The ranks of a node that keep one copy of the parameters together have no need to cut it."""
        return cls(stage >= 1, stage >= 2, stage >= 3 and not node_shared)

    @property
    def read_by_others(self) -> str:
        """The kind of states that the other ranks of a node read besides the weights, where they share: the gradients, where these lie."""
        return "gradient slots" if self.gradients else "gradients"


@dataclass(frozen=True)
class Precision:
    """Bytes of a parameter in the model, and whether several micro-batches are accumulated (in fp32)."""

    weight: int
    accumulates: bool

    @property
    def gradient(self) -> int:
        return 4 if self.accumulates else self.weight


def shares_nodes(zero: Zero, ranks_on_nodes: Collection[int], alike: bool = True) -> bool:
    """Whether the data ranks of a node keep their states together: if asked for, else wherever a node has more than one. At stage 3 that makes
    a whole copy of the parameters per node: by itself it is chosen only where all ranks are on one node, and nothing is lost. Never where nodes
    divide the data ranks not `alike` for all tensor ranks (`Grid.nodes_cut_data_alike`): what these hold in common would no longer be equal.
    """
    several = alike and max(ranks_on_nodes) > 1
    if zero.node_shared == "auto":
        return several and (zero.stage < 3 or len(ranks_on_nodes) == 1)
    return zero.node_shared and several


def state_bytes(
    units: Sequence[UnitLayout],
    sharded: Sharded,
    precision: Precision,
    shared: bool,
    around: int = 0,
) -> dict[str, int]:
    """Bytes by kind on one rank; `shared`: the ranks of a node keep one copy of the weights. `around`: elements of the units that are in use while
    others are. The fp32 weights of a rank are the model's own only if they are all of its weights and nobody else's.
    """
    whole = sum(unit.size for unit in units)
    shards = sum(unit.shard_size for unit in units)
    own = shards if sharded.optimizer else whole
    largest = max(unit.size for unit in units)
    separate_master = precision.weight < 4 or (shared and not sharded.optimizer)
    return {
        "weights": (shards if sharded.parameters else whole) * precision.weight,
        "master": own * 4 if separate_master else 0,
        "moments": own * 8,
        "gradients": (shards if sharded.gradients else whole) * precision.gradient,
        "gradient slots": SLOTS * largest * precision.weight if sharded.gradients else 0,
        "gather slots": (SLOTS * largest + around) * precision.weight if sharded.parameters else 0,
    }
