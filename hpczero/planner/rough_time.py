"""A first guess of the time of a step, from operations and bytes alone (pure).

It stands in for the model of time: no overlap, no contention, one share of the peak for all
products. It ranks layouts roughly, and says no more.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import fsum

from hpczero.data.samples import micro_batch_sizes
from hpczero.model.families import family
from hpczero.model.shapes import Layer
from hpczero.planner.activations import element_bytes
from hpczero.planner.cluster import Cluster
from hpczero.planner.platform import Platform
from hpczero.spec.rules import AXES, axes_in_order
from hpczero.spec.schema import Spec

_SMALL = 512  # tokens of a micro-batch that reach half of the rate
_AGAIN = {"none": 0.0, "selective": 0.05, "block": 1 / 3}
_OF_STATES = 30  # bytes that a parameter's update moves


@dataclass(frozen=True)
class RoughSeconds:
    causes: dict[str, float]
    tokens: int
    operations: float
    peak: float

    @property
    def seconds(self) -> float:
        return fsum(self.causes.values())

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    @property
    def utilisation(self) -> float:
        return self.operations / self.seconds / self.peak


class RoughTime:
    """The rough time of any layouts of one job on a cluster."""

    def __init__(self, layers: Sequence[Layer], cluster: Cluster, platform: Platform) -> None:
        self.cluster = cluster
        self.platform = platform
        self._parameters = sum(layer.size for layer in layers)

    def __call__(self, spec: Spec, ranks: int, ranks_per_node: int) -> RoughSeconds:
        parallel, device = spec.parallel, self.cluster.device
        sizes = {"tensor": parallel.tensor, "pipeline": parallel.pipeline}
        sizes["data"] = ranks // (parallel.tensor * parallel.pipeline)
        micro_batches, _, samples = micro_batch_sizes(
            spec.train.global_batch, spec.train.micro_batch, sizes["data"]
        )
        operations = spec.train.global_batch * sum(
            family(spec.model).operations(spec.model, spec.seq_len)
        )
        products = self.cluster.products(spec.train.precision)
        peak = products.peak_tflops * 1e12
        tokens = samples * spec.seq_len
        rate = peak * products.reached * tokens / (tokens + _SMALL)
        again = _AGAIN.get(spec.memory.recompute, 0.0) / spec.memory.recompute_every
        computing = micro_batches * samples / spec.train.global_batch * operations / rate
        computing *= (1 + again) / (parallel.tensor * parallel.pipeline)
        causes = {
            "compute": computing,
            "bubble": computing * (parallel.pipeline - 1) / parallel.chunks / micro_batches,
        }
        width = element_bytes(spec)
        stream = tokens * spec.model.hidden * width
        rates = self._rates(spec, sizes, ranks_per_node)
        layers = spec.model.layers / parallel.pipeline
        held = self._parameters / (parallel.tensor * parallel.pipeline)
        if parallel.tensor > 1:
            sent = 8 * layers * stream * micro_batches * (1 - 1 / parallel.tensor)
            causes["tensor"] = sent / rates["tensor"]
        if parallel.pipeline > 1:
            causes["messages"] = 2 * parallel.chunks * micro_batches * stream / rates["pipeline"]
        if sizes["data"] > 1:
            times = {0: 2, 1: 2, 2: micro_batches + 1, 3: 3 * micro_batches}[spec.zero.stage]
            causes["data"] = times * held * width * (1 - 1 / sizes["data"]) / rates["data"]
        owned = held / (sizes["data"] if spec.zero.stage else 1)
        bandwidth = device.bandwidth_gb_s * device.bandwidth_reached * 1e9
        if spec.zero.offload != "none":
            bandwidth = (device.bus_gb_s or self.cluster.node.nvme_gb_s or 1) * 1e9
        causes["optimizer"] = owned * _OF_STATES / bandwidth
        return RoughSeconds(
            causes, spec.train.global_batch * spec.seq_len, operations, peak * ranks
        )

    def _rates(self, spec: Spec, sizes: dict[str, int], per_node: int) -> dict[str, float]:
        order = axes_in_order(spec.parallel) or AXES
        return _rates(self.cluster_rates, tuple((axis, sizes[axis]) for axis in order), per_node)

    @property
    def cluster_rates(self) -> tuple[float, float]:
        node, network = self.cluster.node, self.cluster.network
        inside = node.link_gb_s * node.link_reached * 1e9
        share = network.adapters / node.devices
        return inside, network.adapter_gb_s * network.reached * share * 1e9


@lru_cache(maxsize=4096)
def _rates(
    rates: tuple[float, float], axes: tuple[tuple[str, int], ...], per_node: int
) -> dict[str, float]:
    """Return the bytes a second along each axis: those of the slower of its links."""
    stride = 1
    found = {}
    for axis, size in axes:
        stride *= size
        found[axis] = rates[0] if stride <= per_node else rates[1]
    return found
