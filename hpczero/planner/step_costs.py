"""The pieces that a step's time is composed of, and the causes of their seconds (pure).

`planner.step_time` composes a step of them, whoever says them: `planner.predicted` for a cluster,
or what a run measured of itself.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from hpczero.planner.advice import CALLED

Seconds = Mapping[str, float]  # by cause

CAUSES = tuple(CALLED)


@dataclass(frozen=True)
class Edge:
    """Seconds of the data axis at one end of a stage's step.

    `uncovered` come before, or after, all computing that could hide them; `coverable` beside it.
    `offload`: seconds of states elsewhere, which the same computing can hide.
    """

    uncovered: float = 0.0
    coverable: float = 0.0
    offload: float = 0.0


class StepCosts(Protocol):
    """The pieces of a step, for a rank of each stage."""

    def like(self, stage: int) -> int:
        """Return the first stage whose pieces are the same, itself or one before it."""
        ...

    def action(self, kind: str, stage: int, chunk: int) -> Seconds:
        """Return the seconds of a forward or backward of one micro-batch, without data's."""
        ...

    def data(self, kind: str, stage: int, chunk: int) -> float:
        """Return the seconds of the data axis beside each such action."""
        ...

    def bus(self, kind: str, stage: int, chunk: int) -> float:
        """Return the seconds of activations over the bus beside each such action."""
        ...

    def transfer(self, part: int) -> float:
        """Return the seconds of a message between a part and the next one."""
        ...

    def weights(self, stage: int) -> Edge:
        """Return what comes before a stage's first forward, or beside it."""
        ...

    def gradients(self, stage: int) -> Edge:
        """Return what comes beside a stage's last backward, or after it."""
        ...

    def after(self) -> Seconds:
        """Return the seconds after all backwards, without checkpoints."""
        ...

    def beside_next(self, step: float) -> float:
        """Return the seconds, on average, of exchanges that a step of such a length cannot hide."""
        ...

    def checkpoint(self, step: float) -> float:
        """Return the seconds of checkpoints in a step that takes so long without them."""
        ...

    def hidden(self) -> float:
        """Return the share of the data axis's seconds that computing hides where it can."""
        ...
