"""Properties in which training systems differ (pure).

The defaults are hpczero's own. Others are described to hold the model of time against what was
measured with them: `docs/foresight.md`.
"""

from dataclasses import dataclass
from typing import Literal

from hpczero.planner.platform import Platform


@dataclass(frozen=True)
class Software:
    """The ways in which a system carries out a spec.

    `attention`: "flash", in one kernel that makes the scores again in backward; "kept", by products
    with a matrix of scores between them; "again", so too, and all of it once more in backward.
    `score_bytes`: those that the operations on scores move for each, forward and backward.
    `core_forward`, `core_backward`: rates of its kernel of attention, by those of the cluster's.
    `rings`: collectives that go round a ring through all nodes, so that bytes cross between two
    nodes once; the others go straight from each rank to each other.
    `hidden`: share of the data axis's time that computing hides where it can, as both want the same
    device; None: the cluster's. `hides_weights`: new weights are gathered, and states elsewhere
    stepped, while the next forward begins. `hides_reduction`: gradients are summed while backward
    goes on. `divides_messages`: tensor ranks each send a part of what goes to the next stage.
    `accumulates_apart`: micro-batches' gradients are added by operations of their own, not by the
    products. `step_ms`: what a step takes besides what a cluster's hosts take.
    """

    attention: Literal["flash", "kept", "again"] = "flash"
    score_bytes: tuple[float, float] = (0.0, 0.0)
    core_forward: float = 1.0
    core_backward: float = 1.0
    rings: frozenset[str] = frozenset()
    hidden: float | None = None
    hides_weights: bool = True
    hides_reduction: bool = True
    divides_messages: bool = False
    accumulates_apart: bool = True
    step_ms: float = 0.0


NCCL = frozenset({"all_reduce", "reduce_scatter", "all_gather"})


def own(platform: Platform) -> Software:
    """Return how hpczero works: with torch.distributed all_gathers are those of NCCL."""
    return Software(rings=frozenset({"all_gather"}) if platform.native else frozenset())
