"""An optimizer of PyTorch on the owned elements of each unit.

Every parameter of which this rank owns elements is there a parameter and a group of its own: a view
of the master weights in a row. A step goes unit by unit: the summed gradient is widened to fp32,
unscaled and clipped in memory that all units use in turn; the optimizer steps the parameters that
have one; what it keeps of each element is moved to where a checkpoint finds it (`states`), if it
has made a tensor of its own. Numbers that it keeps of a parameter, such as its count of steps, are
the same on all ranks that own elements, so `facts` takes those of the first one.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import nan
from typing import Any

import torch
from torch import Tensor, nn

from hpczero.optim.elementwise import Group, Kept
from hpczero.parallel.zero.data_axis import AbsentGradients
from hpczero.parallel.zero.unit import Unit
from hpczero.parallel.zero.update import Step, Update, take_zeros
from hpczero.parallel.zero.weights import Weights


@dataclass(frozen=True, eq=False)
class _Part:
    """The owned elements of a parameter, and their views of the unit's states."""

    name: str
    index: int  # in the unit
    elements: slice  # of the owned ones
    parameter: nn.Parameter
    views: Mapping[str, Tensor]
    kept: Kept

    def state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Return what the optimizer keeps of the parameter: {} before its first gradient."""
        state: dict[str, Any] = optimizer.state.get(self.parameter, {})
        return state

    def keep(self, optimizer: torch.optim.Optimizer) -> None:
        """Move tensors that the optimizer has made to where they are kept."""
        state = self.state(optimizer)
        for name, view in self.views.items():
            made = state.get(name)
            if made is not None and made is not view:
                view.copy_(made)
                state[name] = view

    def found(self, state: Mapping[str, Any], group: Group) -> dict[str, float]:
        """Return its numbers, and 1 for each tensor, by name."""
        values = {name: state[name] for name in self.kept.numbers if name in state}
        values |= {name: group[name] for name in self.kept.of_group}
        values |= {name: 1.0 for name in self.views if state.get(name) is not None}
        return {name: float(value) for name, value in values.items() if value is not None}

    def restored(self, found: Mapping[str, Any]) -> dict[str, Any]:
        """Return the state of which `found` are the facts."""
        state: dict[str, Any] = {name: view for name, view in self.views.items() if name in found}
        for name, example in self.kept.numbers.items():
            if name in found:
                state[name] = _like(example, found[name])
        return state


def _like(example: Any, value: float) -> Any:
    """Return a number in the form of another one, if there is one."""
    if isinstance(example, Tensor):
        return torch.full_like(example, value, dtype=example.dtype)
    return value if example is None else type(example)(value)


class TorchUpdate(Update):
    """An optimizer of PyTorch; each unit has one, made by the same function."""

    def __init__(self, weights: Weights, absent: AbsentGradients) -> None:
        super().__init__(weights, absent)
        plan = weights.settings.update
        assert plan.optimizer
        self._plan = plan
        self._optimizer = plan.optimizer
        self._groups = [group for group in (weights.axis.group, weights.tensor) if group]
        self._states: dict[Unit, dict[str, Tensor]] = {unit: {} for unit in self.units}
        for name in plan.tensors:
            for unit in self.units:
                self._states[unit][name] = take_zeros(weights.arena, "moments", unit)
        largest = max(unit.master.numel() for unit in self.units)
        self._gradient = weights.arena.take("gradient of a unit", largest, torch.float32)
        self._parts = {unit: list(self._parts_of(unit)) for unit in self.units}
        self._optimizers: dict[Unit, torch.optim.Optimizer] = {}  # of those it owns elements of
        self._step: Step | None = None  # None: it is left out
        self._factor = 1.0  # of its gradients

    def start(self) -> None:
        super().start()
        for unit, parts in self._parts.items():
            if parts:
                self._optimizers[unit] = self._made(parts)

    def _parts_of(self, unit: Unit) -> Iterator[_Part]:
        index_of = {slot.parameter.name: index for index, slot in enumerate(unit.layout.slots)}
        first = unit.owned.start
        for slot, part in unit.layout.spans(first, unit.owned.stop):
            name = slot.parameter.name
            elements = slice(part.start - first, part.stop - first)
            parameter = nn.Parameter(unit.master[elements])
            kept = self._plan.kept[name]
            views = {state: self._states[unit][state][elements] for state in kept.tensors}
            yield _Part(name, index_of[name], elements, parameter, views, kept)

    def _made(self, parts: Sequence[_Part]) -> torch.optim.Optimizer:
        """Make the optimizer of a unit of which this rank owns these parts."""
        options = self._plan.options
        groups = [{"params": [part.parameter], **options.get(part.name, {})} for part in parts]
        optimizer = self._optimizer(groups, self.settings.optimizer.lr)
        for part in parts:
            part.keep(optimizer)
        return optimizer

    def reads_on_host(self) -> bool:
        return True

    def begin(self, step: Step) -> None:
        norm, _ = step.read_norms()
        self._step = step if 0 <= norm < float("inf") else None
        clip = self.settings.train.grad_clip
        self._factor = (min(1.0, clip / (norm + 1e-6)) if clip else 1.0) / step.scale

    def step(self, unit: Unit) -> None:
        if self._step is None or unit not in self._optimizers:
            return
        optimizer, parts = self._optimizers[unit], self._parts[unit]
        gradient = self._gradient[: unit.master.numel()]
        gradient.copy_(unit.gradient_to_step).mul_(self._factor)
        absent = self.absent.of(unit)
        for part, group in zip(parts, optimizer.param_groups, strict=True):
            group["lr"] = self.rate(self._step, part.name)
            if part.index not in absent:
                part.parameter.grad = gradient[part.elements]
        optimizer.step()
        for part in parts:
            part.parameter.grad = None
            part.keep(optimizer)
        unit.weights_from_master()

    def states(self, unit: Unit) -> dict[str, Tensor]:
        return self._states[unit] | super().states(unit)

    def facts(self) -> dict[str, Any]:
        """Return what each parameter has: numbers, and True for each tensor in `states`.

        Parameters that have had no gradient may have nothing.
        """
        names = [slot.parameter.name for unit in self.units for slot in unit.layout.slots]
        row_of = {name: row for row, name in enumerate(names)}
        known = self._plan.known
        table = torch.full((len(names), 1 + len(known)), nan, dtype=torch.float64)
        for part, state, group in self._all_parts():
            found = part.found(state, group)
            if found:
                row = [1.0, *(found.get(name, nan) for name in known)]
                table[row_of[part.name]] = torch.tensor(row, dtype=torch.float64)
        for group_of_ranks in self._groups:
            table = _first_known(group_of_ranks.stack(table))
        kept = {}
        for name, (has, *row) in zip(names, table.tolist(), strict=True):
            if has == 1:
                values = dict(zip(known, row, strict=True))
                kept[name] = {
                    key: True if key in self._plan.tensors else value
                    for key, value in values.items()
                    if value == value
                }
        return {"optimizer": self._optimizer.name, "kept": kept}

    def restore(self, facts: Mapping[str, Any]) -> None:
        self.refuse_others({self._optimizer.name}, facts["optimizer"])
        for unit, optimizer in self._optimizers.items():
            for part, group in zip(self._parts[unit], optimizer.param_groups, strict=True):
                optimizer.state.pop(part.parameter, None)
                found = facts["kept"].get(part.name, {})
                if state := part.restored(found):
                    optimizer.state[part.parameter] = state
                for name in part.kept.of_group:
                    group[name] = _like(group[name], found.get(name, group[name]))

    def _all_parts(self) -> Iterator[tuple[_Part, dict[str, Any], Group]]:
        """Yield every part with its state and its group."""
        for unit, optimizer in self._optimizers.items():
            for part, group in zip(self._parts[unit], optimizer.param_groups, strict=True):
                yield part, part.state(optimizer), group


def _first_known(tables: Tensor) -> Tensor:
    """Return of [ranks, parameters, 1 + facts] each parameter's row from a rank that has one."""
    first = tables[..., 0].nan_to_num(0.0).argmax(0)
    return tables[first, torch.arange(len(first), dtype=torch.int64)]
