"""The engine: a reduce pass while backward goes on, a step pass once the global norm is known.

One engine for all stages of ZeRO; what a stage shards is data (`states.Sharded`). A step goes

    for each micro-batch: backward(loss, last);  finish_step(lr)

Without a hint which backward is the last, what has not been reduced by then is reduced in
finish_step.

Reduce pass (`reduce`): the units' gradients are summed over the data ranks while backward goes on.
Step pass: the norm, clipping, AdamW on the owned elements, the half-precision weights, which are
then gathered; nothing is changed when the norm is not finite. The host reads the norm when all of
that has been asked of the device.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import chain
from typing import Any

import torch

from hpczero.comm.group import Group, Work
from hpczero.errors import HpczeroError
from hpczero.parallel.offload.offloaded_adamw import OffloadedAdamW
from hpczero.parallel.replicas.compressed_sums import CompressedSums
from hpczero.parallel.replicas.local_steps import LocalSteps
from hpczero.parallel.replicas.one_bit_adam import OneBitAdam
from hpczero.parallel.zero.agreement import Agreement, checksum_of_rates
from hpczero.parallel.zero.averaged_weights import AveragedWeights
from hpczero.parallel.zero.data_axis import AbsentGradients, DataAxis
from hpczero.parallel.zero.engine_settings import EngineSettings
from hpczero.parallel.zero.gather import Gatherer
from hpczero.parallel.zero.kernel_update import AdamWUpdate
from hpczero.parallel.zero.lamb_update import LambUpdate
from hpczero.parallel.zero.lion_update import LionUpdate
from hpczero.parallel.zero.loss_scale import LossScale
from hpczero.parallel.zero.muon_update import MuonUpdate
from hpczero.parallel.zero.norm import GradientNorm
from hpczero.parallel.zero.parameters import when_ready
from hpczero.parallel.zero.reduce import Reduction
from hpczero.parallel.zero.torch_update import TorchUpdate
from hpczero.parallel.zero.unit import Unit, take_gradient_slots
from hpczero.parallel.zero.update import Step, StepResult, Update
from hpczero.parallel.zero.update_plan import EMPTY
from hpczero.parallel.zero.weight_gradients import (
    DirectGradients,
    StrayGradients,
    no_torch_overrides,
)
from hpczero.parallel.zero.weights import ModelParts, Weights

_UPDATES: dict[str, Callable[[Weights, AbsentGradients], Update]] = {
    "lamb": LambUpdate,
    "lion": LionUpdate,
    "muon": MuonUpdate,
}


class Engine(AveragedWeights):
    """`engine(...)` runs the module; then `backward` and `finish_step`."""

    def __init__(
        self,
        parts: ModelParts,
        axis: DataAxis,
        settings: EngineSettings,
        tensor: Group | None = None,
        pipeline: Group | None = None,
    ) -> None:
        super().__init__(parts, axis, settings, tensor, pipeline)
        self.loss_scale = LossScale.first(settings.train)
        self.updates = 0
        by_name = {unit.layout.name: unit for unit in self.units}
        tied = {by_name[name]: group for name, group in parts.ties.items()}
        self.counted_elsewhere = {unit for unit, group in tied.items() if group.rank}
        gradient_slots = take_gradient_slots(self.units, self.arena)
        names_backwards = parts.names[::-1]
        self.reduction = Reduction(
            self.units, axis, self.sharded, gradient_slots, self.pool, names_backwards, tied
        )
        if self.gatherer:
            self.reduction.on_complete = self.gatherer.forget
        sums = self.reduction.replicas
        if axis.replicas and settings.compress:
            sums.make = CompressedSums(self, axis.replicas).start
        watches = not settings.own_model
        self.alike = Agreement(axis, tensor, pipeline) if watches else None
        self.absent = AbsentGradients(self.units, axis, agrees=watches)
        others, elsewhere = self._others, self.counted_elsewhere
        self._norm = GradientNorm(self.units, axis, tensor, others, self.alike, elsewhere)
        self.update = self._made_update(list(tied))
        sums.differ = lambda: self.update.gradients_differ
        self._had_backward: set[Unit] = set()  # in this step
        self.on_backward: Callable[[], None] | None = None  # called when the first of a step begins
        self._is_last = False  # the backward that runs, or ran last, is the last of the step
        self._stray = StrayGradients(self.reduction.name_of, says=axis.group.rank == 0)
        self._gathers: list[Unit] = []  # since this backward began, in one order on all ranks
        self._direct = DirectGradients(self._unit_of, self.reduction, watches)
        self._hooks += [when_ready(parameter, self.gradient_ready) for parameter in self._unit_of]
        self._behind: list[Unit] = []  # whose steps are carried out later, in order
        self.fill(parts.values)
        self.update.start()

    def _made_update(self, tied: Sequence[Unit]) -> Update:
        if replicas := self.axis.replicas:
            optimizer = self.settings.optimizer
            if optimizer.outer.every:
                return LocalSteps(self, self.absent, replicas, tied)
            if optimizer.name == "one_bit_adam":
                return OneBitAdam(self, self.absent, replicas)
        if self.settings.update.optimizer:
            return TorchUpdate(self, self.absent)
        if self.file or self.from_device:
            self.reduction.on_summed = self._summed
            return OffloadedAdamW(self, self.absent, self.file)
        return _UPDATES.get(self.settings.optimizer.name, AdamWUpdate)(self, self.absent)

    @property
    def workers(self) -> int:
        """Number of replicas that step by gradients of their own, or 1."""
        replicas = self.axis.replicas
        return replicas.count if replicas and self.update.gradients_differ else 1

    def memory(self) -> dict[str, int]:
        return super().memory() | self.update.memory()

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        with self.running():
            return self.module(*arguments, **named)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Inside, the module or its layers may run forward."""
        if not self.settings.own_model:
            self.wait_for_weights()
            self.outside.check_once()
        if torch.is_grad_enabled() and not self._is_averaged:
            self.update.begin_gradients()
        with (
            self._direct.redirect_weight_grads(),
            self.gatherer.forward() if self.gatherer else nullcontext(),
        ):
            yield

    def start_gather(self, unit: Unit, whole: torch.Tensor, exact: bool = False) -> Work:
        if self.reduction.is_open:
            self._gathers.append(unit)
        self.update.complete(unit)
        return super().start_gather(unit, whole, exact)

    # -- steps that are carried out later

    def _start_arriving(self, unit: Unit) -> None:
        if not self.update.is_behind:
            super()._start_arriving(unit)
            return
        self._behind.append(unit)
        if self.gatherer:
            self.gatherer.changed(unit)

    def _wait_before(self, units: Sequence[Unit], *_: object) -> None:
        """Wait for these units' new weights.

        Those of the units before them, and of the next one, are sent first: so all ranks send in
        one order, and the next one's are on their way while a layer runs.
        """
        self.update.refuse_after_failure()
        self.update.poll()
        if self._behind:
            places = [self._behind.index(one) for one in units if one in self._behind]
            last = max(places, default=-2)
            ready, self._behind = self._behind[: last + 2], self._behind[last + 2 :]
            for unit in ready:
                self.update.complete(unit)
                if not self.gatherer:
                    super()._start_arriving(unit)
        super()._wait_before(units)

    # -- reduce pass

    def backward(self, loss: torch.Tensor, last: bool = False) -> None:
        """Add the gradient of `loss`; `last`: no further backward of this step comes."""
        if loss.numel() != 1:
            raise HpczeroError(
                f"backward needs a loss of one element, and got one of shape {list(loss.shape)}:"
                " give its sum or its mean"
            )
        if self.alike:
            self.alike.compare_losses(loss)
        loss = loss * self.loss_scale.value
        self.backward_of(None, loss, torch.ones_like(loss), last)

    def backward_of(
        self,
        units: Collection[Unit] | None,
        output: torch.Tensor,
        gradient: torch.Tensor,
        last: bool,
    ) -> None:
        """Run the backward of a part of the model, which holds these units (None: all).

        `gradient` is that of its output.
        """
        chosen = self.units if units is None else units
        self.reduction.refuse_after_failure()
        self.refuse_averaged("backward")
        self.update.begin_gradients()
        in_half = not self.settings.accumulates and self.settings.train.precision != "fp32"
        if in_half and self._had_backward.intersection(chosen):
            raise HpczeroError(
                "several backwards in a step need gradients in fp32, and this engine was made"
                " without (accumulates=False)"
            )
        if self.on_backward and not self._had_backward:
            self.on_backward()
        self._gathers.clear()
        self._is_last = last
        self.reduction.begin(last, units)
        self.outside.owner.keeps_gradients = True
        self._had_backward.update(chosen)
        try:
            with (
                self._direct.redirect_weight_grads(),
                self.gatherer.backward() if self.gatherer else nullcontext(),
                self._in_this_thread(),
            ):
                # A part whose parameters are all frozen may have nothing to do.
                if units is None or output.requires_grad:
                    self._direct.backward(output, gradient)
            self.reduction.end()
        except BaseException:
            self.reduction.fail()
            raise

    def _summed(self, unit: Unit) -> None:
        """Hand on the sum of a unit's gradient; at stage 0 ranks have parts of it so far."""
        self.update.take_gradient(unit, self._is_last and self.sharded.optimizer)

    def _in_this_thread(self) -> AbstractContextManager[object]:
        """Keep a GPU's backward in this thread: only here modes hold, and MPI may be called."""
        if self.device.has_queues:
            return torch.autograd.set_multithreading_enabled(False)
        return nullcontext()

    def gradient_ready(self, parameter: torch.Tensor) -> None:
        """Take the gradient that autograd has put in `parameter.grad`: its hook."""
        if not self.reduction.is_open:
            self._stray.drop(parameter)
            return
        with no_torch_overrides():
            self.update.poll()
            # In a backward inside the engine's, autograd calls this for each use.
            self.reduction.gradient_ready(parameter, may_be_last=self._direct.is_own())

    def zero_grad(self) -> None:
        """Collective. Drop the gradients of this step, also after a backward that raised."""
        assert self.is_whole, "other ranks have the rest"
        if not self._had_backward:
            return
        self.reduction.discard()
        self.update.drop_gradients()
        self.outside.owner.keeps_gradients = False
        self._had_backward.clear()
        if self.gatherer:
            self._catch_up(self.gatherer)

    def _catch_up(self, gatherer: Gatherer) -> None:
        """Join the gathers that other ranks started after this rank's backward had failed."""
        count = torch.tensor(len(self._gathers), dtype=torch.int64)
        counts = self.axis.group.stack(count).flatten().tolist()
        furthest = counts.index(max(counts))
        numbers = torch.zeros(counts[furthest], dtype=torch.int64)
        if self.axis.group.rank == furthest:
            gathered = [self.units.index(unit) for unit in self._gathers]
            numbers.copy_(torch.tensor(gathered, dtype=torch.int64))
        self.axis.group.broadcast(numbers, furthest)
        for number in numbers[len(self._gathers) :].tolist():
            unit = self.units[number]
            self.start_gather(unit, unit.weights.new_empty(unit.layout.size)).wait()
        gatherer.forget_all()

    # -- step pass

    def finish_step(self, lr: float, own_lr: Mapping[str, float] = EMPTY) -> StepResult:
        """Complete the gradient's sum and step. Collective.

        `own_lr`: parameter -> learning rate that it has in this step in place of `lr`.

        New weights may still be on their way to this rank when this returns. Layers wait for them;
        others call `wait_for_weights`.
        """
        self.wait_for_weights()  # of layers that did not run since the last step
        if not self._had_backward:
            raise HpczeroError("a step without a gradient: backward comes before it")
        self.reduction.refuse_after_failure()
        self.outside.check()
        self.outside.owner.keeps_gradients = False
        self.reduction.finish()
        self._had_backward.clear()
        self.absent.agree(self.reduction.tied)
        loss_scale, workers = self.loss_scale.value, self.workers
        scale = loss_scale / workers  # each has its part of a mean over all
        rates = checksum_of_rates(lr, own_lr)
        # all ranks meet here, and have ended their backward: now they may write the node's copy
        norms = self._norm.own_and_common(rates, workers) / scale
        read_norms = self.device.later(norms)
        host_sync = self.axis.group.connection.progress.snapshot()
        if self.update.reads_on_host():
            host_sync()
        changed = list(self.reduction.tied)
        number = self.updates + 1
        self.update.begin(Step(number, lr, own_lr, norms[0], read_norms, scale, changed))
        for unit in self.units:
            self.update.step(unit)
            self._start_arriving(unit)
        host_sync()
        _, norm = read_norms()
        finite = 0 <= norm < float("inf")
        if not norm < 0:  # all ranks are at one
            self.loss_scale = self.loss_scale.after(overflow=not finite)
        self.updates += finite
        if finite:
            self.absent.updated()
            self.update.carried_out(number)
        self.absent.begin_step()
        self.outside.accept()
        if self.alike and norm < 0:
            self.alike.refuse(self.units, lr, rates)
        bad = None if finite else self.reduction.bad.first(self._others)
        return StepResult(norm, loss_scale, bad)

    # -- the whole of it

    def begin_with_initial_values(self) -> None:
        """Give an engine that was made without values those of hpczero's own models. Collective."""
        self.renew(lambda unit: unit.fill_owned(self.initial_values))
        self.update.start()

    def begin_anew(self) -> None:
        """Forget all steps: the present weights are the first ones of a training."""
        self.wait_for_weights()
        for unit in self.units:
            update = self.update
            own = update.own_states(unit).values(), update.dealt_states(unit).values()
            for state in chain(update.states(unit).values(), *own):
                if state is not unit.master:
                    state.zero_()
        self.updates = 0
        self.absent.missed = {}
        self.loss_scale = LossScale.first(self.settings.train)
        self.update.take_numbers({}, 0)
        self.update.start()

    def parameter_count(self) -> int:
        """Return the size of the whole model. Collective where that is on several stages."""
        count = sum(
            slot.parameter.size
            for unit in self.units
            if unit not in self.counted_elsewhere
            for slot in unit.layout.slots
        )
        if self.pipeline is None:
            return count
        return int(self.pipeline.stack(torch.tensor(count, dtype=torch.int64)).sum())

    @property
    def losses_count(self) -> bool:
        """True if this rank's losses count: tensor rank 0 of the last stage.

        All tensor ranks have the same losses, and other stages none.
        """
        if self.tensor and self.tensor.rank:
            return False
        return self.pipeline is None or self.pipeline.rank + 1 == self.pipeline.size

    def close(self, room: int = 0) -> None:
        try:
            if self.is_whole:
                self.zero_grad()  # sums may be in flight, in memory that is given back
            self._end_averaged()
            self.complete_exchanges()
            self.wait_for_weights()
        finally:  # a step that has failed does so once more
            self.update.close()
            super().close(room)
