"""Values of whole parameters, cut over many ranks: to save, to load, and to begin with.

What rank 0 holds is everyone's, unit by unit; a rank has one unit at a time as a whole, besides
what it was given. Initial values on meta are made by the modules themselves (`reset_parameters`),
equal on every rank: a module's random numbers depend on the seed and its name.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import accumulate

import torch
from torch import nn

from hpczero.comm.group import Group
from hpczero.errors import InputError
from hpczero.model import shapes
from hpczero.parallel.layout import ParameterSlot, UnitLayout, tensor_part
from hpczero.parallel.offload.state_file import StateFile
from hpczero.parallel.zero.data_axis import DataAxis
from hpczero.parallel.zero.unit import Fill, Unit
from hpczero.text import first_few
from hpczero_kernels.random import key_of

_SEEDS = 1 << 63


def state_dict(
    module: nn.Module,
    units: Sequence[Unit],
    axis: DataAxis,
    weights_of: Callable[[Unit], torch.Tensor],
    tensor: Group | None = None,
    file: StateFile | None = None,
) -> dict[str, torch.Tensor]:
    """Return the module's state_dict, the parameters in fp32, on the first rank; {} elsewhere.

    `weights_of` returns the weights of the owned elements in fp32, which `file` may have; `tensor`:
    ranks that share the parameters. Collective.
    """
    masters: dict[torch.Tensor, torch.Tensor] = {}
    for unit in units:
        flat = _weights_on_rank_0(unit, weights_of(unit), axis.group, file)
        if flat is not None:
            for parameter, slot in zip(unit.parameters, unit.layout.slots, strict=True):
                own = unit.part(flat, slot).clone().cpu()
                is_cut = tensor and slot.is_split
                masters[parameter] = _joined(own, slot, tensor) if tensor and is_cut else own
    if axis.group.rank or (tensor and tensor.rank):
        return {}
    tensors = module.state_dict(keep_vars=True).items()
    return {
        name: masters[tensor] if tensor in masters else tensor.detach().clone().cpu()
        for name, tensor in tensors
    }


def _joined(own: torch.Tensor, slot: ParameterSlot, tensor: Group) -> torch.Tensor:
    """Return a whole parameter on the first of the tensor ranks, each of which has a part."""
    if tensor.rank:
        tensor.send(own, 0)
        return own
    whole = torch.empty(slot.parameter.divided, dtype=own.dtype)
    for rank in range(tensor.size):
        held = tensor_part(slot.parameter, tensor.size, rank)
        part = whole[held]
        if rank:
            received = torch.empty(part.shape, dtype=own.dtype)
            tensor.receive(received, rank)
            part.copy_(received)
        else:
            part.copy_(own.view(part.shape))
    return whole.view(slot.parameter.shape)


def from_state_dict(
    module: nn.Module, units: Sequence[Unit], state: Mapping[str, torch.Tensor], group: Group
) -> Callable[[UnitLayout], Fill]:
    """Load the buffers; return the values of the units' parameters, for the engine. Collective.

    `state` is that of the group's first rank.
    """
    expected = module.state_dict(keep_vars=True)
    ours = {
        parameter: slot.parameter.shape
        for unit in units
        for parameter, slot in zip(unit.parameters, unit.layout.slots, strict=True)
    }
    shapes_of = {name: ours.get(tensor, tuple(tensor.shape)) for name, tensor in expected.items()}
    refuse_other_names(shapes_of, state, group)
    for name, tensor in expected.items():
        if tensor not in ours:
            with torch.no_grad():
                tensor.copy_(state[name] if group.rank == 0 else tensor)
            broadcast_tensor(tensor, group)
    return lambda layout: broadcast_unit(layout, state, group)


def broadcast_unit(layout: UnitLayout, values: Mapping[str, torch.Tensor], group: Group) -> Fill:
    """Broadcast whole parameters of a unit from the group's first rank. Collective."""
    parameters = [slot.parameter for slot in layout.slots]
    sizes = [parameter.size for parameter in parameters]
    offset_of = dict(
        zip((one.name for one in parameters), accumulate([0, *sizes[:-1]]), strict=True)
    )
    flat = torch.zeros(sum(sizes), dtype=torch.float32)
    if group.rank == 0:
        for parameter, part in zip(parameters, flat.split(sizes), strict=True):
            part.view(parameter.shape).copy_(values[parameter.name])
    group.broadcast(flat)

    def fill(parameter: shapes.Parameter, first: int, out: torch.Tensor) -> None:
        begin = offset_of[parameter.name] + first
        out.copy_(flat[begin : begin + out.numel()])

    return fill


def broadcast_tensor(tensor: torch.Tensor, group: Group) -> None:
    """Broadcast a tensor of any dtype from rank 0."""
    if tensor.numel():
        values = tensor.detach().clone().contiguous().view(-1).view(torch.uint8)
        group.broadcast(values)
        with torch.no_grad():
            tensor.copy_(values.view(tensor.dtype).view(tensor.shape))


