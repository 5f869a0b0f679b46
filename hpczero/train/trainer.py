"""The training loop. A step on every rank:

    take the prefetched micro-batches; all-reduce the weight of their targets if it varies
    run forward and backward (`StepRunner`); the engine reduces gradients meanwhile
    update the parameters (`Engine.finish_step`)
    all-reduce the loss, the requests to stop, and whether a save is still being written

The small all-reduce gives all ranks the same loss, and they stop at the same step boundary.
Rank 0 also reports and writes the run directory. Now and then a step's memory is measured
(`memory_account`).
"""

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch

from hpczero import env
from hpczero.checkpoint.save import SaveFailed
from hpczero.comm.objects import run_while_polling
from hpczero.comm.world import World
from hpczero.data.samples import Prefetcher
from hpczero.model.batch import MicroBatch
from hpczero.optim.learning_rate import learning_rate
from hpczero.parallel.step import StepRunner
from hpczero.parallel.zero.update import StepResult
from hpczero.spec.schema import Spec
from hpczero.train.batches import Batches, Tally, Validation, mixed
from hpczero.train.checkpointing import Checkpoints
from hpczero.train.console import Output
from hpczero.train.energy_meter import EnergyMeter
from hpczero.train.memory_account import MemoryAccount
from hpczero.train.process import Deadline, StopRequests, first_reason, seconds_of_save
from hpczero.train.rank_clock import RankClock
from hpczero.train.run_directory import RunDirectory
from hpczero.train.saved_states import saved_elements

_MOST_SKIPPED = 100  # steps in a row without an update after which the run gives up


@dataclass(frozen=True)
class Outcome:
    """Progress of the loop, equal on all ranks.

    `state`: "running", "finished", or, for a `reason`, "stopped" or "failed".
    """

    state: str
    steps: int
    reason: str = ""
    first_loss: float | None = None
    final_loss: float | None = None
    validation: Validation | None = None
    validated: int = 0  # the step after which `validation` was made
    saved: int = -1  # the step of the newest checkpoint that this run has written or begun from


@dataclass(frozen=True)
class Reporter:
    """Rank 0's output and run directory."""

    output: Output
    directory: RunDirectory

    def event(self, name: str, **values: object) -> None:
        self.output.event(name, **values)
        self.directory.event(name, **values)

    def close(self) -> None:
        self.output.close()
        self.directory.close()


