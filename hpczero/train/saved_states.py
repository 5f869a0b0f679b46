"""The states of an engine as a checkpoint has them: slots, each with a number for each element.

Common states are the same on all replicas: each unit's are saved by one of them. States that
replicas have of their own are slots `replica_K/NAME`. Of dealt states each replica has a part; a
checkpoint has them whole. Both come, before a save, to the rank that saves their unit.
"""

from collections.abc import Iterator
from itertools import chain

import torch
from torch import Tensor

from hpczero.checkpoint.piece_table import RankShard, stored_by_others
from hpczero.checkpoint.shard_file import SLOTS
from hpczero.parallel.zero.engine import Engine
from hpczero.parallel.zero.unit import Unit

KEPT = "optimizer/"
OF_REPLICA = "replica_"


def slot_of_replica(number: int, name: str) -> str:
    return f"{OF_REPLICA}{number}/{name}"


def common_states(engine: Engine, unit: Unit) -> dict[str, Tensor]:
    """Return slot -> the states of the owned elements that all replicas have in common."""
    kept = engine.update.states(unit).items()
    weights = engine.update.common_weights(unit)
    return {SLOTS[0]: weights} | {KEPT + name: state for name, state in kept}


def saved_elements(engine: Engine) -> int:
    """Return the numbers that this rank saves, where replicas share them evenly."""
    unit = engine.units[0]
    replicas = engine.axis.replicas.count if engine.axis.replicas else 1
    shared = len(common_states(engine, unit)) + len(engine.update.dealt_states(unit))
    own = len(engine.update.own_states(unit))
    return engine.owned_elements * (shared + replicas * own) // replicas


class SavedStates:
    """`slots`: their names. `here`: what this rank saves, its units and its shards of them."""

    def __init__(self, engine: Engine) -> None:
        """Take the memory for what comes from other replicas."""
        self._engine = engine
        self._replicas = engine.axis.replicas
        layouts = [unit.layout for unit in engine.units]
        elsewhere = {unit.layout.name for unit in engine.counted_elsewhere}
        self._storing: dict[Unit, int] = {}
        if replicas := self._replicas:
            elsewhere |= stored_by_others(layouts, replicas.count, replicas.number)
            for number in range(replicas.count):
                others = stored_by_others(layouts, replicas.count, number)
                stored = (unit for unit in engine.units if unit.layout.name not in others)
                self._storing |= dict.fromkeys(stored, number)
        self.here = RankShard(
            layouts, engine.axis.rank, engine.tensor.rank if engine.tensor else 0, elsewhere
        )
        self._collected = {unit: self._empty(unit) for unit in engine.units}
        slots = [common_states(engine, engine.units[0]), self._collected[engine.units[0]]]
        self.slots = tuple(chain(*slots))

    def _empty(self, unit: Unit) -> dict[str, Tensor]:
        """Return slot -> memory on the host, of no elements where another rank saves the unit."""
        if self._replicas is None:
            return {}
        is_here = unit.layout.name not in self.here.stored_elsewhere
        count = unit.shard.stop - unit.shard.start if is_here else 0
        dealt = [KEPT + name for name in self._engine.update.dealt_states(unit)]
        own = [
            slot_of_replica(number, name)
            for number in range(self._replicas.count)
            for name in self._engine.update.own_states(unit)
        ]
        return {slot: torch.zeros(count, dtype=torch.float32) for slot in (*dealt, *own)}

    @property
    def size(self) -> int:
        """Bytes of the memory for what comes from other replicas."""
        of_units = (state for states in self._collected.values() for state in states.values())
        return sum(state.nbytes for state in of_units)

    def of(self, unit: Unit) -> dict[str, Tensor]:
        """Return slot -> states of a unit that this rank saves."""
        return common_states(self._engine, unit) | self._collected[unit]

    def collect(self) -> None:
        """Bring the states of all replicas to the ranks that save them. Collective."""
        if self._replicas is None:
            return
        for unit in self._engine.units:
            if unit in self._engine.counted_elsewhere:
                continue
            for name, state in self._engine.update.dealt_states(unit).items():
                numbers = range(self._replicas.count)
                parts = [self._engine.update.dealt_part(unit, number) for number in numbers]
                self._to_storing(unit, state, [(KEPT + name, part) for part in parts])
            for name, state in self._engine.update.own_states(unit).items():
                numbers = range(self._replicas.count)
                whole = slice(0, state.numel())
                self._to_storing(
                    unit, state, [(slot_of_replica(number, name), whole) for number in numbers]
                )

    def _to_storing(self, unit: Unit, state: Tensor, places: list[tuple[str, slice]]) -> None:
        """Send this rank's state; place `number` of the places is where that replica's goes."""
        assert self._replicas
        storing = self._storing[unit]
        none = state.new_empty(0)
        inputs = [none] * self._replicas.count
        inputs[storing] = state
        outputs = [none] * self._replicas.count
        if storing == self._replicas.number:
            outputs = [state.new_empty(part.stop - part.start) for _, part in places]
        # sums of gradients may be under way in the other group, more on some ranks than on others
        self._replicas.averages.all_to_all(outputs, inputs)
        if storing == self._replicas.number:
            for (slot, part), arrived in zip(places, outputs, strict=True):
                self._collected[unit][slot][part] = arrived.cpu()


def replicas_in(slots: tuple[str, ...] | list[str], name: str) -> Iterator[str]:
    """Yield the slots that hold what each replica had of its own under this name."""
    for slot in slots:
        of_replica, _, own_name = slot.partition("/")
        if of_replica.startswith(OF_REPLICA) and own_name == name:
            yield slot
