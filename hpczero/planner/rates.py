"""Seconds of a rank's own work on a cluster's device (pure).

A product takes 2 m n k / (peak reached r(m) r(n) r(k)), r(x) = x / (x + half), with m and n in
whole tiles, and no less than its matrices take through memory. A GPU has so many units that make a
tile each: fewer tiles leave units idle. Attention in one kernel computes the visible scores; its
backward makes five products where forward makes two. What lies between products takes its bytes
through memory. The host starts operation after operation: a GPU waits for it where they are short,
a CPU is the host itself.
"""

from dataclasses import dataclass
from functools import cached_property

from hpczero.model.work import Core, Pass, Product
from hpczero.planner.cluster import Cluster, Device, Products
from hpczero.planner.software import Software

_ROW = 16  # bytes: whole ones keep a device's wide loads
_BACKWARD_OF_CORE = 2.5  # products of flash attention's backward by those of forward
_SPLIT = 1024  # of k: so long a part of a sum is worth a unit of its own
_SMALLER = 4  # tiles in place of one, where there are too few
_TERA, _GIGA, _MICRO = 1e12, 1e9, 1e-6


@dataclass(frozen=True)
class PassTime:
    """Seconds of a pass: of the device by cause, and of the host that starts its operations."""

    compute: float = 0.0
    attention: float = 0.0
    memory: float = 0.0
    host: float = 0.0


@dataclass(frozen=True)
class Rates:
    """Rates that one rank reaches, given how many there are on its node."""

    device: Device
    of_products: Products
    element: int
    software: Software
    share: float  # of a device's time that the rank has; of a CPU so many cores
    bandwidth: float  # bytes a second of what lies between products
    of_update: float  # bytes a second of the optimizer's kernel

    @classmethod
    def of(
        cls, cluster: Cluster, precision: str, ranks_on_node: int, software: Software
    ) -> "Rates":
        device, node = cluster.device, cluster.node
        share = node.devices / ranks_on_node
        if device.kind == "cuda":
            share = 1 / -(-ranks_on_node // node.devices)
            bandwidth = device.bandwidth_gb_s * share
        else:
            bandwidth = min(share * device.bandwidth_gb_s, node.bandwidth_gb_s / ranks_on_node)
        element = 4 if precision == "fp32" else 2
        reached, by_update = (
            bandwidth * part * _GIGA
            for part in (device.bandwidth_reached, device.reached_by("adamw", precision))
        )
        products = cluster.products(precision)
        return cls(device, products, element, software, share, reached, by_update)

    @cached_property
    def peak(self) -> float:
        """Operations a second of the data sheet."""
        return self.of_products.peak_tflops * self.share * _TERA

    @property
    def is_gpu(self) -> bool:
        return self.device.kind == "cuda"

    def product(self, product: Product) -> float:
        of = self.of_products
        m, n = _whole(product.m, of.tile), _whole(product.n, of.tile)
        used = _r(m, of.half_outer) * _r(n, of.half_outer)
        if of.units:
            tiles = m * n / of.tile**2 * product.times * max(1.0, product.k / _SPLIT)
            used = min(used, _SMALLER * tiles / of.units)
        rate = self.peak * of.reached * used * _r(product.k, of.half_inner)
        if (product.n * self.element) % _ROW or (product.k * self.element) % _ROW:
            rate *= of.unaligned
        numbers = product.m * product.k + product.k * product.n + product.m * product.n
        through_memory = numbers * product.times * self.element / self.bandwidth
        return max(2 * m * n * product.k * product.times / rate, through_memory)

    def core(self, core: Core) -> float:
        if self.software.attention == "flash":
            of = self.of_products
            operations = core.operations * core.visible / core.keys
            reached = of.attention * self.software.core_forward
            if core.backward:
                operations *= _BACKWARD_OF_CORE
                reached = of.attention_backward * self.software.core_backward
            return operations / (self.peak * reached * _r(core.keys, of.attention_half))
        forward = sum(map(self.product, core.products))
        forward += core.scores * self.software.score_bytes[0] / self.bandwidth
        if not core.backward:
            return forward
        products = (part for product in core.products for part in product.backward)
        seconds = sum(map(self.product, products))
        seconds += core.scores * self.software.score_bytes[1] / self.bandwidth
        return seconds + forward * (self.software.attention == "again")

    def moved(self, size: float) -> float:
        """Return the seconds of bytes through the device's memory."""
        return size / self.bandwidth

    def time(self, work: Pass) -> PassTime:
        return PassTime(
            sum(map(self.product, work.products)),
            sum(map(self.core, work.cores)),
            self.moved(work.bytes),
            work.launches_with_products * self.device.launch_us * _MICRO,
        )


def _whole(count: float, tile: int) -> float:
    return -(-count // tile) * tile


def _r(size: float, half: float) -> float:
    return size / (size + half)