class Trainer:
    """Runs the steps; on every rank, all methods are collective. Rank 0 has the `reporter`."""

    def __init__(
        self,
        spec: Spec,
        world: World,
        runner: StepRunner,
        batches: Batches,
        reporter: Reporter | None,
        checkpoints: Checkpoints | None = None,
        account: MemoryAccount | None = None,
        energy: EnergyMeter | None = None,
    ) -> None:
        self.spec = spec
        self.world = world
        self.batches = batches
        self.reporter = reporter
        self.checkpoints = checkpoints
        self.account = account
        self.runner = runner
        self.engine = runner.engine
        self.step_tokens = spec.train.global_batch * spec.seq_len
        self.skipped = 0  # steps in a row
        self._all_written = True  # all ranks have written their data of the save in flight
        self._stalled = 0.0  # seconds that the save in flight has held up so far
        self.folder = reporter.directory.path if reporter else None
        does = runner.stage, sum(map(len, batches.parts()))
        self.clock = RankClock(world, spec.train.log_every, self.folder, self._warn, *does)
        self.energy = energy
        estimate = seconds_of_save(world, saved_elements(self.engine)) if checkpoints else 0.0
        self.deadline = Deadline(env.deadline(), estimate) if reporter else None

    def train(self, first: int = 0) -> Outcome:
        """Run steps first .. train.steps - 1 (numbered from 1 in reports); there may be none."""
        steps = self.spec.train.steps
        outcome = Outcome("running" if first < steps else "finished", first, saved=first)
        prefetcher = Prefetcher(self.batches.training, first, steps - 1, self.spec.data.prefetch)
        with StopRequests(self.folder, self.deadline, self.world.status) as requests:
            try:
                for step in range(first, steps):
                    self._say_new_length(step)
                    outcome = self._keep(self._step(step, prefetcher, requests, outcome))
                    if outcome.state != "running":
                        break
            finally:
                prefetcher.close()
        self.clock.flush()
        self.clock.close()
        if self.energy:
            self.energy.note()
            self.energy.close()
        self.engine.wait_for_weights()
        return outcome

    def _warn(self, what: str, **facts: object) -> None:
        if self.reporter:
            self.reporter.event("WARN", what=what, **facts)

    def _say_new_length(self, step: int) -> None:
        """Say where sequences begin to be longer or shorter than before."""
        length = self.spec.at_step(step).seq_len
        if self.reporter and step and length != self.spec.at_step(step - 1).seq_len:
            self.reporter.event("sequences", step=step + 1, seq_len=length)

    def _step(
        self,
        step: int,
        prefetcher: Prefetcher[list[MicroBatch]],
        requests: StopRequests,
        before: Outcome,
    ) -> Outcome:
        self.world.status.at_step(step + 1)
        trace = self.world.trace
        if self.account:
            self.account.begin_step()
        self.clock.begin()
        began = time.perf_counter()
        communicated = self.world.ledger.seconds
        with trace.step(step + 1):
            with self.world.doing("data"):
                micro_batches, waited = prefetcher.next()
            lr = learning_rate(self.spec, step)
            self.engine.module.train()
            targets = self._targets(micro_batches)
            weight = targets or 1.0
            read_loss = self.runner.train(micro_batches, weight, trace)
            with trace.span("optimizer step"):
                result = self.engine.finish_step(lr)
            with trace.span("loss agreement"):
                loss, asked = self._agree(read_loss(), weight, requests)
        seconds = time.perf_counter() - began
        in_comm = self.world.ledger.seconds - communicated
        metrics: dict[str, Any] = {
            "step": step + 1,
            "loss": loss,
            "grad_norm": result.grad_norm,
            "lr": lr,
            **self._speed(seconds, waited, in_comm),
            **self._what_varies(result, targets),
        }
        self._end_step(step + 1, seconds, in_comm, waited)
        validation = None
        if self._evaluates_after(step) and not asked:
            began = time.perf_counter()
            with self.world.doing("evaluation"):
                validation, asked = self.evaluate(requests)
            metrics |= validation.facts() if validation else {}
            metrics["evaluation_seconds"] = time.perf_counter() - began
        if self.reporter:
            first = before.first_loss is None
            self._report(self.reporter, metrics, result, validation, first)
        return self._outcome(before, step + 1, loss, validation, asked, result)

    def _end_step(self, step: int, seconds: float, in_comm: float, waited: float) -> None:
        """Account for memory, time and energy; replicas that train apart join at the end."""
        memory = self.account.end_step(step) if self.account else None
        if self.reporter and memory:
            self.reporter.directory.memory(memory)
        if step == self.spec.train.steps:
            self.engine.come_together()
        self.clock.step(step, seconds, in_comm, waited)
        if self.energy:
            self.energy.step(step)

    def _speed(self, seconds: float, waited: float, in_comm: float) -> dict[str, float]:
        """Return the metrics of a step that took so long, and waited for data and for others."""
        return {
            "tokens": self.step_tokens,
            "step_seconds": seconds,
            "tokens_per_second": self.step_tokens / seconds,
            "data_seconds": waited,
            "comm_seconds": in_comm,
            "compute_seconds": seconds - waited - in_comm,
        }

    def _what_varies(self, result: StepResult, targets: float) -> dict[str, Any]:
        """Return the metrics of a step that not every run has."""
        metrics: dict[str, Any] = {}
        if self.engine.loss_scale.dynamic:
            metrics["loss_scale"] = result.loss_scale
        if self.spec.counts_targets:
            metrics["targets"] = targets
        if result.bad:
            metrics["skipped"] = True
        return metrics

    def _keep(self, outcome: Outcome) -> Outcome:
        """Conclude the save in flight; begin the next one if it is due, also after a failed one."""
        checkpoints = self.checkpoints
        ends = outcome.state in ("finished", "stopped")
        if checkpoints is None:
            return outcome
        due = outcome.state != "failed" and checkpoints.is_due(outcome.steps, ends)
        if checkpoints.saver.in_flight and (self._all_written or due or outcome.state != "running"):
            outcome = self._attempted(outcome, self._conclude)
        if due:
            outcome = self._attempted(outcome, self._save)
        unsaved = checkpoints.is_due(outcome.steps, ends) and outcome.saved != outcome.steps
        if outcome.state == "finished" and unsaved:
            reason = (
                "all steps are done, but the last one is not saved: "
                "started again, the run goes on from its newest checkpoint"
            )
            return replace(outcome, state="failed", reason=reason)
        return outcome

    def _save(self, outcome: Outcome) -> Outcome:
        assert self.checkpoints
        ends = outcome.state != "running"
        began = time.perf_counter()
        with self.world.doing("save"):
            self.checkpoints.begin(outcome.steps, ends)
        self._stalled = time.perf_counter() - began
        return self._conclude(outcome) if ends or not self.checkpoints.asynchronous else outcome

    def _attempted(self, outcome: Outcome, action: Callable[[Outcome], Outcome]) -> Outcome:
        """Return what the action does; if the save fails, report that, and end a running run.

        With `checkpoint.on_error = "continue"` the run goes on.
        """
        try:
            return action(outcome)
        except SaveFailed as error:
            self._warn(str(error), step=outcome.steps)
            if self.spec.checkpoint.on_error == "stop" and outcome.state == "running":
                reason = f'{error}; with checkpoint.on_error = "continue" training goes on'
                return replace(outcome, state="failed", reason=reason)
            return outcome

    def _conclude(self, outcome: Outcome) -> Outcome:
        assert self.checkpoints
        reporter = self.reporter
        began = time.perf_counter()
        with self.world.doing("save"):
            run_while_polling(self.world, lambda: reporter.directory.sync() if reporter else None)
            saved, not_removed = self.checkpoints.conclude()
        stalled = self._stalled + time.perf_counter() - began
        self.clock.saved(saved.own_seconds)
        if self.deadline:
            self.deadline.saved(saved.seconds)
        if reporter:
            reporter.event(
                "save",
                step=saved.step,
                path=str(saved.path),
                bytes=saved.size,
                seconds=saved.seconds,
                stalled=stalled,
            )
        if not_removed:
            self._warn(not_removed, step=outcome.steps)
        return replace(outcome, saved=saved.step)

    def _targets(self, batches: Sequence[MicroBatch]) -> float:
        """Return the sum of all targets' weights in the step, which backward divides by.

        It is known before unless targets are left out. Of the ranks that share a data rank's
        samples all have the same.
        """
        if not self.spec.counts_targets:
            return self.step_tokens
        weight = torch.tensor([sum(batch.loss_weight for batch in batches)], dtype=torch.float64)
        self.world.everyone.all_reduce(weight)
        return weight.item() * self.batches.data_ranks / self.world.size

    def _agree(self, loss_sum: float, weight: float, requests: StopRequests) -> tuple[float, str]:
        """Return the mean loss over all ranks' targets, and the reason to stop ("": none)."""
        writing = self.checkpoints is not None and not self.checkpoints.saver.written
        (total, writers), asked = self._sum_over_ranks(
            [loss_sum * self.engine.losses_count, float(writing)], requests
        )
        self._all_written = writers == 0
        return total / weight, asked

    def _sum_over_ranks(
        self, values: list[float], requests: StopRequests
    ) -> tuple[list[float], str]:
        """Return the sums of the values, and the first of REASONS that any rank has seen."""
        sums = torch.tensor([*values, *map(float, requests.pending())], dtype=torch.float64)
        self.world.everyone.all_reduce(sums)
        return sums[: len(values)].tolist(), first_reason(sums[len(values) :].tolist())

    def _evaluates_after(self, step: int) -> bool:
        every = self.spec.train.eval_every
        due = every > 0 and (step + 1) % every == 0
        last = step + 1 == self.spec.train.steps
        return (due or last) and any(one.evaluation_batches() for one in self.batches.evaluations())

    def evaluate(self, requests: StopRequests) -> tuple[Validation | None, str]:
        """Return the loss on the validation text; a request to stop ends it without a result.

        Of replicas that train apart it is the loss of their common weights.
        """
        self.engine.module.eval()
        apart = self.engine.update.trains_apart
        found = []
        with torch.no_grad(), self.engine.averaged() if apart else nullcontext():
            parts = zip(self.batches.source.parts(), self.batches.evaluations(), strict=True)
            for part, evaluation in parts:
                tally, asked = self._evaluate(evaluation, requests)
                if asked or not tally.weight:  # nothing to predict
                    return None, asked
                windows = part.source.windows("validation")
                sizes = windows, evaluation.targets_of_split("validation")
                found.append((part, tally.validation(*sizes)))
        return mixed(found), ""

    def _evaluate(self, evaluation: Batches, requests: StopRequests) -> tuple[Tally, str]:
        tally = Tally()
        for number in range(evaluation.evaluation_batches()):
            batches = evaluation.evaluation(number)
            tally_here = Tally.of(batches, self.runner.evaluate(batches))
            values = [value * self.engine.losses_count for value in tally_here.values()]
            sums, asked = self._sum_over_ranks(values, requests)
            if asked:
                return tally, asked
            tally += Tally(*sums)
        return tally, ""

    def _report(
        self,
        reporter: Reporter,
        metrics: dict[str, Any],
        result: StepResult,
        validation: Validation | None,
        first: bool,
    ) -> None:
        step = metrics["step"]
        reporter.directory.metrics(metrics)
        if first:
            reporter.event(
                "first", step=step, loss=metrics["loss"], seconds=metrics["step_seconds"]
            )
        if result.bad:
            facts = {"where": str(result.bad), "loss_scale": result.loss_scale}
            self._warn("gradient not finite, step skipped", step=step, **facts)
        reporter.output.step(step, metrics)
        if validation:
            facts = validation.facts() | self.batches.facts_after(step)
            reporter.event("eval", step=step, **facts)

    def _outcome(
        self,
        before: Outcome,
        steps: int,
        loss: float,
        validation: Validation | None,
        asked: str,
        result: StepResult,
    ) -> Outcome:
        first = loss if before.first_loss is None else before.first_loss
        self.skipped = self.skipped + 1 if result.bad else 0
        done = steps == self.spec.train.steps
        state, reason = "finished" if done else "running", ""
        if result.bad and (self.skipped == _MOST_SKIPPED or done):
            what = f"{self.skipped} steps in a row had a gradient that is not finite ({result.bad})"
            state, reason = "failed", f"{what}: a lower optimizer.lr or a longer warm-up may help"
        elif asked and not done:
            state, reason = "stopped", asked
        after = replace(
            before, state=state, steps=steps, reason=reason, first_loss=first, final_loss=loss
        )
        return replace(after, validation=validation, validated=steps) if validation else after
