"""The engine: flat units, a reduce pass while backward goes on, a step pass once the global norm is known (design 8).

One engine for all stages of ZeRO; what a stage shards is data (`states.Sharded`). A step goes

    for each micro-batch: backward(loss, last);  finish_step(lr)

Without a hint which backward is the last, what has not been reduced by then is reduced in finish_step.

Reduce pass: `gradient_ready(parameter)`, the only entry from backward, adds a parameter's gradient to its unit. Where gradients are sharded
every backward is reduced, else the last one of a step: a unit whose parameters are all there is summed over the data ranks while
backward goes on. Units start in one order on every rank, whatever gradients came or did not come there: in the first step the reverse order
of the model, from then on the order in which they were complete on the first rank.
Step pass: the norm, clipping, AdamW on the own elements, the half-precision weights, which are then gathered; nothing is touched when the
norm is not finite.
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from hpczero.comm.group import Work
from hpczero.errors import HpczeroError
from hpczero.memory.arena import Arena
from hpczero.model import build, shapes
from hpczero.optim.loss_scale import LossScale
from hpczero.parallel import whole
from hpczero.parallel.axis import DataAxis
from hpczero.parallel.gather import Gatherer, used_around_others
from hpczero.parallel.layout import UnitLayout, unit_layout
from hpczero.parallel.states import SLOTS, Precision, Sharded, state_bytes
from hpczero.parallel.unit import Fill, Unit
from hpczero.spec.schema import Optimizer, Train, Zero
from hpczero_kernels.adamw import Scalars, State, adamw, scalars_of_step
from hpczero_kernels.pool import Pool
from hpczero_kernels.reduce import BLOCK, sum_pieces

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class BadGradient:
    """The first tensor, from the loss backwards, whose gradient was not finite on some rank; no tensor: only the sum over ranks was not."""

    tensor: str | None
    data_rank: int | None

    def __str__(self) -> str:
        return f"first in {self.tensor} of data rank {self.data_rank}" if self.tensor else "only the sum over the ranks"


@dataclass(frozen=True)
class StepResult:
    grad_norm: float
    loss_scale: float
    bad: BadGradient | None = None


@dataclass(frozen=True)
class Settings:
    """What the engine does with the gradients; `accumulates`: a step has several micro-batches (their sum is kept in fp32)."""

    train: Train
    optimizer: Optimizer
    zero: Zero
    seed: int
    accumulates: bool
    threads: int = 1


class Engine:
    """`engine(...)` runs the module; then `backward` and `finish_step`."""

    def __init__(
        self,
        module: nn.Module,
        layers: Sequence[tuple[nn.Module, shapes.Layer]],
        axis: DataAxis,
        settings: Settings,
        values: Callable[[UnitLayout], Fill] | None = None,
    ) -> None:
        """Gives the module its memory and its initial values. `layers` are its parts, each with what it consists of and uses (with no parameters
        of its own it is no unit). `values` are those of a unit, asked for on all ranks in one order; by default hashes of the names.
        """
        self.module = module
        self.axis, self.settings = axis, settings
        self.sharded = Sharded.at_stage(settings.zero.stage, axis.shared)
        half = settings.train.precision == "fp16"
        self.loss_scale = LossScale(settings.train.loss_scale if half else 1.0, dynamic=half)
        self.updates = 0
        self.pool = Pool(settings.threads)
        dtype = DTYPES[settings.train.precision]
        layouts = [unit_layout(layer, axis.size) for _, layer in layers if layer.parameters]
        precision = Precision(dtype.itemsize, settings.accumulates)
        separate = dtype != torch.float32 or (axis.shared and not self.sharded.optimizer)
        around = used_around_others(layers)
        sizes = state_bytes(layouts, self.sharded, precision, separate, sum(unit.size for unit in layouts if unit.name in around))
        seen = "gradient slots" if self.sharded.gradients else "gradients"
        self.arena = Arena(sizes, axis.allocate(once={"weights": sizes["weights"]}, each={seen: sizes[seen]}))
        dtypes = dtype, torch.float32 if settings.accumulates else dtype
        written = [axis.written(layout.size, self.sharded.optimizer) for layout in layouts]
        self.units = [Unit(layout, axis.rank, self.sharded, dtypes, self.arena, part) for layout, part in zip(layouts, written, strict=True)]
        largest = max(layout.size for layout in layouts)
        self._slots = [self.arena.take("gradient slots", largest, dtype) for _ in range(SLOTS)] if self.sharded.gradients else []
        self._slot_of: dict[Unit, int] = {}
        self._order = list(reversed(self.units))
        self._place_in_order = {unit: place for place, unit in enumerate(self._order)}
        self._under_way: deque[tuple[Unit, Work]] = deque()
        self._read_by_others: set[Unit] = set()  # whose sum is under way
        self._started = 0  # units whose sum has been started in this backward
        self._sums = 0  # the same since the beginning
        self._reduced = False  # whether this step has sums already
        self._reducing = False
        self._backwards = 0  # in this step
        self._completed: list[Unit] | None = []  # in the first step, as they come
        self._bad: list[tuple[int, int]] = []  # (place of the tensor from the loss backwards, data rank)
        module_parameters = dict(module.named_parameters())
        self._place_of: dict[torch.Tensor, tuple[Unit, int]] = {}
        for unit in self.units:
            unit.take_over(module_parameters)
            self._place_of |= {parameter: (unit, index) for index, parameter in enumerate(unit.parameters)}
        self._hooks = [_when_ready(parameter, self.gradient_ready) for parameter in self._place_of]
        names = [place.parameter.name for unit in self.units for place in unit.layout.places]
        self._names_backwards = names[::-1]
        build.adopt(module, dict(zip(names, (own for unit in self.units for own in unit.parameters), strict=True)))
        self.gatherer = self._sharded_parameters(layers, around) if self.sharded.parameters else None
        for unit in self.units:
            unit.fill_own(values(unit.layout) if values else self._initial_values)
        self._gather_weights(self.units)

    def _initial_values(self, parameter: shapes.Parameter, first: int, out: torch.Tensor) -> None:
        build.initial_values(parameter, self.settings.seed, first, out)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        if self.gatherer is None:
            return self.module(*arguments, **named)
        with self.gatherer.forward():
            return self.module(*arguments, **named)

    def _sharded_parameters(self, layers: Sequence[tuple[nn.Module, shapes.Layer]], around: Iterable[str]) -> Gatherer:
        dtype = self.units[0].weights.dtype
        slots = self.arena.take("gather slots", self.arena.sizes["gather slots"] // dtype.itemsize, dtype)
        gatherer = Gatherer(self.units, slots, self.start_gather)
        unit_of = {place.parameter.name: unit for unit in self.units for place in unit.layout.places}
        for part, layer in layers:
            needed = {unit_of[name] for name in layer.names}
            gatherer.hook(part, [unit for unit in self.units if unit in needed])
        for unit in self.units:
            if unit.layout.name in around:
                gatherer.keep_place(unit)
        return gatherer

    def start_gather(self, unit: Unit, whole: torch.Tensor) -> Work:
        whole[unit.shard].copy_(unit.weights)
        return self.axis.gather(whole, name=unit.layout.name)

    # -- reduce pass ---------------------------------------------------------------------------------------------------------------

    def backward(self, loss: torch.Tensor, last: bool = False) -> None:
        """Adds the gradient of `loss`; `last`: no further backward of this step comes."""
        self._begin_pass(last)
        with self.gatherer.backward() if self.gatherer else nullcontext():
            (loss * self.loss_scale.value).backward()
        self._end_pass()

    def _begin_pass(self, last: bool) -> None:
        if self._reduced and not self.sharded.gradients:
            raise HpczeroError("a backward after the one that was said to be the last of the step: say last=True only then, or leave it out")
        if self._backwards and not self.settings.accumulates and self.settings.train.precision != "fp32":
            raise HpczeroError("several backwards in a step need gradients in fp32, and this engine was made without (accumulates=False)")
        self._backwards += 1
        self._reducing = last or self.sharded.gradients
        self._started = 0
        for unit in self.units:
            unit.missing = sum(parameter.requires_grad for parameter in unit.parameters)

    def _end_pass(self) -> None:
        """All gradients of this backward are there; what has not been started is started now."""
        if self._reducing:
            self._start_rest()
        self._reducing = False

    def _start_rest(self) -> None:
        for unit in self._order[self._started :]:
            self._start(unit)
        self._reduced = True

    def gradient_ready(self, parameter: torch.Tensor) -> None:
        unit, index = self._place_of[parameter]
        assert parameter.grad is not None
        if unit.buffer is None:
            self._lend_slot(unit)
        if unit.buffer is not None and unit not in self._read_by_others:
            unit.add_gradient(index, parameter.grad)
            parameter.grad = None
        unit.missing -= 1
        if self._completed is not None and unit.missing == 0:
            self._completed.append(unit)
        if self._reducing:
            while self._started < len(self._order) and self._order[self._started].missing == 0:
                self._start(self._order[self._started])
            self._collect()

    def _lend_slot(self, unit: Unit) -> None:
        """Units take turns, so that a unit lies in the same slot on every rank; gradients that come before their unit's turn wait with autograd."""
        place = self._place_in_order[unit]
        slot = (self._sums + place - self._started) % SLOTS
        if self._started <= place < self._started + SLOTS and slot not in self._slot_of.values():
            unit.buffer = unit.wire = self._slots[slot][: unit.layout.size]
            self._slot_of[unit] = slot

    def _start(self, unit: Unit) -> None:
        while unit in self._read_by_others:  # its sum of the backward before
            self._collect(wait=True)
        while unit.buffer is None:
            self._lend_slot(unit)
            if unit.buffer is None:
                self._collect(wait=True)
        self._started += 1
        self._sums += 1
        if self.gatherer:
            self.gatherer.forget(unit)
        unit.complete()
        self._read_by_others.add(unit)
        self._under_way.append((unit, self.axis.reduce(unit.wire, GradientSum(self, unit, accumulate=self.sharded.gradients and self._reduced))))

    def _collect(self, wait: bool = False) -> None:
        """Moves the sums under way, and takes back the slots of those that are done; `wait`: at least of the oldest."""
        while self._under_way:
            unit, work = self._under_way[0]
            if wait:
                work.wait()
            elif not work.poll():
                return
            self._under_way.popleft()
            self._read_by_others.discard(unit)
            wait = False
            if self.sharded.gradients:
                del self._slot_of[unit]
                unit.buffer = None

    def note_bad(self, unit: Unit, first: int, parts: list[torch.Tensor], ranks: Sequence[int], out: torch.Tensor) -> None:
        """A sum is not finite: which tensor of which rank made it so? (An earlier sum of the step that was already bad has been noted.) Where the
        sum was written over one of its parts, that one is to blame if no other is.
        """
        for place, elements in unit.layout.stretches(first, first + out.numel()):
            within = slice(elements.start - first, elements.stop - first)
            bad = [(rank, part) for rank, part in zip(ranks, parts, strict=True) if not part[within].isfinite().all()]
            sure = [(rank, part) for rank, part in bad if part.data_ptr() != out.data_ptr()]
            self._bad += [(self._names_backwards.index(place.parameter.name), rank) for rank, _ in sure or bad]

    # -- step pass -----------------------------------------------------------------------------------------------------------------

    def finish_step(self, lr: float) -> StepResult:
        self._finish_sums()
        scale, train, optimizer = self.loss_scale.value, self.settings.train, self.settings.optimizer
        norm = self._norm() / scale
        finite = norm < float("inf")
        self.loss_scale = self.loss_scale.after(overflow=not finite)
        if not finite:
            return StepResult(norm, scale, self._first_bad())
        self.updates += 1
        clip = min(1.0, train.grad_clip / (norm + 1e-6)) if train.grad_clip else 1.0
        scalars = scalars_of_step(self.updates, lr, optimizer.betas, optimizer.eps, clip / scale)
        for unit in self.units:
            self._update(unit, scalars)
        self._gather_weights(self.units)
        return StepResult(norm, scale)

    def _finish_sums(self) -> None:
        if not self._backwards:
            raise HpczeroError("a step without a gradient: backward comes before it")
        if not self._reduced:
            self._start_rest()
        while self._under_way:
            self._collect(wait=True)
        if not self.sharded.optimizer:
            for work in [self.axis.gather(unit.wire, copies=True) for unit in self._order]:
                work.wait()
        self._reduced, self._backwards = False, 0
        if self._completed is not None:
            self._keep_order(list(dict.fromkeys(self._completed)))
            self._completed = None

    def _keep_order(self, completed: list[Unit]) -> None:
        """Units start in the order in which they were complete on the first rank; those that were not come last."""
        rest = [unit for unit in self._order if unit not in completed]
        places = torch.tensor([self._place_in_order[unit] for unit in completed + rest])
        self._order = [self._order[place] for place in self.axis.all_gather(places)[0].tolist()]
        self._place_in_order = {unit: place for place, unit in enumerate(self._order)}

    def _norm(self) -> float:
        """Of the loss-scaled gradient. Blocks, then shards, are added in a fixed order: the same on every rank and at every stage."""
        own = torch.stack([unit.squares.double().sum() for unit in self.units]).sum()
        return float(self.axis.all_gather(own).sum().sqrt())

    def _first_bad(self) -> BadGradient:
        nothing = len(self._names_backwards), 0
        place, rank = min(map(tuple, self.axis.all_gather(torch.tensor(min(self._bad, default=nothing))).tolist()))
        self._bad.clear()
        return BadGradient(None, None) if place == nothing[0] else BadGradient(self._names_backwards[place], rank)

    def _update(self, unit: Unit, scalars: Scalars) -> None:
        for run in unit.runs:
            part = run.elements
            state = State(unit.master[part], unit.moment1[part], unit.moment2[part], unit.gradient_to_step[part], run.weights)
            adamw(state, self.settings.optimizer.weight_decay if run.decays else 0.0, scalars, self.pool)

    def _gather_weights(self, units: Sequence[Unit]) -> None:
        if self.gatherer:  # when they are needed
            self.gatherer.forget_all()
            return
        works = [self.axis.gather(unit.weights) for unit in units] if self.sharded.optimizer else [self.axis.settle()]
        for work in works:
            work.wait()

    @property
    def parameter_count(self) -> int:
        return sum(parameter.numel() for parameter in self._place_of)

    def memory(self) -> dict[str, int]:
        """Bytes of the model's states on this rank, by kind."""
        return dict(self.arena.sizes)

    def close(self) -> None:
        """Ends threads and gives shared memory back; the module must not be used any more."""
        for hook in self._hooks:
            hook.remove()
        if self.gatherer:
            self.gatherer.close()
        self.pool.close()
        self.axis.close()

    # -- whole parameters ----------------------------------------------------------------------------------------------------------

    def full_state_dict(self) -> dict[str, torch.Tensor]:
        """Collective. On data rank 0 what the module's state_dict would be, the parameters in fp32; empty on the others."""
        return whole.state_dict(self.module, self.units, self.axis)

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Collective. Parameters and buffers become those that data rank 0 gives, which must be all; the optimizer's moments stay."""
        values = whole.from_state_dict(self.module, self._names_backwards, state, self.axis.group)
        for unit in self.units:
            unit.fill_own(values(unit.layout))
        self._gather_weights(self.units)

    def gathered(self, parameters: Iterable[torch.Tensor], modify: bool = False) -> AbstractContextManager[None]:
        """Collective. Inside, these parameters can be read as a whole at every stage. With `modify` what data rank 0 has changed in them becomes
        everyone's at the end: weights, master weights, shards; what other ranks change is dropped.
        """
        return whole.gathered(self, parameters, modify)

    def unit_of(self, parameter: torch.Tensor) -> Unit:
        if parameter not in self._place_of:
            raise HpczeroError(f"a tensor of shape {list(parameter.shape)} is none of the engine's parameters: take them from engine.module")
        return self._place_of[parameter][0]

    def take_changes(self, copies: Mapping[Unit, torch.Tensor]) -> None:
        """Changed copies of whole weights, equal on all ranks, become the weights. All compare before anybody writes in memory that others see."""
        changed = {unit: unit.changes(copy) for unit, copy in copies.items()}
        self.axis.settle().wait()
        for unit, copy in copies.items():
            unit.take_changes(copy, changed[unit])
        self._gather_weights(list(copies))


