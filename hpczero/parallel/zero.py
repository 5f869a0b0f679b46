"""The engine: flat units, a reduce pass while backward goes on, a step pass once the global norm is known (design 8).

So far every data rank holds everything (stage 0 of ZeRO, Rajbhandari et al. 2020: plain data parallelism). A step goes

    begin_step(); for each micro-batch: backward(loss); finish_step(lr)

Reduce pass: `gradient_ready(parameter)`, the only entry from backward, adds a parameter's gradient to its unit; in the last micro-batch a unit whose
parameters are all there is summed over the data ranks while backward goes on. Units start in the reverse order of the model on every rank, whatever
gradients came or did not come there; a parameter without a gradient counts as zero.
Step pass: the norm, clipping, AdamW, the half-precision copy; nothing is touched when the norm is not finite.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from hpczero.comm.group import Group, Work
from hpczero.model import build, shapes
from hpczero.optim.loss_scale import LossScale
from hpczero.parallel.layout import Place, UnitLayout, unit_layout
from hpczero.spec.schema import Optimizer, Train
from hpczero_kernels.adamw import Scalars, State, adamw_reference, scalars_of_step

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_NORM_BLOCK = 4096


@dataclass(frozen=True)
class BadGradient:
    """The first tensor (from the loss backwards) whose local gradient was not finite, and the data rank; no tensor: only the sum was not finite."""

    tensor: str | None
    data_rank: int | None


@dataclass(frozen=True)
class StepResult:
    grad_norm: float
    loss_scale: float
    bad: BadGradient | None = None


class Unit:
    """One layer's weights, gradients, master weights and moments, each in one flat buffer."""

    def __init__(self, layout: UnitLayout, dtype: torch.dtype, accumulates: bool, seed: int) -> None:
        self.layout = layout
        self.weights = torch.zeros(layout.size, dtype=dtype)
        self.master = self.weights if dtype == torch.float32 else torch.zeros(layout.size)
        for place in layout.places:
            build.initial_values(place.parameter, seed, 0, self.part(self.master, place))
        self.weights.copy_(self.master)
        self.parameters = [nn.Parameter(self.part(self.weights, place)) for place in layout.places]
        self.moment1, self.moment2 = torch.zeros(layout.size), torch.zeros(layout.size)
        self.gradient = torch.zeros(layout.size, dtype=torch.float32 if accumulates else dtype)
        self.summed = self.gradient
        self.arrived: set[int] = set()  # which parameters have a gradient in this step
        self.missing = 0  # how many are still to come in the last micro-batch
        self.first_bad: str | None = None

    def __iter__(self) -> Iterator[tuple[Place, nn.Parameter]]:
        return zip(self.layout.places, self.parameters, strict=True)

    def part(self, buffer: torch.Tensor, place: Place) -> torch.Tensor:
        return buffer[place.offset : place.stop].view(place.parameter.shape)

    def add_gradient(self, index: int, gradient: torch.Tensor) -> None:
        part = self.part(self.gradient, self.layout.places[index])
        if index in self.arrived:
            part.add_(gradient)
        else:
            part.copy_(gradient)
            self.arrived.add(index)

    def complete(self) -> None:
        """Before the sum: parameters without a gradient count as zero; a bad gradient is noticed while it is still this rank's own."""
        for index, place in enumerate(self.layout.places):
            if index not in self.arrived:
                self.part(self.gradient, place).zero_()
        self.first_bad = None
        if not torch.isfinite(torch.linalg.vector_norm(self.gradient, dtype=torch.float32)):
            bad = (place for place in reversed(self.layout.places) if not self.part(self.gradient, place).isfinite().all())
            self.first_bad = next((place.parameter.name for place in bad), None)

    def squares(self) -> torch.Tensor:
        """The sum of squares of the summed gradient, over fixed blocks, in fp64."""
        blocks = self.summed.split(_NORM_BLOCK)
        return torch.stack([block.float().square().sum().double() for block in blocks]).sum()


@dataclass(frozen=True)
class Settings:
    """What the engine does with the gradients; `accumulates`: a step has several micro-batches (their sum is kept in fp32)."""

    train: Train
    optimizer: Optimizer
    seed: int
    accumulates: bool


