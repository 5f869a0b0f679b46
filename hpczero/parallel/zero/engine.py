"""The engine: flat units, a reduce pass while backward goes on, a step pass once the global norm is known (design 8).

One engine for all stages of ZeRO; what a stage shards is data (`states.Sharded`). A step goes

    for each micro-batch: backward(loss, last);  finish_step(lr)

Without a hint which backward is the last, what has not been reduced by then is reduced in finish_step.

Reduce pass (`reduction`): the units' gradients are summed over the data ranks while backward goes on.
Step pass: the norm, clipping, AdamW on the own elements, the half-precision weights, which are then gathered; nothing is changed when the
norm is not finite. The host reads the norm when all of that has been asked of the device.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from hpczero.comm.group import Group, Work
from hpczero.errors import HpczeroError
from hpczero.model import build, shapes
from hpczero.optim.loss_scale import LossScale
from hpczero.parallel.layout import UnitLayout, unit_layout
from hpczero.parallel.states import Precision, Sharded, state_bytes
from hpczero.parallel.zero import state_dict
from hpczero.parallel.zero.buffers import Arena
from hpczero.parallel.zero.data_axis import AbsentGradients, DataAxis
from hpczero.parallel.zero.gather import Gatherer, used_around_others
from hpczero.parallel.zero.outside import Outside
from hpczero.parallel.zero.parameters import when_ready
from hpczero.parallel.zero.reduce import BadGradient, Reduction
from hpczero.parallel.zero.unit import Fill, Unit, take_moments, take_slots
from hpczero.parallel.zero.weight_gradients import (
    DirectGradients,
    StrayGradients,
    no_torch_overrides,
)
from hpczero.spec.schema import Optimizer, Train, Zero
from hpczero_kernels.adamw import AdamWScalars, adamw, scalars_of_step
from hpczero_kernels.cpu import Pool
from hpczero_kernels.dispatch import CUDA, choose

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class StepResult:
    grad_norm: float
    loss_scale: float
    bad: BadGradient | None = None


@dataclass(frozen=True)
class EngineSettings:
    """What the engine does with the gradients; `accumulates`: a step has several micro-batches (their sum is kept in fp32).
    `own_model`: the module is one of `hpczero.model`, where a layer's parameters are used while it runs and by nobody else, and linear maps
    whose gradients autograd would make are those of `model.maps`.
    """

    train: Train
    optimizer: Optimizer
    zero: Zero
    seed: int
    accumulates: bool
    threads: int = 1
    own_model: bool = False


class Engine:
    """`engine(...)` runs the module; then `backward` and `finish_step`."""

    def __init__(
        self,
        module: nn.Module,
        layers: Sequence[tuple[nn.Module, shapes.Layer]],
        axis: DataAxis,
        settings: EngineSettings,
        values: Callable[[UnitLayout], Fill] | None = None,
        tensor: Group | None = None,
        pipeline: Group | None = None,
    ) -> None:
        """Gives the module its memory and its initial values. `layers` are its parts, each with what it consists of and uses (with no parameters
        of its own it is no unit). `values` are those of a unit, asked for on all ranks in one order; by default hashes of the names. `tensor`: the
        ranks that share what the module's layers hold; `pipeline`: those that hold its other layers.
        """
        self.module, self.tensor, self.pipeline = module, tensor, pipeline
        self._others = [group for group in (tensor, pipeline) if group]
        self.copies: set[Unit] = (
            set()
        )  # units that belong to another stage, too, where they are counted
        self.axis, self.settings, self.device = axis, settings, axis.device
        self.sharded = Sharded.at_stage(settings.zero.stage, axis.shared)
        fp16 = settings.train.precision == "fp16"
        self.loss_scale = LossScale(settings.train.loss_scale if fp16 else 1.0, dynamic=fp16)
        self.updates, self.pool = 0, Pool(settings.threads)
        around = used_around_others(layers)
        self.arena, self.units = self._allocated([layer for _, layer in layers], around)
        module_parameters = dict(module.named_parameters())
        for unit in self.units:
            unit.take_over(module_parameters)
        self._unit_of: dict[torch.Tensor, Unit] = {
            parameter: unit for unit in self.units for parameter in unit.parameters
        }
        self.reduction = Reduction(
            self.units, axis, self.sharded, take_slots(self.units, self.arena), self.pool
        )
        self.absent = AbsentGradients(self.units, axis, agrees=not settings.own_model)
        self._had_backward: set[Unit] = set()  # in this step
        self._stray = StrayGradients(self.reduction.name_of, says=axis.rank == 0)
        self._gathers: list[Unit] = []  # since this backward began, in one order on all ranks
        self._direct = DirectGradients(
            self._unit_of, self.reduction, watches=not settings.own_model
        )
        self._hooks = [when_ready(parameter, self.gradient_ready) for parameter in self._unit_of]
        self.names = [place.parameter.name for unit in self.units for place in unit.layout.slots]
        build.install_parameters(
            module,
            dict(
                zip(
                    self.names, (own for unit in self.units for own in unit.parameters), strict=True
                )
            ),
        )
        build.move_rest(module, self.device.torch)
        self.gatherer = (
            self._sharded_parameters(layers, around) if self.sharded.parameters else None
        )
        self.outside = (
            Outside(nn.Module(), ()) if settings.own_model else Outside(module, self.units)
        )
        if self.gatherer:
            self.reduction.on_all_there = self.gatherer.forget
        self._arriving: dict[Unit, Work] = {}  # whose new weights are not all here yet
        if self.settings.own_model:
            self._hooks += [
                part.register_forward_pre_hook(partial(self._wait_before, self.units_of(layer)))
                for part, layer in layers
            ]
        for unit in self.units:
            unit.fill_owned(values(unit.layout) if values else self.initial_values)
            self._start_arriving(unit)
        self.weights_here()
        self.outside.note()

    def _allocated(
        self, layers: Iterable[shapes.Layer], around: Collection[str]
    ) -> tuple[Arena, list[Unit]]:
        """Return the memory of the states, and the units in it. `around`: in use while others run."""
        axis, sharded, dtype = self.axis, self.sharded, DTYPES[self.settings.train.precision]
        part = (self.tensor.size, self.tensor.rank) if self.tensor else (1, 0)
        layouts = [unit_layout(layer, axis.size, *part) for layer in layers if layer.parameters]
        precision = Precision(dtype.itemsize, self.settings.accumulates)
        sizes = state_bytes(
            layouts,
            sharded,
            precision,
            axis.shared,
            sum(unit.size for unit in layouts if unit.name in around),
        )
        seen = sharded.read_by_others
        arena = Arena(
            sizes,
            axis.allocate(once={"weights": sizes["weights"]}, each={seen: sizes[seen]}),
            self.device.torch,
        )
        dtypes = dtype, torch.float32 if self.settings.accumulates else dtype
        units = [
            Unit(
                layout,
                axis.rank,
                sharded,
                dtypes,
                arena,
                axis.written(layout.size, sharded.optimizer),
            )
            for layout in layouts
        ]
        take_moments(units, arena)
        return arena, units

    def initial_values(self, parameter: shapes.Parameter, first: int, out: torch.Tensor) -> None:
        build.initial_values(parameter, self.settings.seed, first, out, self.pool)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        with self.running():
            return self.module(*arguments, **named)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Inside, the module or its layers may run forward."""
        if not self.settings.own_model:
            self.weights_here()
            self.outside.look_once()
        with (
            self._direct.redirect_weight_grads(),
            self.gatherer.forward() if self.gatherer else nullcontext(),
        ):
            yield

    def _sharded_parameters(
        self, layers: Sequence[tuple[nn.Module, shapes.Layer]], around: Iterable[str]
    ) -> Gatherer:
        dtype = self.units[0].weights.dtype
        slots = self.arena.take(
            "gather slots", self.arena.sizes["gather slots"] // dtype.itemsize, dtype
        )
        gatherer = Gatherer(self.units, slots, self.start_gather)
        for part, layer in layers:
            gatherer.hook(part, self.units_of(layer))
        for unit in self.units:
            if unit.layout.name in around:
                gatherer.keep_place(unit)
        if not self.settings.own_model:
            gatherer.hook_calls(self.module, {part for part, _ in layers})
        return gatherer

    def units_of(self, layer: shapes.Layer) -> list[Unit]:
        """Those that the layer works with."""
        return [
            unit
            for unit in self.units
            if any(place.parameter.name in layer.names for place in unit.layout.slots)
        ]

    def units_named(self, names: Collection[str]) -> list[Unit]:
        return [unit for unit in self.units if unit.layout.name in names]

    def start_gather(self, unit: Unit, whole: torch.Tensor) -> Work:
        if self.reduction.is_open:
            self._gathers.append(unit)
        whole[unit.shard].copy_(unit.weights)
        return self.axis.gather(whole, name=unit.layout.name)

    # -- reduce pass ---------------------------------------------------------------------------------------------------------------

    def backward(self, loss: torch.Tensor, last: bool = False) -> None:
        """Adds the gradient of `loss`; `last`: no further backward of this step comes."""
        if loss.numel() != 1:
            raise HpczeroError(
                f"backward is asked for of a loss of shape {list(loss.shape)}: give its sum or its mean"
            )
        loss = loss * self.loss_scale.value
        self.backward_of(None, loss, torch.ones_like(loss), last)

    def backward_of(
        self,
        units: Collection[Unit] | None,
        output: torch.Tensor,
        gradient: torch.Tensor,
        last: bool,
    ) -> None:
        """The backward of a part of the model, which holds these units (None: all). `gradient` is that of its output."""
        chosen = self.units if units is None else units
        self.reduction.refuse_after_failure()
        if (
            self._had_backward.intersection(chosen)
            and not self.settings.accumulates
            and self.settings.train.precision != "fp32"
        ):
            raise HpczeroError(
                "several backwards in a step need gradients in fp32, and this engine was made without (accumulates=False)"
            )
        self._gathers.clear()
        self.reduction.begin(last, units)
        self.outside.owner.keeps_gradients = True
        self._had_backward.update(chosen)
        try:
            with (
                self._direct.redirect_weight_grads(),
                self.gatherer.backward() if self.gatherer else nullcontext(),
                self._in_this_thread(),
            ):
                if (
                    units is None or output.requires_grad
                ):  # of a part whose parameters are all frozen nothing may be left to do
                    self._direct.backward(output, gradient)
            self.reduction.end()
        except BaseException:
            self.reduction.fail()
            raise

    def _in_this_thread(self) -> AbstractContextManager[object]:
        """Autograd runs a GPU's backward in a thread of its own, where what holds in this one (modes, who may call MPI) does not."""
        return (
            torch.autograd.set_multithreading_enabled(False)
            if self.device.has_queues
            else nullcontext()
        )

    def gradient_ready(self, parameter: torch.Tensor) -> None:
        """The gradient of a backward is in `parameter.grad`: the only entry from backward."""
        if not self.reduction.is_open:
            self._stray.drop(parameter)
            return
        with no_torch_overrides():
            self.reduction.gradient_ready(
                parameter, may_be_last=self._direct.is_own()
            )  # in a backward inside ours, autograd calls for each use

    def zero_grad(self) -> None:
        """Collective. Drop the gradients of this step, also after a backward that raised."""
        assert not self._others, "other ranks have the rest"
        if not self._had_backward:
            return
        self.reduction.discard()
        self.outside.owner.keeps_gradients = False
        self._had_backward.clear()
        if self.gatherer:
            self._catch_up(self.gatherer)

    def _catch_up(self, gatherer: Gatherer) -> None:
        """Gather what other ranks have gathered and this one, whose backward failed earlier, has not."""
        own = torch.tensor(len(self._gathers), dtype=torch.int64)
        counts = self.axis.all_gather(own).flatten().tolist()
        ahead = counts.index(max(counts))
        numbers = torch.zeros(counts[ahead], dtype=torch.int64)
        if self.axis.rank == ahead:
            numbers.copy_(
                torch.tensor([self.units.index(unit) for unit in self._gathers], dtype=torch.int64)
            )
        self.axis.group.broadcast(numbers, ahead)
        for number in numbers[len(self._gathers) :].tolist():
            unit = self.units[number]
            self.start_gather(unit, unit.weights.new_empty(unit.layout.size)).wait()
        gatherer.forget_all()

    # -- step pass -----------------------------------------------------------------------------------------------------------------

    def finish_step(self, lr: float) -> StepResult:
        """New weights may still be on their way to this rank when it returns: layers wait for them, others ask for `weights_here`."""
        if not self._had_backward:
            raise HpczeroError("a step without a gradient: backward comes before it")
        self.reduction.refuse_after_failure()
        self.outside.look()
        self.outside.owner.keeps_gradients = False
        self.reduction.finish()
        self._had_backward.clear()
        self.absent.agree(self.reduction.tied)
        scale = self.loss_scale.value
        scalars = {
            missed: self._scalars(self.updates + 1 - missed, lr) for missed in self.absent.counts()
        }
        of_gradient = self._norm() / scale
        read, settle = (
            self.device.later(of_gradient.view(1)),
            self.axis.group.connection.progress.snapshot(),
        )
        for each in scalars.values():
            each.follow(of_gradient, self.settings.train.grad_clip, scale)
        self.weights_here()  # of layers that did not run since the last step
        if choose("adamw", self.units[0].master) != CUDA:
            settle()  # the others read the scalars
        for unit in self.units:
            self._update(unit, scalars)
            self._start_arriving(unit)
        settle()
        (norm,) = read()
        finite = norm < float("inf")
        self.loss_scale = self.loss_scale.after(overflow=not finite)
        self.updates += finite
        if finite:
            self.absent.updated()
        self.absent.begin_step()
        self.outside.note()
        return StepResult(norm, scale, None if finite else self.reduction.first_bad(self._others))

    def _norm(self) -> torch.Tensor:
        """Of the loss-scaled gradient. Blocks, then shards, are added in a fixed order: the same on every rank and at every stage."""
        counted = [unit for unit in self.units if unit not in self.copies]
        nothing = torch.zeros((), dtype=torch.float64, device=self.device.torch)
        own = torch.stack([nothing, *(unit.squares.double().sum() for unit in counted)]).sum()
        if self.tensor and self.tensor.rank:  # what all tensor ranks hold counts once
            own -= sum((unit.squares_held_by_all() for unit in counted), torch.zeros_like(own))
        total = self.axis.all_gather(own).sum()
        for group in self._others:
            total = group.stack(total).sum()
        return total.sqrt()

    def _scalars(self, update: int, lr: float) -> AdamWScalars:
        optimizer = self.settings.optimizer
        return AdamWScalars(
            self.device.put(scalars_of_step(update, lr, optimizer.betas, optimizer.eps).values)
        )

    def _update(self, unit: Unit, scalars: Mapping[int, AdamWScalars]) -> None:
        """`scalars`: for parameters that so many updates have left out."""
        missed = self.absent.missed
        for stretch in unit.stepped(self.absent.of(unit)):
            decay = self.settings.optimizer.weight_decay if stretch.decays else 0.0
            adamw(stretch.state, decay, scalars[missed.get(stretch.name, 0)], self.pool)

    def _start_arriving(self, unit: Unit) -> None:
        """The own part of a unit's weights is new: the others get it, and this rank theirs."""
        if self.gatherer:  # when they are needed
            self.gatherer.changed(unit)
            return
        if self.sharded.optimizer:
            self._arriving[unit] = self.axis.gather(unit.weights)
        elif self.axis.shared:
            self._arriving[unit] = self.axis.node_barrier()

    def _wait_before(self, units: Sequence[Unit], *_: object) -> None:
        if self._arriving:
            for unit in units:
                if unit in self._arriving:
                    self._arriving.pop(unit).wait()

    def weights_here(self) -> None:
        """Collective. Returns once the parameters are those of the last step on this rank."""
        self._wait_before(self.units)

    def parameter_count(self) -> int:
        """Of the whole model. Collective where that is on several stages."""
        own = sum(
            place.parameter.size
            for unit in self.units
            if unit not in self.copies
            for place in unit.layout.slots
        )
        return (
            int(self.pipeline.stack(torch.tensor(own, dtype=torch.int64)).sum())
            if self.pipeline
            else own
        )

    @property
    def losses_count(self) -> bool:
        """Whether this rank's losses count: tensor ranks all have the same, and stages but the last have none."""
        return (self.tensor is None or self.tensor.rank == 0) and (
            self.pipeline is None or self.pipeline.rank + 1 == self.pipeline.size
        )

    def memory(self) -> dict[str, int]:
        """Bytes of the model's states on this rank, by kind."""
        return dict(self.arena.sizes)

    def close(self, room: int = 0) -> None:
        """Ends threads and gives shared memory back. The module's parameters are ordinary ones again, or, where the
        rank has not their values, an error when they are read; `room`: bytes that the node has for copies.
        """
        if not self._others:
            self.zero_grad()  # sums may be under way, in memory that is given back
        self.weights_here()
        for hook in self._hooks:
            hook.remove()
        if self.gatherer:
            self.gatherer.close()
        self.outside.close()
        state_dict.release(self, room)
        for unit in self.units:
            unit.give_up()
        self.pool.close()
        self.axis.close()

    # -- whole parameters ----------------------------------------------------------------------------------------------------------

    def full_state_dict(self) -> dict[str, torch.Tensor]:
        """Collective. On data rank 0 what the module's state_dict would be, the parameters in fp32; empty on the others."""
        assert not self._others, "other ranks have the rest"
        return state_dict.state_dict(self.module, self.units, self.axis)

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Collective. Parameters and buffers become those that data rank 0 gives, which must be all; the optimizer's moments stay."""
        assert not self._others, "parts of whole tensors are not loaded this way"
        values = state_dict.from_state_dict(self.module, self.names, state, self.axis.group)
        self.renew(lambda unit: unit.fill_owned(values(unit.layout)))

    def renew(self, change: Callable[[Unit], None]) -> None:
        """Collective. `change` gives the own elements of a unit new master weights and writes them to its weights, which then come to all."""
        self.weights_here()
        self.axis.node_barrier().wait()  # nobody reads any more what is written now
        for unit in self.units:
            change(unit)
            self._start_arriving(unit)
        self.weights_here()
        self.outside.note()

    def gathered(
        self, parameters: Iterable[torch.Tensor], modify: bool = False
    ) -> AbstractContextManager[None]:
        """Collective. Inside, these parameters can be read as a whole at every stage. With `modify` what data rank 0 has changed in them becomes
        everyone's at the end: weights, master weights, shards; what other ranks change is dropped.
        """
        assert not self._others, "parts of whole tensors are not gathered this way"
        self.weights_here()
        return state_dict.gathered(self, parameters, modify)

    def unit_of(self, parameter: torch.Tensor) -> Unit:
        if parameter not in self._unit_of:
            raise HpczeroError(
                f"a tensor of shape {list(parameter.shape)} is none of the engine's parameters: take them from engine.module"
            )
        return self._unit_of[parameter]

    def take_changes(self, copies: Mapping[Unit, torch.Tensor]) -> None:
        """Changed copies of whole weights, equal on all ranks, become the weights. All compare before anybody writes in memory that others see."""
        changed = {unit: unit.changes(copy) for unit, copy in copies.items()}
        self.axis.node_barrier().wait()
        for unit, copy in copies.items():
            unit.take_changes(copy, changed[unit])
            self._start_arriving(unit)
        self.weights_here()
        self.outside.note()
