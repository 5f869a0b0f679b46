"""Values of whole parameters, cut over many ranks: to save, to load, and to begin with.

Initial values: rank 0's are everyone's, unit by unit. What is on meta on rank 0 is made by the
modules themselves (`reset_parameters`), equal on every rank: a module's random numbers depend on
the seed and its name. A rank has one unit at a time as a whole, besides what it was given.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import nn

from hpczero.comm.group import Group
from hpczero.errors import InputError
from hpczero.model import shapes
from hpczero.parallel.layout import UnitLayout
from hpczero.parallel.zero.data_axis import DataAxis
from hpczero.parallel.zero.unit import Fill, Unit
from hpczero.text import first_few
from hpczero_kernels.random import key_of

_SEEDS = 1 << 63


def state_dict(module: nn.Module, units: Sequence[Unit], axis: DataAxis) -> dict[str, torch.Tensor]:
    masters: dict[torch.Tensor, torch.Tensor] = {}
    for unit in units:
        flat = _on_first_rank(unit, axis.group)
        if flat is not None:
            for own, place in zip(unit.parameters, unit.layout.slots, strict=True):
                masters[own] = unit.part(flat, place).clone().cpu()
    if axis.rank:
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
        group.send(unit.master.cpu(), 0)
        return None
    flat = torch.empty(unit.layout.size, dtype=torch.float32)
    flat[unit.shard].copy_(unit.master)
    for rank in range(1, group.size):
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


# Initial values.
def reset_of(module: nn.Module) -> Callable[[], None] | None:
    """What gives a module its initial values, by PyTorch's convention, from which some of its own differ."""
    reset = getattr(
        module,
        "_reset_parameters"
        if isinstance(module, nn.MultiheadAttention | nn.Transformer)
        else "reset_parameters",
        None,
    )
    return reset if callable(reset) else None


def no_values(_: UnitLayout) -> Fill:
    """For units that are loaded before they are read."""
    return lambda parameter, first, out: None