def _weights_on_rank_0(
    unit: Unit, master: torch.Tensor, group: Group, file: StateFile | None
) -> torch.Tensor | None:
    """Return the unit's weights, of which ranks have these, on data rank 0; None elsewhere."""
    is_whole = master.numel() == unit.layout.size
    if group.rank and (is_whole or group.rank >= unit.layout.shards):
        return None  # others have the same
    master = file.copy_of(master) if file and file.holds(master) else master
    if is_whole:
        return master
    if group.rank:
        group.send(master.cpu(), 0)
        return None
    flat = torch.empty(unit.layout.size, dtype=torch.float32)
    flat[unit.shard].copy_(master)
    for rank in range(1, unit.layout.shards):
        group.receive(flat[unit.layout.shard(rank)], rank)
    return flat


def refuse_other_names(
    expected: Mapping[str, tuple[int, ...]], state: Mapping[str, torch.Tensor], group: Group
) -> None:
    """Raise InputError on all ranks unless the first rank's `state` has these names and shapes."""
    problems = _problems(expected, state) if group.rank == 0 else []
    count = torch.tensor([len(problems)], dtype=torch.int64)
    group.broadcast(count)
    if int(count):
        what = first_few(problems, "; ") if group.rank == 0 else "rank 0 says more"
        raise InputError(f"these are not the module's parameters and buffers: {what}")


def _problems(
    expected: Mapping[str, tuple[int, ...]], state: Mapping[str, torch.Tensor]
) -> list[str]:
    problems = [f"{name} is missing" for name in expected if name not in state]
    problems += [f"{name} is unknown" for name in state if name not in expected]
    problems += [
        f"{name} has shape {list(state[name].shape)}, not {list(shape)}"
        for name, shape in expected.items()
        if name in state and state[name].shape != shape
    ]
    return problems


# -- initial values of a module that hpczero has not written


def reset_of(module: nn.Module) -> Callable[[], None] | None:
    """Return the method that gives a module its initial values, by PyTorch's convention."""
    exception = isinstance(module, nn.MultiheadAttention | nn.Transformer)
    reset = getattr(module, "_reset_parameters" if exception else "reset_parameters", None)
    return reset if callable(reset) else None


def no_values(_: UnitLayout) -> Fill:
    """Leave units as they are, when they are loaded before they are read."""
    return lambda parameter, first, out: None