def _when_ready(parameter: torch.Tensor, hook: Callable[[torch.Tensor], None]) -> RemovableHandle:
    """For a frozen parameter too: it may be trained later."""
    trained = parameter.requires_grad
    handle = parameter.requires_grad_(True).register_post_accumulate_grad_hook(hook)
    parameter.requires_grad_(trained)
    return handle


@dataclass(frozen=True)
class GradientSum:
    """The arithmetic of one unit's reduction: fp32, rounded once to the weights' precision, unless several sums are accumulated."""

    engine: Engine
    unit: Unit
    accumulate: bool

    def into_shard(self, window: slice, parts: list[torch.Tensor], ranks: Sequence[int]) -> None:
        squares = self.unit.squares[window.start // BLOCK : -(-window.stop // BLOCK)]
        out = self.unit.summed[window]
        sum_pieces(parts, out, self.accumulate, squares, self.engine.pool)
        if not squares.isfinite().all():
            self.engine.note_bad(self.unit, self.unit.shard.start + window.start, parts, ranks, out)

    def of_node(self, first: int, parts: list[torch.Tensor], ranks: Sequence[int], out: torch.Tensor) -> None:
        squares = torch.empty(-(-out.numel() // BLOCK))
        sum_pieces(parts, out, False, squares, self.engine.pool)
        if not squares.isfinite().all():
            self.engine.note_bad(self.unit, first, parts, ranks, out)