class OwnValues:
    """Made before the engine takes the module; then asked once for each unit, in one order on all ranks."""

    def __init__(
        self,
        module: nn.Module,
        seed: int,
        group: Group,
        elsewhere: Collection[nn.Module] = (),
        tied: Mapping[str, Group] | None = None,
    ) -> None:
        """`elsewhere`: modules that other stages have. `tied`: parameters that other stages have too, and the group of these; each is a unit, so
        that all of them ask for the same.
        """
        self._module, self._seed, self._group, self._tied = module, seed, group, tied or {}
        self._parts = {part: name for name, part in module.named_modules() if part not in elsewhere}
        here = {own for part in self._parts for own in part.parameters(recurse=False)}
        self._given = {name: own.data for name, own in module.named_parameters() if own in here}
        self._own = frozenset(self._given)
        self._names = {part: name for name, part in module.named_modules()}
        on_meta = torch.tensor(
            [tensor.is_meta for tensor in [*self._given.values(), *self._buffers().values()]],
            dtype=torch.uint8,
        )
        group.broadcast(on_meta)
        self._on_meta = {
            name for name, meta in zip(self._given, on_meta.tolist(), strict=False) if meta
        }
        for name, stages in self._tied.items():
            on_meta_here = torch.tensor(name in self._on_meta, dtype=torch.bool)
            if len(set(stages.stack(on_meta_here).tolist())) > 1:
                raise InputError(
                    f"{name} is on meta on some of the pipeline stages that have it, and has values on others: build it alike on them"
                )
            if name not in self._on_meta and group.rank == 0:
                self._given[name] = self._given[name].contiguous()
                stages.broadcast(self._given[name])
        self._make_buffers(on_meta[len(self._given) :].tolist())

    def __call__(self, layout: UnitLayout) -> Fill:
        names = [place.parameter.name for place in layout.slots]
        values = {name: self._given.pop(name) for name in names}
        missing = self._on_meta & values.keys()
        if missing:
            values |= self._made(missing)
        if missing != values.keys():
            return from_first_rank(layout, values, self._group)

        def fill(parameter: shapes.Parameter, first: int, out: torch.Tensor) -> None:
            out.copy_(values[parameter.name].view(-1)[first : first + out.numel()])

        return fill

    def share_rest(self, ours: Collection[str], dtype: torch.dtype) -> None:
        """What stays with the module becomes rank 0's: buffers, and parameters that are not `ours`. Normalisation over batches computes in one
        precision: that of its weights.
        """
        for part in self._parts:
            for buffer in part.buffers(recurse=False):
                if isinstance(part, nn.modules.batchnorm._NormBase) and buffer.is_floating_point():
                    buffer.data = buffer.to(dtype)
        for name, parameter in self._module.named_parameters():
            if name in self._own and name not in ours:
                if parameter.is_meta:
                    raise InputError(
                        f"{name} is {parameter.dtype} and on meta: hpczero does not know its values; build the module with them"
                    )
                from_rank_0(parameter, self._group)
        buffers = self._buffers()
        _refuse_unknown(
            [name for name in sorted(self._unknown_buffers) if buffers[name].isnan().any()]
        )
        for buffer in buffers.values():
            from_rank_0(buffer, self._group)

    def _made(self, wanted: Collection[str]) -> dict[str, torch.Tensor]:
        """The values that modules give to these parameters, parts before what they are parts of. NaN shows what nobody has given a value."""
        names = {own: name for name, own in self._module.named_parameters()}
        inside = [
            part
            for part in reversed(list(self._module.modules()))
            if self._is_made_now(part, names, wanted)
        ]
        with _parameters_of_their_own(inside, names) as made:
            for part in inside:
                self._reset(part)
        _refuse_unknown(
            [name for name in sorted(wanted) if name not in made or made[name].isnan().any()]
        )
        return {name: made[name] for name in wanted}

    def _is_made_now(
        self, part: nn.Module, names: Mapping[nn.Parameter, str], wanted: Collection[str]
    ) -> bool:
        """It works with parameters that are wanted, and with none that comes later; what is tied all stages make alike, whatever comes there."""
        used = {names[own] for own in part.parameters()}
        now = self._tied.keys() >= set(wanted) or used.isdisjoint(self._given)
        return bool(reset_of(part)) and not used.isdisjoint(wanted) and now

    def _reset(self, part: nn.Module) -> None:
        reset = reset_of(part)
        assert reset is not None
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(key_of(self._seed, "initial", self._names[part]) % _SEEDS)
            reset()

    def _buffers(self) -> dict[str, torch.Tensor]:
        """A buffer that several parts have is found once."""
        found: dict[torch.Tensor, str] = {}
        for part, name in self._parts.items():
            for own, buffer in part.named_buffers(recurse=False):
                found.setdefault(buffer, f"{name}.{own}" if name else own)
        return {name: buffer for buffer, name in found.items()}

    def _make_buffers(self, on_meta: Sequence[int]) -> None:
        """Real ones in place of those on meta. Modules without parameters give theirs their values here, the others with their parameters."""
        self._unknown_buffers = {
            name for name, meta in zip(self._buffers(), on_meta, strict=True) if meta
        }
        for name, buffer in self._buffers().items():
            if buffer.is_meta:
                owner, _, own_name = name.rpartition(".")
                real = torch.full(
                    buffer.shape,
                    float("nan") if buffer.is_floating_point() else 0,
                    dtype=buffer.dtype,
                    device="cpu",
                )
                setattr(self._module.get_submodule(owner), own_name, real)
        for part in self._parts:
            if (
                reset_of(part)
                and not any(True for _ in part.parameters())
                and self._unknown_buffers
            ):
                self._reset(part)


@contextmanager
def _parameters_of_their_own(
    parts: Sequence[nn.Module], names: Mapping[nn.Parameter, str]
) -> Iterator[dict[str, torch.Tensor]]:
    """The parts work with these tensors inside, which hold NaN at first, in place of the module's parameters."""
    places = {
        (part, name): own
        for whole in parts
        for part in whole.modules()
        for name, own in part.named_parameters("", False, False)
    }
    unknown = partial(torch.full, fill_value=float("nan"), dtype=torch.float32, device="cpu")
    made = {own: nn.Parameter(unknown(own.shape)) for own in dict.fromkeys(places.values())}
    for (part, name), own in places.items():
        setattr(part, name, made[own])
    try:
        yield {names[own]: parameter.data for own, parameter in made.items()}
    finally:
        for (part, name), own in places.items():
            setattr(part, name, own)


def _refuse_unknown(names: Sequence[str]) -> None:
    if names:
        way_out = "give the modules that hold them a reset_parameters(), or build the module with its values (not on meta)"
        raise InputError(
            f"on meta, and no reset_parameters() gives a value to {first_few(names)}: {way_out}"
        )
