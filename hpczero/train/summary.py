"""The figures of a run at its end: summary.json and the closing words.

Those of the run and of its last job are apart: a run may have taken several jobs.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from hpczero.spec.show import counted
from hpczero.train.output import loss

_VALIDATION = "validation_"


@dataclass(frozen=True)
class Earlier:
    """The steps that were done before this job, as metrics.jsonl tells them.

    Of lines that are missing it knows nothing.
    """

    steps: int = 0  # lines
    tokens: int = 0
    seconds: float = 0.0
    first_loss: float | None = None  # of step 1
    final_loss: float | None = None
    validation: dict[str, Any] | None = None  # the newest, with its step

    @classmethod
    def of(cls, lines: Iterable[str]) -> "Earlier":
        steps, tokens, seconds = 0, 0, 0.0
        first_loss = final_loss = validation = None
        for line in lines:
            metrics = json.loads(line)
            steps, final_loss = steps + 1, _number(metrics.get("loss"))
            tokens += int(_number(metrics.get("tokens")) or 0)
            seconds += _number(metrics.get("step_seconds")) or 0.0
            if metrics["step"] == 1:
                first_loss = final_loss
            if _number(metrics.get("validation_loss")) is not None:
                validation = _validation_of(metrics)
        return cls(steps, tokens, seconds, first_loss, final_loss, validation)


@dataclass(frozen=True)
class LastJob:
    """The work of this job: the steps after `first`, in so many seconds of the training loop."""

    first: int
    steps: int
    step_tokens: int
    seconds: float
    ranks: int
    first_loss: float | None
    final_loss: float | None

    @property
    def tokens(self) -> int:
        return self.steps * self.step_tokens

    def facts(self) -> dict[str, Any]:
        return {
            "first_step": self.first + 1 if self.steps else None,
            "steps": self.steps,
            "first_loss": self.first_loss,
            "tokens": self.tokens,
            "seconds": self.seconds,
            "tokens_per_second": self.tokens / self.seconds,
            "ranks": self.ranks,
        }


def of_run(job: LastJob, earlier: Earlier, validation: dict[str, Any] | None) -> dict[str, Any]:
    """The figures of the whole run; `last_job` has those of its last job.

    Of steps whose lines are missing, tokens are counted as this job's, and neither first loss nor time are known.
    """
    known = earlier.steps == job.first
    seconds = earlier.seconds + job.seconds if known else None
    tokens = earlier.tokens + (job.first - earlier.steps) * job.step_tokens + job.tokens
    first_loss = earlier.first_loss if job.first else job.first_loss
    return {
        "first_loss": first_loss,
        "final_loss": earlier.final_loss if job.final_loss is None else job.final_loss,
        **(validation or earlier.validation or {"validation_loss": None}),
        "tokens": tokens,
        "seconds": seconds,
        "tokens_per_second": tokens / seconds if seconds else None,
        "last_job": job.facts(),
    }


def closing_words(summary: dict[str, Any], what: str) -> list[str]:
    """Return the lines that end a run; `what` was trained."""
    job, steps = summary["last_job"], summary["steps"]
    pace = f"({job['seconds']:.0f} s, {job['tokens_per_second']:,.0f} tokens/s on {counted(job['ranks'], 'rank')})"
    whole = job["steps"] == steps
    words = [f"trained:    {what}, on {summary['tokens']:,} tokens in {counted(steps, 'step')}" + (f" {pace}" if whole else "")]
    if job["steps"] and not whole:
        span = f"steps {job['first_step']:,} to {steps:,}" if job["steps"] > 1 else f"step {steps:,}"
        words.append(f"last job:   {span}, {job['tokens']:,} tokens {pace}, loss {loss(job['first_loss'])} at its first step")
    words.append(f"loss:       {loss(summary['first_loss'])} at the first step, {loss(summary['final_loss'])} at the last (nats per token)")
    return words + _validation_words(summary)


def _validation_words(summary: dict[str, Any]) -> list[str]:
    if summary["validation_loss"] is None:
        return []
    at = f" after step {summary['validation_step']:,}" if summary["validation_step"] != summary["steps"] else ""
    error, tokens = summary.get("validation_standard_error"), summary.get("validation_tokens")
    whole = tokens is not None and tokens == summary["validation_tokens_of_split"]
    sampled = f" over {tokens:,} of {summary['validation_tokens_of_split']:,} tokens" if tokens is not None and not whole else ""
    bound = "" if whole or tokens is None else f" ± {loss(error)} (standard error),"
    found = f"{summary['validation_loss']:.4f}{bound}{sampled or (' over the whole split' if whole else '')}{at}"
    return [f"validation: {found}; the text's unigram entropy is {summary['unigram_entropy']:.4f}"]


def _validation_of(metrics: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in metrics.items() if name.startswith(_VALIDATION)} | {"validation_step": metrics["step"]}


def _number(value: Any) -> float | None:
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) else None
