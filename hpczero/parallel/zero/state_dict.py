"""Whole parameters of a model whose parts lie on many ranks: to be read, to be changed, to be taken home (all collective)."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn

from hpczero.comm.group import Group
from hpczero.errors import InputError
from hpczero.model import shapes
from hpczero.parallel.layout import UnitLayout
from hpczero.parallel.zero.data_axis import DataAxis
from hpczero.parallel.zero.unit import Fill, Unit
from hpczero.text import first_few


def state_dict(module: nn.Module, units: Sequence[Unit], axis: DataAxis) -> dict[str, torch.Tensor]:
    masters: dict[torch.Tensor, torch.Tensor] = {}
    for unit in units:
        flat = _on_first_rank(unit, axis.group)
        if flat is not None:
            for own, place in zip(unit.parameters, unit.layout.slots, strict=True):
                masters[own] = unit.part(flat, place).clone().cpu()
    if axis.group.rank:
        return {}
    tensors = module.state_dict(keep_vars=True).items()
    return {
        name: masters[tensor] if tensor in masters else tensor.detach().clone().cpu()
        for name, tensor in tensors
    }


def from_state_dict(
    module: nn.Module, names: Sequence[str], state: Mapping[str, torch.Tensor], group: Group
) -> Callable[[UnitLayout], Fill]:
    """The parameters' values, for the engine to take; the buffers have theirs already."""
    expected = module.state_dict(keep_vars=True)
    refuse_other_names(expected, state, group)
    ours = set(names)
    parameters = {tensor: name for name, tensor in module.named_parameters()}
    for name, tensor in expected.items():
        if parameters.get(tensor) not in ours:
            with torch.no_grad():
                tensor.copy_(state[name] if group.rank == 0 else tensor)
            from_rank_0(tensor, group)
    return lambda layout: from_first_rank(layout, state, group)


def from_first_rank(layout: UnitLayout, values: Mapping[str, torch.Tensor], group: Group) -> Fill:
    """The unit's values as data rank 0 has them, on every rank; whole for as long as they are filled in."""
    flat = torch.zeros(layout.size, dtype=torch.float32)
    first_of = {place.parameter.name: place.offset for place in layout.slots}
    if group.rank == 0:
        for place in layout.slots:
            flat[place.offset : place.stop].view(place.shape).copy_(values[place.parameter.name])
    group.broadcast(flat)

    def fill(parameter: shapes.Parameter, first: int, out: torch.Tensor) -> None:
        begin = first_of[parameter.name] + first
        out.copy_(flat[begin : begin + out.numel()])

    return fill


def from_rank_0(tensor: torch.Tensor, group: Group) -> None:
    """Rank 0's values, whatever their type."""
    if tensor.numel():
        values = tensor.detach().clone().contiguous().view(-1).view(torch.uint8)
        group.broadcast(values)
        with torch.no_grad():
            tensor.copy_(values.view(tensor.dtype).view(tensor.shape))


def _on_first_rank(unit: Unit, group: Group) -> torch.Tensor | None:
    """The unit's master weights, on data rank 0."""
    if unit.master.numel() == unit.layout.size:
        return unit.master if group.rank == 0 else None
    if group.rank:
        if group.rank < unit.layout.shards:  # others have copies of these shards
            group.send(unit.master.cpu(), 0)
        return None
    flat = torch.empty(unit.layout.size, dtype=torch.float32)
    flat[unit.shard].copy_(unit.master)
    for rank in range(1, unit.layout.shards):
        group.receive(flat[unit.layout.shard(rank)], rank)
    return flat


def refuse_other_names(
    expected: Mapping[str, torch.Tensor], state: Mapping[str, torch.Tensor], group: Group
) -> None:
    problems = _problems(expected, state) if group.rank == 0 else []
    found = torch.tensor([len(problems)], dtype=torch.int64)
    group.broadcast(found)
    if int(found):
        what = first_few(problems, "; ") if group.rank == 0 else "rank 0 says more"
        raise InputError(f"these are not the module's parameters and buffers: {what}")


def _problems(expected: Mapping[str, torch.Tensor], state: Mapping[str, torch.Tensor]) -> list[str]:
    problems = [f"{name} is missing" for name in expected if name not in state] + [
        f"{name} is unknown" for name in state if name not in expected
    ]
    problems += [
        f"{name} has shape {list(state[name].shape)}, not {list(tensor.shape)}"
        for name, tensor in expected.items()
        if name in state and state[name].shape != tensor.shape
    ]
    return problems