class Engine:
    def __init__(self, module: nn.Module, layers: list[shapes.Layer], group: Group, settings: Settings) -> None:
        """Gives the module, built on meta, its memory and its initial values."""
        self.group, self.train, self.optimizer = group, settings.train, settings.optimizer
        half = self.train.precision == "fp16"
        self.loss_scale = LossScale(self.train.loss_scale if half else 1.0, dynamic=half)
        self.updates = 0
        dtype = DTYPES[self.train.precision]
        self.units = [Unit(unit_layout(layer), dtype, settings.accumulates, settings.seed) for layer in layers]
        self._order = list(reversed(self.units))
        self._started: list[Work] = []
        self._last = False
        self._place_of: dict[torch.Tensor, tuple[Unit, int]] = {}
        for unit in self.units:
            for index, parameter in enumerate(unit.parameters):
                self._place_of[parameter] = (unit, index)
                parameter.register_post_accumulate_grad_hook(self.gradient_ready)
        build.adopt(module, {place.parameter.name: own for unit in self.units for place, own in unit})

    def begin_step(self) -> None:
        self._last = False
        for unit in self.units:
            unit.arrived.clear()

    def backward(self, loss: torch.Tensor, last: bool) -> None:
        """Adds the gradient of `loss`; `last`: no further micro-batch of this step comes on this rank."""
        self._last = last
        for unit in self.units:
            unit.missing = len(unit.parameters)
        (loss * self.loss_scale.value).backward()

    def gradient_ready(self, parameter: torch.Tensor) -> None:
        unit, index = self._place_of[parameter]
        assert parameter.grad is not None
        unit.add_gradient(index, parameter.grad)
        parameter.grad = None
        unit.missing -= 1
        if self._last:
            self._start_complete_units()

    def memory(self) -> dict[str, int]:
        """Bytes of the model's states on this rank, by kind."""
        kinds = {"weights": "weights", "master": "master", "moments": "moment1", "gradients": "gradient"}
        held = {kind: sum(_bytes(getattr(unit, name)) for unit in self.units) for kind, name in kinds.items()}
        held["moments"] *= 2
        if self.units[0].master is self.units[0].weights:
            held["master"] = 0
        return held

    def _start_complete_units(self) -> None:
        while len(self._started) < len(self._order) and self._order[len(self._started)].missing == 0:
            self._start(self._order[len(self._started)])
        for work in self._started:
            work.poll()

    def _start(self, unit: Unit) -> None:
        """The sum travels in the parameters' precision."""
        unit.complete()
        unit.summed = unit.gradient if self.group.size == 1 else unit.gradient.to(unit.weights.dtype)
        self._started.append(self.group.start_all_reduce(unit.summed))

    def finish_step(self, lr: float) -> StepResult:
        for unit in self._order[len(self._started) :]:
            self._start(unit)
        for work in self._started:
            work.wait()
        self._started.clear()
        scale = self.loss_scale.value
        norm = float(torch.stack([unit.squares() for unit in self.units]).sum().sqrt()) / scale
        finite = norm < float("inf")
        self.loss_scale = self.loss_scale.after(overflow=not finite)
        if not finite:
            return StepResult(norm, scale, self._find_bad())
        self.updates += 1
        clip = min(1.0, self.train.grad_clip / (norm + 1e-6)) if self.train.grad_clip else 1.0
        scalars = scalars_of_step(self.updates, lr, self.optimizer.betas, self.optimizer.eps, clip / scale)
        for unit in self.units:
            self._update(unit, scalars)
        return StepResult(norm, scale)

    def _update(self, unit: Unit, scalars: Scalars) -> None:
        for place in unit.layout.places:
            part = slice(place.offset, place.stop)
            weights = None if unit.weights is unit.master else unit.weights[part]
            state = State(unit.master[part], unit.moment1[part], unit.moment2[part], unit.summed[part], weights)
            adamw_reference(state, self.optimizer.weight_decay if place.parameter.decays else 0.0, scalars)

    def _find_bad(self) -> BadGradient:
        names = [place.parameter.name for unit in self._order for place in reversed(unit.layout.places)]
        mine = next((names.index(unit.first_bad) for unit in self._order if unit.first_bad), len(names))
        firsts = torch.empty(self.group.size, dtype=torch.int64)
        self.group.all_gather(firsts, torch.tensor([mine]))
        first = int(firsts.min())
        return BadGradient(None, None) if first == len(names) else BadGradient(names[first], int(firsts.argmin()))


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
