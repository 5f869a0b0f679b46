"""The time of a step that the search asks for, and what a plan has instead until it is merged.

`of_cluster` is the one place where the two meet.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

from hpczero.model.shapes import Layer
from hpczero.planner.cluster import Cluster
from hpczero.planner.platform import Platform
from hpczero.planner.rough_time import RoughTime
from hpczero.spec.schema import Spec


class StepSeconds(Protocol):
    """The time of a step: all of it, and by cause."""

    @property
    def causes(self) -> Mapping[str, float]: ...

    @property
    def seconds(self) -> float: ...

    @property
    def tokens_per_second(self) -> float: ...

    @property
    def utilisation(self) -> float:
        """Share of the devices' peak that the model's own operations have."""


class TimeModel(Protocol):
    """The time of a step of a spec, whose axes have a definite order, on equal nodes."""

    def __call__(self, spec: Spec, ranks: int, ranks_per_node: int) -> StepSeconds: ...


def of_cluster(layers: Sequence[Layer], cluster: Cluster, platform: Platform) -> TimeModel:
    return RoughTime(layers, cluster, platform)
