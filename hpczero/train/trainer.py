"""The training loop. A step on every rank:

    read the micro-batches, forward and backward (the engine sums gradients meanwhile), the optimizer's step, one small all-reduce that carries
    the loss, the requests to stop, and whether a save is still being written: so all ranks know the same loss and stop at the same step boundary.

Rank 0 also speaks and writes the run directory.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from hpczero import env
from hpczero.checkpoint.save import SaveFailed
from hpczero.comm.objects import run_while_polling
from hpczero.comm.world import World
from hpczero.data.sampler import Prefetcher
from hpczero.model.batch import MicroBatch
from hpczero.optim.learning_rate import learning_rate
from hpczero.parallel.step import StepRunner
from hpczero.parallel.zero.engine import StepResult
from hpczero.spec.schema import Spec
from hpczero.train.batches import Batches, Tally, Validation
from hpczero.train.checkpointing import Checkpoints
from hpczero.train.console import Output
from hpczero.train.run_directory import RunDirectory
from hpczero.train.stop import REASONS, WRITTEN, Deadline, StopRequests

_MOST_SKIPPED = 100  # steps in a row without an update after which the run gives up


@dataclass(frozen=True)
class Outcome:
    """How far the loop came, equal on all ranks: "running", "finished", "stopped" (by `reason`) or "failed" (for `reason`)."""

    state: str
    steps: int
    reason: str = ""
    first_loss: float | None = None
    final_loss: float | None = None
    validation: Validation | None = None
    validated: int = 0  # the step after which that was
    saved: int = -1  # the step of the newest checkpoint that this run has written or begun from


@dataclass(frozen=True)
class Reporter:
    """Where rank 0 speaks and writes."""

    output: Output
    directory: RunDirectory

    def event(self, name: str, **values: object) -> None:
        self.output.event(name, **values)
        self.directory.event(name, **values)

    def close(self) -> None:
        self.output.close()
        self.directory.close()


class Trainer:
    def __init__(
        self,
        spec: Spec,
        world: World,
        way: StepRunner,
        batches: Batches,
        voice: Reporter | None,
        checkpoints: Checkpoints | None = None,
    ) -> None:
        self.spec, self.world, self.batches, self.voice, self.checkpoints = (
            spec,
            world,
            batches,
            voice,
            checkpoints,
        )
        self.way, self.engine = way, way.engine
        self.step_tokens = spec.train.global_batch * spec.model.seq_len
        self.skipped = 0
        self._all_written = True  # by all ranks, of the save under way
        self.deadline = Deadline(env.deadline(), self._save_estimate()) if voice else None

    def train(self, first: int = 0) -> Outcome:
        """Steps first .. train.steps - 1, numbered from 1 wherever people see them; there may be none left."""
        steps = self.spec.train.steps
        outcome = Outcome("running" if first < steps else "finished", first, saved=first)
        prefetcher = Prefetcher(self.batches.training, first, steps - 1, self.spec.data.prefetch)
        with StopRequests(
            self.voice.directory.path if self.voice else None, self.deadline
        ) as requests:
            try:
                for step in range(first, steps):
                    outcome = self._keep(self._step(step, prefetcher, requests, outcome))
                    if outcome.state != "running":
                        break
            finally:
                prefetcher.close()
        self.engine.weights_here()
        return outcome

    def _save_estimate(self) -> float:
        """Seconds, from what this node writes: three fp32 numbers a parameter."""
        own = sum(unit.owned.stop - unit.owned.start for unit in self.engine.units)
        return 12 * own * self.world.local_size / WRITTEN if self.checkpoints else 0.0

    def _step(
        self,
        step: int,
        prefetcher: Prefetcher[list[MicroBatch]],
        requests: StopRequests,
        before: Outcome,
    ) -> Outcome:
        self.world.status.at_step(step + 1)
        trace = self.world.trace
        began, communicated = time.perf_counter(), self.world.ledger.seconds
        with trace.step(step + 1):
            with trace.span("data"):
                micro_batches, waited = prefetcher.next()
            lr = learning_rate(self.spec, step)
            self.engine.module.train()
            read_loss = self.way.train(micro_batches, self.step_tokens, trace)
            with trace.span("optimizer step"):
                result = self.engine.finish_step(lr)
            with trace.span("loss agreement"):
                loss, asked = self._agree(read_loss(), requests)
        seconds = time.perf_counter() - began
        in_comm = self.world.ledger.seconds - communicated
        metrics: dict[str, Any] = {
            "step": step + 1,
            "loss": loss,
            "grad_norm": result.grad_norm,
            "lr": lr,
            "tokens": self.step_tokens,
            "step_seconds": seconds,
            "tokens_per_second": self.step_tokens / seconds,
            "data_seconds": waited,
            "comm_seconds": in_comm,
            "compute_seconds": seconds - waited - in_comm,
        }
        if self.engine.loss_scale.dynamic:
            metrics["loss_scale"] = result.loss_scale
        if result.bad:
            metrics["skipped"] = True
        validation = None
        if self._evaluates_after(step) and not asked:
            with trace.span("evaluation"):
                validation, asked = self.evaluate(requests)
            metrics |= validation.facts() if validation else {}
        if self.voice:
            self._report(self.voice, metrics, result, first=before.first_loss is None)
        return self._outcome(before, step + 1, loss, validation, asked, result)

    def _keep(self, outcome: Outcome) -> Outcome:
        """Brings the save under way to its end, and begins the next one when it is time: also when the one before has failed."""
        checkpoints, ends = self.checkpoints, outcome.state in ("finished", "stopped")
        if checkpoints is None:
            return outcome
        due = outcome.state != "failed" and checkpoints.is_due(outcome.steps, ends)
        if checkpoints.saver.in_flight and (self._all_written or due or outcome.state != "running"):
            outcome = self._attempted(outcome, self._conclude)
        if due:
            outcome = self._attempted(outcome, self._save)
        unsaved = checkpoints.is_due(outcome.steps, ends) and outcome.saved != outcome.steps
        if outcome.state == "finished" and unsaved:
            reason = "all steps are done, but the last one is not saved: started again, the run goes on from its newest checkpoint"
            return replace(outcome, state="failed", reason=reason)
        return outcome

    def _save(self, outcome: Outcome) -> Outcome:
        assert self.checkpoints
        ends = outcome.state != "running"
        with self.world.trace.span("save"):
            self.checkpoints.begin(outcome.steps, ends)
        return self._conclude(outcome) if ends or not self.checkpoints.behind else outcome

    def _attempted(self, outcome: Outcome, action: Callable[[Outcome], Outcome]) -> Outcome:
        """What has failed ends the run if that is asked for; one that ends anyway still has its last save before it."""
        try:
            return action(outcome)
        except SaveFailed as error:
            if self.voice:
                self.voice.event("WARN", what=str(error), step=outcome.steps)
            if self.spec.checkpoint.on_error == "stop" and outcome.state == "running":
                return replace(
                    outcome,
                    state="failed",
                    reason=f'{error}; with checkpoint.on_error = "continue" training goes on',
                )
            return outcome

    def _conclude(self, outcome: Outcome) -> Outcome:
        assert self.checkpoints
        directory = self.voice.directory if self.voice else None
        run_while_polling(self.world, lambda: directory.sync() if directory else None)
        saved, left = self.checkpoints.conclude()
        if self.deadline:
            self.deadline.saved(saved.seconds)
        if self.voice:
            self.voice.event(
                "save",
                step=saved.step,
                path=str(saved.path),
                bytes=saved.size,
                seconds=saved.seconds,
            )
            if left:
                self.voice.event("WARN", what=left, step=outcome.steps)
        return replace(outcome, saved=saved.step)

    def _agree(self, loss_sum: float, requests: StopRequests) -> tuple[float, str]:
        """The mean loss over all ranks' tokens, and the first reason to stop that any rank has seen."""
        busy = self.checkpoints is not None and not self.checkpoints.saver.written
        (total, still_busy), asked = self._sum_over_ranks(
            [loss_sum * self.engine.losses_count, float(busy)], requests
        )
        self._all_written = still_busy == 0
        return total / self.step_tokens, asked

    def _sum_over_ranks(
        self, values: list[float], requests: StopRequests
    ) -> tuple[list[float], str]:
        together = torch.tensor([*values, *map(float, requests.pending())], dtype=torch.float64)
        self.world.everyone.all_reduce(together)
        counts = together[len(values) :].tolist()
        return together[: len(values)].tolist(), next(
            (reason for reason, count in zip(REASONS, counts, strict=True) if count), ""
        )

    def _evaluates_after(self, step: int) -> bool:
        every, last = self.spec.train.eval_every, step + 1 == self.spec.train.steps
        return self.batches.evaluation_batches() > 0 and (
            last or (every > 0 and (step + 1) % every == 0)
        )

    def evaluate(self, requests: StopRequests) -> tuple[Validation | None, str]:
        """The loss on the validation text: every rank takes its part of each batch. A request to stop ends it without a result."""
        self.engine.module.eval()
        tally = Tally()
        with torch.no_grad():
            for number in range(self.batches.evaluation_batches()):
                batches = self.batches.evaluation(number)
                own = Tally.of(batches, self.way.evaluate(batches)).values()
                sums, asked = self._sum_over_ranks(
                    [value * self.engine.losses_count for value in own], requests
                )
                if asked:
                    return None, asked
                tally += Tally(*sums)
        return tally.validation(
            self.batches.source.windows("validation"), self.spec.model.seq_len
        ), ""

    def _report(
        self, voice: Reporter, metrics: dict[str, Any], result: StepResult, first: bool
    ) -> None:
        voice.directory.metrics(metrics)
        if first:
            voice.event(
                "first", step=metrics["step"], loss=metrics["loss"], seconds=metrics["step_seconds"]
            )
        if result.bad:
            scale = result.loss_scale
            voice.event(
                "WARN",
                what="gradient not finite, step skipped",
                step=metrics["step"],
                where=str(result.bad),
                loss_scale=scale,
            )
        voice.output.step(metrics["step"], metrics)
        if "validation_loss" in metrics:
            entropy = self.batches.source.unigram_entropy("validation")
            said = {
                name: figure for name, figure in metrics.items() if name.startswith("validation_")
            }
            voice.event("eval", step=metrics["step"], **said, unigram_entropy=entropy)

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
        found = replace(
            before, state=state, steps=steps, reason=reason, first_loss=first, final_loss=loss
        )
        return replace(found, validation=validation, validated=steps) if validation else found
