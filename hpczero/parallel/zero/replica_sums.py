"""Sums of gradients over the replicas: of each unit's shard, once in a step.

They start in one order on all ranks, and go on while backward does.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from hpczero.comm.group import Group
from hpczero.parallel.zero.data_axis import Replicas
from hpczero.parallel.zero.unit import Unit
from hpczero_kernels.cpu import Pool
from hpczero_kernels.reduce import sum_pieces


class Sum(Protocol):
    """A sum in flight; it is in the unit's `reduced_shard` when `poll` is True, or after `wait`."""

    def poll(self) -> bool: ...

    def wait(self) -> None: ...


class PlainSum:
    """The sum by an all_reduce in the weights' precision."""

    def __init__(self, unit: Unit, replicas: Group) -> None:
        self._unit = unit
        self._work = replicas.start_all_reduce(unit.narrow_shard())

    def poll(self) -> bool:
        if self._work.poll():
            self._unit.widen_shard()
        return self._work.done

    def wait(self) -> None:
        self._work.wait()
        self._unit.widen_shard()


class ReplicaSums:
    """The sums of a step. `make` starts one; None: there are no replicas.

    `differ` tells whether gradients of replicas are to differ from now on. `begun`: the units whose
    sums have begun, until `finish`; `in_flight`: those of them whose sums are still to be waited
    for, or polled.
    """

    def __init__(
        self, replicas: Replicas | None, pool: Pool, on_summed: Callable[[Unit], None]
    ) -> None:
        """`on_summed` is told of each unit that has its sum, at once where there is nothing to add.

        That is where there are no replicas, or they are to differ.
        """
        self.make: Callable[[Unit], Sum] | None = None
        if replicas:
            self.make = lambda unit: PlainSum(unit, replicas.group)
        self.differ: Callable[[], bool] = lambda: False
        self.begun: set[Unit] = set()
        self._pool = pool
        self._on_summed = on_summed
        self.in_flight: dict[Unit, Sum] = {}  # oldest first

    @property
    def are_summed(self) -> bool:
        return self.make is not None and not self.differ()

    def start(self, unit: Unit) -> None:
        """Start the sum of the unit's shard, which has the sum of this replica's ranks."""
        if not self.are_summed:
            self._on_summed(unit)
            return
        assert self.make
        self.begun.add(unit)
        self.in_flight[unit] = self.make(unit)

    def poll(self) -> None:
        """Move on what can move on."""
        while self.in_flight:
            unit, work = next(iter(self.in_flight.items()))
            if not work.poll():
                return
            self._end(unit)

    def finish(self, units: Sequence[Unit]) -> None:
        """Bring all sums to their end, those of these units included, begun or not."""
        for unit in units if self.are_summed else ():
            if unit not in self.begun:
                self.start(unit)
        for unit, work in list(self.in_flight.items()):
            work.wait()
            self._end(unit)
        self.begun.clear()

    def _end(self, unit: Unit) -> None:
        del self.in_flight[unit]
        shard = unit.reduced_shard
        sum_pieces([shard], shard, False, unit.squares, self._pool)
        self._on_summed(unit)