class InitialValues:
    """Initial values of a module, asked for once per unit, in one order on all ranks.

    Made before the engine takes the module.
    """

    def __init__(
        self,
        module: nn.Module,
        seed: int,
        group: Group,
        elsewhere: Collection[nn.Module] = (),
        tied: Mapping[str, Group] | None = None,
    ) -> None:
        """Learn what rank 0 has on meta. Collective.

        `elsewhere`: modules of other stages. `tied`: parameters that other stages have too, and the
        group of these; each is a unit, so that all of them ask for the same.
        """
        self._module = module
        self._seed = seed
        self._group = group
        self._tied = tied or {}
        self._paths = {part: name for name, part in module.named_modules()}
        self._parts = {part: name for part, name in self._paths.items() if part not in elsewhere}
        held = {parameter for part in self._parts for parameter in part.parameters(recurse=False)}
        named = module.named_parameters()
        self._given = {name: parameter.data for name, parameter in named if parameter in held}
        self._held_names = frozenset(self._given)
        tensors = [*self._given.values(), *self._buffers().values()]
        on_meta = torch.tensor([tensor.is_meta for tensor in tensors], dtype=torch.uint8)
        group.broadcast(on_meta)
        flags = on_meta.tolist()
        self._on_meta = {name for name, meta in zip(self._given, flags, strict=False) if meta}
        for name, stages in self._tied.items():
            self._agree_on_tied(name, stages)
        self._make_buffers(flags[len(self._given) :])

    def __call__(self, layout: UnitLayout) -> Fill:
        """Return a unit's values, and forget them. Collective."""
        values = {
            slot.parameter.name: self._given.pop(slot.parameter.name) for slot in layout.slots
        }
        missing = self._on_meta & values.keys()
        if missing:
            values |= self._made(missing)
        if missing != values.keys():
            return broadcast_unit(layout, values, self._group)

        def fill(parameter: shapes.Parameter, first: int, out: torch.Tensor) -> None:
            out.copy_(values[parameter.name].view(-1)[first : first + out.numel()])

        return fill

    def broadcast_rest(self, ours: Collection[str], dtype: torch.dtype) -> None:
        """Broadcast from rank 0 the buffers, and the parameters that are not `ours`. Collective.

        Normalisation over batches computes in one precision: that of its weights.
        """
        for part in self._parts:
            for buffer in part.buffers(recurse=False):
                if isinstance(part, nn.modules.batchnorm._NormBase) and buffer.is_floating_point():
                    buffer.data = buffer.to(dtype)
        for name, parameter in self._module.named_parameters():
            if name in self._held_names and name not in ours:
                if parameter.is_meta:
                    raise InputError(
                        f"{name} is {parameter.dtype} and on meta: hpczero does not know its"
                        " values; build the module with them"
                    )
                broadcast_tensor(parameter, self._group)
        buffers = self._buffers()
        _refuse_unknown(
            [name for name in sorted(self._unknown_buffers) if buffers[name].isnan().any()]
        )
        for buffer in buffers.values():
            broadcast_tensor(buffer, self._group)

    def _agree_on_tied(self, name: str, stages: Group) -> None:
        """Give all stages of a tied parameter the same values. Collective."""
        on_meta = torch.tensor(name in self._on_meta, dtype=torch.bool)
        if len(set(stages.stack(on_meta).tolist())) > 1:
            raise InputError(
                f"{name} is on meta on some of the pipeline stages that have it, and has values on"
                " others: build it alike on them"
            )
        if name not in self._on_meta and self._group.rank == 0:
            self._given[name] = self._given[name].contiguous()
            stages.broadcast(self._given[name])

    def _made(self, wanted: Collection[str]) -> dict[str, torch.Tensor]:
        """Return the values that modules give to these parameters; children reset before parents.

        NaN shows what nobody has given a value.
        """
        names = {parameter: name for name, parameter in self._module.named_parameters()}
        parts = [
            part
            for part in reversed(list(self._module.modules()))
            if self._is_made_now(part, names, wanted)
        ]
        with _temporary_parameters(parts, names) as made:
            for part in parts:
                self._reset(part)
        _refuse_unknown(
            [name for name in sorted(wanted) if name not in made or made[name].isnan().any()]
        )
        return {name: made[name] for name in wanted}

    def _is_made_now(
        self, part: nn.Module, names: Mapping[nn.Parameter, str], wanted: Collection[str]
    ) -> bool:
        """Return True if the part resets wanted parameters, and none that is still to come.

        What is tied all stages make alike, whatever is still to come there.
        """
        used = {names[parameter] for parameter in part.parameters()}
        now = self._tied.keys() >= set(wanted) or used.isdisjoint(self._given)
        return bool(reset_of(part)) and not used.isdisjoint(wanted) and now

    def _reset(self, part: nn.Module) -> None:
        reset = reset_of(part)
        assert reset is not None
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(key_of(self._seed, "initial", self._paths[part]) % _SEEDS)
            reset()

    def _buffers(self) -> dict[str, torch.Tensor]:
        """Return the buffers by name, one that several parts have once."""
        names: dict[torch.Tensor, str] = {}
        for part, path in self._parts.items():
            for name, buffer in part.named_buffers(recurse=False):
                names.setdefault(buffer, f"{path}.{name}" if path else name)
        return {name: buffer for buffer, name in names.items()}

    def _make_buffers(self, on_meta: Sequence[int]) -> None:
        """Put real buffers in place of those on meta.

        Modules without parameters give theirs their values here, the others with their parameters.
        """
        self._unknown_buffers = {
            name for name, meta in zip(self._buffers(), on_meta, strict=True) if meta
        }
        for path, buffer in self._buffers().items():
            if buffer.is_meta:
                owner, _, name = path.rpartition(".")
                unknown = float("nan") if buffer.is_floating_point() else 0
                real = torch.full(buffer.shape, unknown, dtype=buffer.dtype, device="cpu")
                setattr(self._module.get_submodule(owner), name, real)
        if self._unknown_buffers:
            for part in self._parts:
                if reset_of(part) and not any(True for _ in part.parameters()):
                    self._reset(part)


@contextmanager
def _temporary_parameters(
    parts: Sequence[nn.Module], names: Mapping[nn.Parameter, str]
) -> Iterator[dict[str, torch.Tensor]]:
    """Give the parts other parameters inside, NaN at first; yield these by name."""
    replaced = {
        (part, name): parameter
        for root in parts
        for part in root.modules()
        for name, parameter in part.named_parameters("", False, False)
    }
    unknown = partial(torch.full, fill_value=float("nan"), dtype=torch.float32, device="cpu")
    made = {old: nn.Parameter(unknown(old.shape)) for old in dict.fromkeys(replaced.values())}
    for (part, name), old in replaced.items():
        setattr(part, name, made[old])
    try:
        yield {names[old]: parameter.data for old, parameter in made.items()}
    finally:
        for (part, name), old in replaced.items():
            setattr(part, name, old)


def _refuse_unknown(names: Sequence[str]) -> None:
    if names:
        way_out = (
            "give the modules that hold them a reset_parameters(), or build the module with its"
            " values (not on meta)"
        )
        raise InputError(
            f"on meta, and no reset_parameters() gives a value to {first_few(names)}: {way_out}"
        )
