"""The states of an engine are read from a checkpoint, whatever replicas or optimizer wrote it.

A common state may be there under its own name; or each replica had one of its own, and their mean
is taken. A state that each replica has of its own is that of the replica of its number, if there
were as many; else the mean of theirs, or what all had in common. So other replicas go on with the
mean of the weights of those that trained apart. What is nowhere begins with zeros, and a note says
so, unless it is the optimizer's own: then it is another optimizer.
"""

from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from hpczero.checkpoint.load import Checkpoint, Run, Wanted
from hpczero.checkpoint.shard_file import SLOTS
from hpczero.errors import InputError
from hpczero.parallel.replicas.local_steps import APART, JOINED
from hpczero.parallel.zero.engine import Engine
from hpczero.parallel.zero.kernel_update import KernelUpdate
from hpczero.parallel.zero.muon_update import MuonUpdate
from hpczero.parallel.zero.unit import Unit
from hpczero.text import first_few, join_words, printable
from hpczero.train.saved_states import KEPT, common_states, replicas_in, slot_of_replica

AVERAGE = "optimizer/average"  # the slot of a moving average of the weights

# may begin with zeros; errors are of steps, or of weights, which have other sizes
_OF_REPLICAS = {"error", "served_error", "outer_error", "served_outer_error", "outer_momentum"}

StatesOf = Callable[[Unit], dict[str, Tensor]]

_JOINED = "its {} replicas trained apart, and the mean of their weights goes on"


def restore_states(engine: Engine, checkpoint: Checkpoint, only_weights: bool) -> list[str]:
    """Read this rank's elements into the engine's states; return notes on what is not there."""
    return _Reader(engine, checkpoint).read(only_weights)


