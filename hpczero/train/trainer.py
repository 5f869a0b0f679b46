"""The training loop. A step on every rank:

    read the micro-batches, forward and backward (the engine sums gradients meanwhile), the optimizer's step, one small all-reduce that carries
    the loss and the requests to stop: so all ranks know the same loss and stop at the same step boundary.

Rank 0 also speaks and writes the run directory.
"""

import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hpczero.comm.world import World
from hpczero.data.prefetch import Prefetcher
from hpczero.model.batch import MicroBatch
from hpczero.optim.learning_rate import learning_rate
from hpczero.parallel.zero import BadGradient, Engine, StepResult
from hpczero.spec.schema import Spec
from hpczero.train.batches import Batches
from hpczero.train.output import Output
from hpczero.train.rundir import RunDirectory
from hpczero.train.signals import REASONS, StopRequests

_MOST_SKIPPED = 100  # steps in a row without an update after which the run gives up


@dataclass(frozen=True)
class Outcome:
    """How the loop ended, equal on all ranks: "finished", "stopped" (by `reason`) or "failed" (for `reason`)."""

    state: str
    steps: int
    reason: str = ""
    first_loss: float | None = None
    final_loss: float | None = None
    validation_loss: float | None = None


@dataclass(frozen=True)
class Voice:
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
    def __init__(self, spec: Spec, world: World, engine: Engine, module: nn.Module, batches: Batches, voice: Voice | None) -> None:
        self.spec, self.world, self.engine, self.module, self.batches, self.voice = spec, world, engine, module, batches, voice
        self.step_tokens = spec.train.global_batch * spec.model.seq_len
        self.skipped = 0

    def train(self, first: int = 0) -> Outcome:
        """Steps first .. train.steps - 1, numbered from 1 wherever people see them."""
        steps = self.spec.train.steps
        outcome = Outcome("finished", first)
        prefetcher = Prefetcher(self.batches.training, first, steps - 1, self.spec.data.prefetch)
        with StopRequests(self.voice.directory.path if self.voice else None) as requests:
            try:
                for step in range(first, steps):
                    outcome = self._step(step, prefetcher, requests, outcome)
                    if outcome.state != "finished":
                        break
            finally:
                prefetcher.close()
        return outcome

    def _step(self, step: int, prefetcher: Prefetcher[list[MicroBatch]], requests: StopRequests, before: Outcome) -> Outcome:
        began, communicated = time.perf_counter(), self.world.ledger.seconds
        micro_batches, waited = prefetcher.next()
        lr = learning_rate(self.spec, step)
        loss_sum = self._forward_backward(micro_batches)
        result = self.engine.finish_step(lr)
        loss, asked = self._agree(loss_sum, requests)
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
        last = step + 1 == self.spec.train.steps
        validation = before.validation_loss
        every = self.spec.train.eval_every
        if self.batches.evaluation_batches() and (last or (every and (step + 1) % every == 0 and not asked)):
            metrics["validation_loss"] = validation = self.evaluate()
        if self.voice:
            self._report(self.voice, metrics, result, first=before.first_loss is None)
        return self._outcome(before, step + 1, loss, validation, asked, result)

    def _forward_backward(self, micro_batches: list[MicroBatch]) -> float:
        """The loss is weighted by tokens, so that every way to cut the global batch gives the same gradient."""
        self.module.train()
        self.engine.begin_step()
        filled = [batch for batch in micro_batches if batch.token_count]
        total = 0.0
        for number, batch in enumerate(filled):
            loss = self.module(batch)
            self.engine.backward(loss / self.step_tokens, last=number + 1 == len(filled))
            total += loss.item()
        return total

    def _agree(self, loss_sum: float, requests: StopRequests) -> tuple[float, str]:
        """The mean loss over all ranks' tokens, and the first reason to stop that any rank has seen."""
        together = torch.tensor([loss_sum, *map(float, requests.pending())], dtype=torch.float64)
        self.world.everyone.all_reduce(together)
        asked = next((reason for reason, count in zip(REASONS, together[1:].tolist(), strict=True) if count), "")
        return float(together[0]) / self.step_tokens, asked

    def evaluate(self) -> float:
        """The mean loss on the validation text, in nats per token. Every rank takes its part of each batch."""
        self.module.eval()
        sums = torch.zeros(2, dtype=torch.float64)
        with torch.no_grad():
            for number in range(self.batches.evaluation_batches()):
                for batch in self.batches.evaluation(number):
                    if batch.token_count:
                        sums += torch.tensor([self.module(batch).item(), batch.token_count])
        self.world.everyone.all_reduce(sums)
        return float(sums[0] / sums[1])

    def _report(self, voice: Voice, metrics: dict[str, Any], result: StepResult, first: bool) -> None:
        voice.directory.metrics(metrics)
        if first:
            voice.event("first", step=metrics["step"], loss=metrics["loss"], seconds=metrics["step_seconds"])
        if result.bad:
            scale = result.loss_scale
            voice.event("WARN", what="gradient not finite, step skipped", step=metrics["step"], where=_where(result.bad), loss_scale=scale)
        voice.output.step(metrics["step"], metrics)
        if "validation_loss" in metrics:
            entropy = self.batches.source.unigram_entropy("validation")
            voice.event("eval", step=metrics["step"], validation_loss=metrics["validation_loss"], unigram_entropy=entropy)

    def _outcome(self, before: Outcome, steps: int, loss: float, validation: float | None, asked: str, result: StepResult) -> Outcome:
        first = loss if before.first_loss is None else before.first_loss
        self.skipped = self.skipped + 1 if result.bad else 0
        state, reason = "finished", ""
        if result.bad and self.skipped == _MOST_SKIPPED:
            what = f"{self.skipped} steps in a row had a gradient that is not finite ({_where(result.bad)})"
            state, reason = "failed", f"{what}: lower optimizer.lr, or use bf16"
        elif asked and steps < self.spec.train.steps:
            state, reason = "stopped", asked
        return Outcome(state, steps, reason, first, loss, validation)


def _where(bad: BadGradient) -> str:
    return f"first in {bad.tensor} of data rank {bad.data_rank}" if bad.tensor else "only the sum over the ranks"
