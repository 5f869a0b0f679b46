"""Sums of gradients over the replicas in 8 bits (comm.compress), without error feedback."""

from hpczero.parallel.replicas.exchange import Errors
from hpczero.parallel.replicas.unit_exchange import Exchanger, UnitExchange
from hpczero.parallel.zero.data_axis import Replicas
from hpczero.parallel.zero.unit import Unit
from hpczero.parallel.zero.weights import Weights


class CompressedSum:
    """The sum of one unit's shard, in flight."""

    def __init__(self, unit: Unit, exchange: UnitExchange, replicas: int) -> None:
        self._unit = unit
        self._exchange = exchange
        self._replicas = replicas

    def poll(self) -> bool:
        return self._exchange.poll() and self._written()

    def wait(self) -> None:
        self._exchange.wait()
        self._written()

    def _written(self) -> bool:
        shard = self._unit.reduced_shard
        self._exchange.decode(shard)
        shard.mul_(self._replicas)
        return True


class CompressedSums:
    def __init__(self, weights: Weights, replicas: Replicas) -> None:
        self._exchanger = Exchanger(weights, replicas, "int8")

    def start(self, unit: Unit) -> CompressedSum:
        """Start the sum of the unit's shard over the replicas, in place."""
        exchange = self._exchanger.start(unit, unit.reduced_shard, Errors())
        return CompressedSum(unit, exchange, self._exchanger.replicas.count)
