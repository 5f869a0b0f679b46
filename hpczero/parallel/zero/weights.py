"""A module's parameters as units: their memory, their values, and how they are read as a whole.

A unit's weights are where its rank's stage of ZeRO keeps them: whole, in memory that the ranks of a
node share, or a shard that `Gatherer` makes whole for as long as a layer runs. After a step each
rank has new weights for the elements that it owns; they travel to the other ranks while the next
step begins, and a layer waits for its own (`wait_for_weights` waits for all).
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from hpczero.comm.group import Group, Work
from hpczero.errors import HpczeroError
from hpczero.model import build, shapes
from hpczero.parallel.layout import UnitLayout, unit_layout
from hpczero.parallel.offload.placement import leaves_device, place_states
from hpczero.parallel.offload.state_file import StateFile
from hpczero.parallel.states import Precision, Sharded, named_by_place, state_bytes
from hpczero.parallel.zero import state_dict
from hpczero.parallel.zero.buffers import Arena, Stock
from hpczero.parallel.zero.compressed_gathers import messages_of_units
from hpczero.parallel.zero.data_axis import DataAxis
from hpczero.parallel.zero.engine_settings import EngineSettings
from hpczero.parallel.zero.gather import Gatherer, used_around_others
from hpczero.parallel.zero.outside import ModuleGuard
from hpczero.parallel.zero.parameters import give_up_parameter, hand_back_parameter
from hpczero.parallel.zero.unit import Fill, Unit
from hpczero_kernels.cpu import Pool

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

Values = Callable[[UnitLayout], Fill]


@dataclass(frozen=True)
class ModelParts:
    """The part of a model that an engine trains on this rank.

    `layers`: its modules in the order in which they run, each with the parameters that it holds and
    uses; one that holds none is no unit. `values`: a unit's initial values, asked for in one order
    on all ranks; None: hashes of the names. `names`: all parameters of the whole model, in its
    order. `ties`: parameters that several pipeline stages hold, each a unit, and these stages.
    `everyone`: the ranks that hold a user's module together, where tensor ranks share it.
    """

    module: nn.Module
    layers: Sequence[tuple[nn.Module, shapes.Layer]]
    values: Values | None
    ties: Mapping[str, Group]
    names: Sequence[str]
    everyone: Group | None = None


class Weights:
    """The units of a module, which gives its parameters to them until `close`."""

    def __init__(
        self,
        parts: ModelParts,
        axis: DataAxis,
        settings: EngineSettings,
        tensor: Group | None,
        pipeline: Group | None,
    ) -> None:
        """Give the module its memory; its values come with `fill`.

        `tensor`: the ranks that share what layers hold; `pipeline`: those that hold other layers.
        """
        self.module = parts.module
        self.tensor = tensor
        self.pipeline = pipeline
        self._others = [group for group in (tensor, pipeline) if group]
        self.everyone = parts.everyone or axis.group
        # this rank and its neighbours have a whole model that can be asked for
        self.is_whole = not self._others or parts.everyone is not None
        self.axis = axis
        self.settings = settings
        self.device = axis.device
        self.sharded = Sharded.at_stage(settings.zero.stage, axis.shared)
        self.pool = Pool(settings.threads)
        around = used_around_others(parts.layers)
        self.from_device = leaves_device(axis, settings.zero)
        self.file: StateFile | None = None
        self.stocks: dict[str, Stock] = {}  # kind of what is away -> its memory
        self.arena, self.units = self._allocated([layer for _, layer in parts.layers], around)
        module_parameters = dict(self.module.named_parameters())
        for unit in self.units:
            unit.take_over(module_parameters)
        self._unit_of: dict[torch.Tensor, Unit] = {
            parameter: unit for unit in self.units for parameter in unit.parameters
        }
        self.names = [slot.parameter.name for unit in self.units for slot in unit.layout.slots]
        parameters = [parameter for unit in self.units for parameter in unit.parameters]
        build.install_parameters(self.module, dict(zip(self.names, parameters, strict=True)))
        build.move_unmanaged(self.module, self.device.torch)
        self._messages = messages_of_units(self.units, tensor, self.pool, settings.compress_gathers)
        self.gatherer = self._gatherer(parts.layers, around) if self.sharded.parameters else None
        own_model = settings.own_model
        self.outside = (
            ModuleGuard(nn.Module(), ()) if own_model else ModuleGuard(self.module, self.units)
        )
        self._arriving: dict[Unit, Work] = {}  # whose new weights are not all here yet
        self._hooks = [
            part.register_forward_pre_hook(partial(self._wait_before, self.units_of(layer)))
            for part, layer in (parts.layers if own_model else ())
        ]

    def _allocated(
        self, layers: Iterable[shapes.Layer], around: Collection[str]
    ) -> tuple[Arena, list[Unit]]:
        """Return the memory of the states, and the units in it; `around`: used while others run."""
        axis = self.axis
        sharded = self.sharded
        dtype = DTYPES[self.settings.train.precision]
        part = (self.tensor.size, self.tensor.rank) if self.tensor else (1, 0)
        layouts = [unit_layout(layer, axis.size, *part) for layer in layers if layer.parameters]
        precision = Precision(dtype.itemsize, self.settings.accumulates)
        around_size = sum(unit.size for unit in layouts if unit.name in around)
        update = self.settings.update.memory
        sizes = state_bytes(
            layouts, sharded, precision, axis.shared, around_size, update, self.from_device
        )
        zero = self.settings.zero
        arena, self.file = place_states(axis, layouts, sharded, sizes, update, zero)
        dtypes = dtype, torch.float32 if self.settings.accumulates else dtype
        units = []
        for layout in layouts:
            written = axis.written(layout.size, sharded.optimizer)
            units.append(Unit(layout, axis.rank, sharded, dtypes, arena, written))
        return arena, units

    def _gatherer(
        self, layers: Sequence[tuple[nn.Module, shapes.Layer]], around: Collection[str]
    ) -> Gatherer:
        dtype = self.units[0].weights.dtype
        elements = self.arena.sizes["gather slots"] // dtype.itemsize
        slots = self.arena.take("gather slots", elements, dtype)
        gatherer = Gatherer(self.units, slots, self.start_gather)
        for part, layer in layers:
            gatherer.hook(part, self.units_of(layer))
        for unit in self.units:
            if unit.layout.name in around:
                gatherer.reserve(unit)
        if not self.settings.own_model:
            gatherer.hook_outer_calls(self.module, {part for part, _ in layers})
        return gatherer

    def fill(self, values: Values | None) -> None:
        """Give the units their first values. Collective."""
        for unit in self.units:
            unit.fill_owned(values(unit.layout) if values else self.initial_values)
            self._start_arriving(unit)
        self.wait_for_weights()
        self._let_pages_go()
        self.outside.accept()

    @property
    def groups(self) -> list[Group]:
        """The groups along which the model's elements, and its samples, are cut."""
        return [self.axis.group, *self._others]

    def initial_values(self, parameter: shapes.Parameter, first: int, out: torch.Tensor) -> None:
        build.initial_values(parameter, self.settings.seed, first, out, self.pool)

    def units_of(self, layer: shapes.Layer) -> list[Unit]:
        """Return the units that the layer works with."""
        return [
            unit
            for unit in self.units
            if any(slot.parameter.name in layer.names for slot in unit.layout.slots)
        ]

    def unit_of(self, parameter: torch.Tensor) -> Unit:
        if parameter not in self._unit_of:
            what = f"a tensor of shape {list(parameter.shape)} is none of the engine's parameters"
            raise HpczeroError(f"{what}: take them from engine.module")
        return self._unit_of[parameter]

    @property
    def owned_elements(self) -> int:
        """Elements that this rank steps, and saves."""
        return sum(unit.owned.stop - unit.owned.start for unit in self.units)

    def memory(self) -> dict[str, int]:
        """Bytes of the model's states in this rank's memory, by kind."""
        sizes = self.arena.sizes
        in_memory = {kind: size for kind, size in sizes.items() if kind not in self.arena.of_zeros}
        lent = {kind: stock.size for kind, stock in self.stocks.items()}
        return named_by_place(in_memory, self.from_device) | lent

    # -- new weights of owned elements travel to the other ranks

    def start_gather(self, unit: Unit, whole: torch.Tensor, exact: bool = False) -> Work:
        """Start the gather of a unit's weights into `whole`; `exact`: in any case as they are."""
        messages = None if exact else self._messages.get(unit)
        if not messages:
            whole[unit.shard].copy_(unit.weights)
        return self.axis.gather(whole, name=unit.layout.name, messages=messages)

    def _start_arriving(self, unit: Unit) -> None:
        """Send the unit's new owned weights to the others, and get theirs."""
        if self.gatherer:  # when they are needed
            self.gatherer.changed(unit)
            return
        if self.sharded.optimizer:
            self._arriving[unit] = self.axis.gather(unit.weights, messages=self._messages.get(unit))
        elif self.axis.shared:
            self._arriving[unit] = self.axis.node_barrier()

    def _wait_before(self, units: Sequence[Unit], *_: object) -> None:
        if self._arriving:
            for unit in units:
                if unit in self._arriving:
                    self._arriving.pop(unit).wait()

    def wait_for_weights(self) -> None:
        """Return once the parameters are those of the last step on this rank. Collective."""
        self._wait_before(self.units)

    def renew(self, change: Callable[[Unit], None]) -> None:
        """Give units new values: `change` writes master weights and weights of owned elements.

        Collective. They come to all ranks.
        """
        self.wait_for_weights()
        self.axis.node_barrier().wait()  # nobody reads any more what is written now
        for unit in self.units:
            change(unit)
            self._start_arriving(unit)
        self.wait_for_weights()
        self._let_pages_go()
        self.outside.accept()

    def _let_pages_go(self) -> None:
        if self.file:
            self.file.let_pages_go()

    # -- parameters as a whole

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take parameters and buffers, all of them, from the first rank; the moments stay.

        Collective.
        """
        assert self.is_whole, "parts of whole tensors are not loaded this way"
        values = state_dict.from_state_dict(self.module, self.units, state, self.everyone)
        self.renew(lambda unit: unit.fill_owned(values(unit.layout)))

    @contextmanager
    def gathered(self, parameters: Iterable[torch.Tensor], modify: bool = False) -> Iterator[None]:
        """Make these parameters readable as a whole inside, at every stage. Collective.

        With `modify` what data rank 0 has changed in them becomes everyone's at the end: weights,
        master weights, shards; what other ranks change is dropped. Everyone has a private copy
        inside, so that memory that ranks share is written by those who own it, at the end.
        """
        assert self.is_whole, "parts of whole tensors are not gathered this way"
        self.wait_for_weights()
        wanted = {self._unit_of_whole(parameter) for parameter in parameters}
        self.outside.check()
        copied = [unit for unit in self.units if unit in wanted]
        if not modify and not self.sharded.parameters:
            copied = []
        if modify and self._messages and not self.sharded.parameters:
            self._make_exact(copied)
        copies = {unit: self._copy(unit, exact=modify) for unit in copied}
        for unit, copy in copies.items():
            self._show(unit, copy)
        try:
            with self.outside.lent(wanted) if modify else nullcontext():
                yield
        finally:
            for unit in copies:
                self._hide(unit)
        if modify:
            for unit, copy in copies.items():
                self._agree_on(unit, copy)
            self._take_changes(copies)
        else:
            self.outside.check()

    def _unit_of_whole(self, parameter: torch.Tensor) -> Unit:
        """Return the unit of a parameter; HpczeroError if tensor ranks have parts of it."""
        unit = self.unit_of(parameter)
        for own, slot in zip(unit.parameters, unit.layout.slots, strict=True):
            if own is parameter and slot.is_split:
                raise HpczeroError(
                    f"{slot.parameter.name} is cut among the tensor ranks (tensor_plan), and no"
                    " rank gets it whole here: engine.full_state_dict() has it on rank 0, and"
                    " engine.load_state_dict(state) sets it"
                )
        return unit

    def _agree_on(self, unit: Unit, copy: torch.Tensor) -> None:
        """Give all ranks the first rank's copy; tensor ranks what all of them hold."""
        if self.tensor and self.axis.group.rank == 0:
            for slot in unit.layout.slots:
                if not slot.is_split:
                    self.tensor.broadcast(copy[slot.offset : slot.stop])
        self.axis.group.broadcast(copy)

    def _make_exact(self, units: Iterable[Unit]) -> None:
        """Bring weights to all ranks as they are, until they are gathered in 8 bits again."""
        self.axis.node_barrier().wait()  # nobody reads what is written now
        for unit in units:
            if unit in self._messages:
                unit.weights_from_master()
                self._arriving[unit] = self.axis.gather(unit.weights)
        self.wait_for_weights()

    def _copy(self, unit: Unit, exact: bool) -> torch.Tensor:
        if not self.sharded.parameters:
            return unit.weights.clone()
        copy = unit.weights.new_empty(unit.layout.size)
        self.start_gather(unit, copy, exact).wait()
        return copy

    def _show(self, unit: Unit, copy: torch.Tensor) -> None:
        if self.gatherer:
            self.gatherer.show(unit, copy)
        else:
            unit.show(copy)

    def _hide(self, unit: Unit) -> None:
        if self.gatherer:
            self.gatherer.release([unit])
        else:
            unit.show(unit.weights)

    def _take_changes(self, copies: Mapping[Unit, torch.Tensor]) -> None:
        """Make changed copies of whole weights, equal on all ranks, the weights.

        All compare before anybody writes in memory that others see.
        """
        changed = {unit: unit.changes(copy) for unit, copy in copies.items()}
        self.axis.node_barrier().wait()
        for unit, copy in copies.items():
            unit.take_changes(copy, changed[unit])
            self._start_arriving(unit)
        self.wait_for_weights()
        self._let_pages_go()
        self.outside.accept()

    def close(self, room: int = 0) -> None:
        """End threads, give shared memory back, and the module its parameters. Collective.

        Nothing may be in flight, unless it failed. Where a rank has not the parameters' values, to
        read them is an error from now on. `room`: bytes that the node has for copies of what its
        ranks share.
        """
        for hook in self._hooks:
            hook.remove()
        if self.gatherer:
            self.gatherer.close()
        self.outside.close()
        self._hand_back(room)
        for unit in self.units:
            unit.give_up()
        self.pool.close()
        self.axis.close()
        if self.file:
            self.file.close()

    def _hand_back(self, room: int) -> None:
        """Make the parameters ordinary ones again, or ones that refuse to be read.

        Memory that ranks share ends with the engine, so there each gets a copy, if the node has
        room for all of them.
        """
        has_values = not self.sharded.parameters
        if has_values and self.axis.shared:
            wanted = self.axis.neighbours * sum(unit.weights.nbytes for unit in self.units)
            spare = self.axis.group.stack(torch.tensor([room - wanted], dtype=torch.int64))
            has_values = bool((spare >= 0).all())
        for unit in self.units:
            weights = unit.weights.clone() if has_values and self.axis.shared else unit.weights
            for slot, parameter in zip(unit.layout.slots, unit.parameters, strict=True):
                if has_values and not (slot.is_split and self.tensor):
                    hand_back_parameter(parameter, unit.part(weights, slot))
                else:
                    give_up_parameter(parameter, slot.parameter.name)
