"""Seconds of collectives and messages on a cluster's links (pure).

Bytes are those that `planner.volumes` counts for a rank, inside its node and to others. They take
latency and bytes by bandwidth, of what is slower: a device's link in its node, or the adapters.

direct   from each rank to each other: all ranks of a node share its adapters, one of which is the
         most that a rank can use
ring     through all nodes: all that a rank sends passes once from node to node, so a group of
         several ranks on a node uses that many adapters; groups beside it share them
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil, log2

from hpczero.planner.allocation import Allocation
from hpczero.planner.cluster import Cluster, Operation
from hpczero.planner.sent import Sent
from hpczero.planner.spread import Spread

_MICRO, _GIGA = 1e-6, 1e9
# seconds
_MESSAGE = 1e-6  # of a rank for each of the messages that it starts at the same time
_HOP = 2e-6  # of a ring's step from device to device
_PROXY = 5e-6  # of the thread that hands a ring's step from an adapter on
_COPIES = 3  # times that bytes pass the memory of a node on their way from rank to rank


@dataclass(frozen=True)
class Links:
    """Links and adapters as the ranks of one node share them."""

    link: float  # bytes a second of a rank to others of its node
    adapter: float  # of one
    adapters: float  # of a node, to switches that may have less
    of_device: float  # adapters for each device, one at least
    link_latency: float  # seconds
    latency: float
    # measured: of all ranks of a node, of one rank of each node
    inside: Mapping[str, Operation]
    between: Mapping[str, Operation]

    @classmethod
    def of(cls, cluster: Cluster, nodes: Allocation) -> "Links":
        node, network = cluster.node, cluster.network
        link = node.link_gb_s * node.link_reached
        if cluster.device.kind == "cpu":
            link = min(link, node.bandwidth_gb_s / (_COPIES * nodes.most))
        else:
            link /= -(-nodes.most // node.devices)
        adapter = network.adapter_gb_s * network.reached
        return cls(
            link * _GIGA,
            adapter * _GIGA,
            adapter * network.adapters / network.oversubscription * _GIGA,
            max(1.0, network.adapters / node.devices),
            node.link_us * _MICRO,
            network.latency_us * _MICRO,
            {str(name): of for name, of in node.operations.items()},
            {str(name): of for name, of in network.operations.items()},
        )

    def collective(
        self, operation: str, sent: Sent, spread: Spread, rings: bool, count: float = 1
    ) -> float:
        """Return the seconds of `count` operations in which a rank sends so much altogether."""
        if spread.ranks == 1:
            return 0.0
        together = sent.inside + sent.between
        if measured := self._measured(operation, spread):
            return count * measured.us * _MICRO + together / (measured.gb_s * _GIGA)
        steps = count * self._latency(operation, spread, rings)
        if spread.nodes == 1:
            return steps + together / self.link
        if rings:
            own = self.adapter * self.of_device * spread.on_one
            rate = min(self.link, own, self.adapters / spread.beside)
            return steps + together / rate
        rate = min(self.adapter * self.of_device, self.adapters / (spread.on_one * spread.beside))
        return steps + max(sent.inside / self.link, sent.between / rate)

    def _measured(self, operation: str, spread: Spread) -> Operation | None:
        """Return what was measured of such an operation, if it was among ranks that lie alike."""
        if spread.nodes == 1:
            return self.inside.get(operation)
        alone = spread.on_one == spread.beside == 1
        return self.between.get(operation) if alone else None

    def _latency(self, operation: str, spread: Spread, rings: bool) -> float:
        """Return the seconds of an operation on nothing: it is started, and handed on."""
        start = self.latency if spread.nodes > 1 else self.link_latency
        twice = 2 if operation == "all_reduce" else 1
        if not rings:
            return twice * (start + spread.ranks * _MESSAGE)
        inside, between = spread.ranks - spread.nodes, spread.nodes
        if spread.nodes == 1:
            between = 0
        elif operation == "all_reduce":  # by trees, where they are faster
            inside = min(inside, spread.on_one)
            between = min(between, 2 * ceil(log2(spread.nodes)))
        hops = inside * _HOP + between * (self.latency + _PROXY)
        return max(start, self.link_latency) + twice * hops

    def message(self, size: float, spread: Spread, between: bool) -> float:
        """Return the seconds of a message between neighbours, while others of the node send too."""
        alone = spread.beside == 1
        measured = self.between.get("send") if between else self.inside.get("send")
        if measured and (alone or not between):
            return measured.us * _MICRO + size / (measured.gb_s * _GIGA)
        if not between:
            return self.link_latency + size / self.link
        rate = min(self.adapter * self.of_device, self.adapters / spread.beside)
        return self.latency + size / rate