class _Reader:
    def __init__(self, engine: Engine, checkpoint: Checkpoint) -> None:
        self._engine = engine
        self._update = engine.update
        self._checkpoint = checkpoint
        self._number = {name: number for number, name in enumerate(checkpoint.slots)}
        self._runs: dict[Unit, list[Run]] = {
            unit: checkpoint.runs(_wanted(unit)) for unit in engine.units
        }
        self._notes: list[str] = []

    def read(self, only_weights: bool) -> list[str]:
        engine, update = self._engine, self._update
        if not only_weights:
            self._refuse_another_optimizer()
        apart = list(replicas_in([*self._number], "weights"))
        goes_on = update.trains_apart and self._are_as_many
        joins = bool(apart) and not goes_on and not only_weights
        self._into(update.common_weights, apart if joins else [SLOTS[0]])
        for unit in engine.units:
            if update.common_weights(unit) is not unit.master:
                unit.master.copy_(update.common_weights(unit))
        if only_weights:
            return []
        if joins and self._were_apart:
            self._notes.append(f"{self._checkpoint.folder}: {_JOINED.format(len(apart))}")
        first = engine.units[0]
        for slot in list(common_states(engine, first))[1:]:
            name = slot.removeprefix(KEPT)
            there = self._common(name)
            if there or slot != AVERAGE:
                self._into(_named(update.states, name), there, name)
        for name in update.dealt_states(first):
            self._into_parts(name)
        for name in update.own_states(first):
            there = self._own(name)
            if there or name != "weights":
                self._into(_named(update.own_states, name), there, name)
        update.take_numbers(self._numbers(), self._checkpoint.content.state.updates)
        return self._notes

    def _numbers(self) -> dict[str, float]:
        """Return the update's numbers; what replicas joined last is unknown if these are others."""
        numbers = dict(self._checkpoint.content.state.update)
        if self._update.trains_apart and not self._are_as_many:
            numbers.pop(JOINED, None)
        return numbers

    @property
    def _were_apart(self) -> bool:
        """True if replicas had weights of their own."""
        numbers = self._checkpoint.content.state.update
        return bool(numbers.get(APART, 1)) and bool([*replicas_in([*self._number], "weights")])

    @property
    def _are_as_many(self) -> bool:
        """True if each replica here may go on with what the one of its number had.

        There were as many, and they do not begin to sum gradients again, with different weights.
        """
        begin = self._engine.settings.optimizer.outer.begin
        if self._were_apart and self._checkpoint.content.state.updates < begin:
            return False
        replicas = self._engine.axis.replicas
        names = {slot.partition("/")[0] for slot in self._number if not slot.startswith(KEPT)}
        return bool(replicas) and len(names - {SLOTS[0]}) == (replicas.count if replicas else 0)

    def _refuse_another_optimizer(self) -> None:
        """Raise InputError if a state that is needed is nowhere, or one that is there unknown.

        A moving average may be there or not: it begins with the weights, or ends.
        """
        update, first = self._update, self._engine.units[0]
        table = self._checkpoint.content.spec.get("optimizer")
        there_by = str(table.get("name", "adamw")) if isinstance(table, dict) else "adamw"
        if isinstance(update, KernelUpdate) and there_by not in update.continues:
            known = join_words(sorted(update.continues), "or")
            raise InputError(
                f"{self._checkpoint.folder} has the states of another optimizer "
                f"({printable(there_by, 40)}, and {update.name} goes on with those of {known}): "
                "take that one, or begin another run with these weights alone (weights_only)"
            )
        if isinstance(update, MuonUpdate) and there_by == update.name and isinstance(table, dict):
            self._refuse_leavers(update, table.get("not_muon"))
        here = {slot.removeprefix(KEPT) for slot in common_states(self._engine, first)}
        here |= update.own_states(first).keys() | update.dealt_states(first).keys()
        there = {slot.rpartition("/")[2] for slot in self._number}
        own = {SLOTS[0], "weights", AVERAGE.removeprefix(KEPT), *_OF_REPLICAS}
        if lost := (there & _OF_REPLICAS) - here:
            self._notes.append(
                f"{self._checkpoint.folder}: what replicas had besides is dropped: {_shown(lost)}"
            )
        if (here ^ there) - own:
            raise InputError(
                f"{self._checkpoint.folder} has the states of another optimizer "
                f"({_shown(there - own)}; here {_shown(here - own)}): take that one, or begin "
                "another run with these weights alone (weights_only)"
            )

    def _refuse_leavers(self, update: MuonUpdate, patterns: Any) -> None:
        """Raise InputError if Muon is to leave matrices to AdamW, whose second moments are 0."""
        if not isinstance(patterns, list) or not all(isinstance(one, str) for one in patterns):
            return
        before = self._engine.settings.optimizer.model_copy(update={"not_muon": tuple(patterns)})
        if left := update.left_by(before):
            raise InputError(
                f"optimizer.not_muon names matrices that {self._checkpoint.folder} has by Muon, "
                f"without the second moments that AdamW needs ({first_few(left)}): leave them out, "
                "or begin another run with these weights alone (weights_only)"
            )

    def _common(self, name: str) -> list[str]:
        """Return the slots of which a common state is the mean."""
        slot = KEPT + name
        return [slot] if slot in self._number else list(replicas_in([*self._number], name))

    def _own(self, name: str) -> list[str]:
        """Return the slots of which a state of this replica is the mean."""
        replicas = self._engine.axis.replicas
        assert replicas
        own = slot_of_replica(replicas.number, name)
        if self._are_as_many and own in self._number:
            return [own]
        if name == "weights":
            return []  # the common ones
        return list(replicas_in([*self._number], name)) or self._common(name)

    def _into(
        self, state_of: Callable[[Unit], Tensor], slots: Sequence[str], name: str = ""
    ) -> None:
        """Set each unit's state to the mean of slots; to zeros if there are none."""
        if not slots:
            self._begins_anew(name)
        for unit in self._engine.units:
            state = state_of(unit)
            if not slots:
                state.zero_()
                continue
            state.copy_(self._read(unit, slots[0]))
            for slot in slots[1:]:
                state.add_(self._read(unit, slot).to(state.device))
            if len(slots) > 1:
                state.div_(len(slots))

    def _into_parts(self, name: str) -> None:
        """Set this replica's parts of dealt states."""
        replicas = self._engine.axis.replicas
        assert replicas
        slot = KEPT + name
        if slot not in self._number:
            self._begins_anew(name)
        for unit in self._engine.units:
            state = self._update.dealt_states(unit)[name]
            if slot in self._number:
                part = self._update.dealt_part(unit, replicas.number)
                state.copy_(self._read(unit, slot)[part])
            else:
                state.zero_()

    def _begins_anew(self, name: str) -> None:
        self._notes.append(
            f"{self._checkpoint.folder} has no {name.replace('_', ' ')} of replicas like these: it "
            "begins with zeros"
        )

    def _read(self, unit: Unit, slot: str) -> Tensor:
        """Return the owned elements of a slot."""
        values = torch.empty(unit.master.numel(), dtype=torch.float32)
        values.zero_()  # the padding, which no checkpoint has
        self._checkpoint.read_runs(self._number[slot], self._runs[unit], values.numpy())
        return values


def _named(states_of: StatesOf, name: str) -> Callable[[Unit], Tensor]:
    return lambda unit: states_of(unit)[name]


def _shown(names: set[str]) -> str:
    return first_few(sorted(names)) or "none"


def _wanted(unit: Unit) -> Iterator[Wanted]:
    """Yield the rectangles of tensors that the elements of this rank are, one after the other."""
    for slot, span in unit.layout.spans(unit.owned.start, unit.owned.stop):
        at = span.start - unit.owned.start
        for box in slot.rectangles(span.start, span.stop):
            yield at, slot.parameter.name, box
            at += prod(cut.stop - cut.start for cut in box)
