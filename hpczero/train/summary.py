"""The figures of a run: at its end (summary.json, the closing words) and over its last steps.

Figures of the run and of its last job are apart: a run may have taken several jobs.
"""

import json
import time
from collections import deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

from hpczero.text import format_bytes, format_count, format_duration, format_loss

if TYPE_CHECKING:
    from hpczero.planner.outlook import Outlook

_VALIDATION = "validation_"
_OR = " or "  # between the kernels that different ranks used


@dataclass(frozen=True)
class Earlier:
    """The steps that were done before this job, as far as metrics.jsonl has lines of them."""

    steps: int = 0  # lines
    tokens: int = 0
    seconds: float = 0.0
    first_loss: float | None = None  # of step 1
    final_loss: float | None = None
    validation: dict[str, Any] | None = None  # the newest, with its step
    lost_steps: int = 0  # that are computed again
    lost_seconds: float = 0.0  # of them, and of the evaluations after them
    lost_until: str | None = None  # when the last of them had been done

    @classmethod
    def of(cls, lines: Iterable[str], again: Iterable[str] = ()) -> "Earlier":
        """Read the lines of the steps that count, and of those that are computed `again`."""
        steps = 0
        tokens = 0
        seconds = 0.0
        first_loss = final_loss = validation = None
        for line in lines:
            metrics = json.loads(line)
            steps += 1
            final_loss = _number(metrics.get("loss"))
            tokens += int(_number(metrics.get("tokens")) or 0)
            seconds += _number(metrics.get("step_seconds")) or 0.0
            if metrics["step"] == 1:
                first_loss = final_loss
            if _number(metrics.get("validation_loss")) is not None:
                validation = _validation_of(metrics)
        lost = list(map(json.loads, again))
        known = [line.get(key) for line in lost for key in ("step_seconds", "evaluation_seconds")]
        lost_seconds = sum(_number(seconds) or 0.0 for seconds in known)
        lost_until = max((str(line.get("time", "")) for line in lost), default=None)
        whole = first_loss, final_loss, validation
        return cls(steps, tokens, seconds, *whole, len(lost), lost_seconds, lost_until)

    @property
    def lost(self) -> dict[str, Any]:
        """Return what is lost as facts of an event; nothing if nothing is."""
        if not self.lost_steps:
            return {}
        names = "lost_steps", "lost_seconds", "lost_until"
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True)
class LastJob:
    """The work of this job: the steps after `first`, in `seconds` of the training loop."""

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
    """Return the figures of the whole run; `last_job` has those of its last job.

    A step whose line is missing counts with this job's tokens; the run's time is then unknown.
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


def fullest(line: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return the summary of a line of memory.jsonl; `predicted` is null where nothing was."""
    if line is None:
        return None
    facts = {name: line[name] for name in ("step", "rank", "host", "held")}
    return facts | {"predicted": sum(line["predicted"].values()) or None}


def measured_step(seconds: Collection[float], predicted: "Outlook | None") -> dict[str, Any] | None:
    """Return the median of this job's last steps, beside what was predicted; None without any."""
    if not seconds:
        return None
    return {
        "seconds": median(seconds),
        "steps": len(seconds),
        "predicted": predicted.as_data() if predicted else None,
    }


def closing_words(summary: dict[str, Any], what: str) -> list[str]:
    """Return the lines that end a run; `what` was trained."""
    job = summary["last_job"]
    steps = summary["steps"]
    speed = f"{job['tokens_per_second']:,.0f} tokens/s on {format_count(job['ranks'], 'rank')}"
    pace = f"({job['seconds']:.0f} s, {speed})"
    alone = job["steps"] == steps  # the run took this job only
    trained = f"{what}, on {summary['tokens']:,} tokens in {format_count(steps, 'step')}"
    words = [f"trained:    {trained} {pace}" if alone else f"trained:    {trained}"]
    if job["steps"] and not alone:
        several = f"steps {job['first_step']:,} to {steps:,}"
        span = several if job["steps"] > 1 else f"step {steps:,}"
        at_first = f"loss {format_loss(job['first_loss'])} at its first step"
        words.append(f"last job:   {span}, {job['tokens']:,} tokens {pace}, {at_first}")
    first, final = format_loss(summary["first_loss"]), format_loss(summary["final_loss"])
    words.append(f"loss:       {first} at the first step, {final} at the last (nats per token)")
    words += _validation_words(summary) + _memory_words(summary.get("fullest"))
    return words + _step_words(summary.get("step"))


def ending_words(
    summary: dict[str, Any], directory: object, planned: int, saved: bool
) -> list[str]:
    """Return the lines that say how the run ended, of `planned` steps.

    `saved`: there is a checkpoint of the last step.
    """
    state = summary["state"]
    reason = summary["reason"]
    steps = summary["steps"]
    words = [f"run:        {directory} (metrics.jsonl, memory.jsonl, events.jsonl, summary.json)"]
    if not summary["last_job"]["steps"]:
        words.append(f"nothing was left to do: {steps} steps are done, and train.steps = {planned}")
    if state == "stopped":
        again = "started again, it goes on there" if saved else "no checkpoint was saved there"
        words.append(f"stopped by {reason} after step {steps} of {planned}: {again}")
    if state == "failed":
        words.append(f"failed: {reason}")
    return words


def kernels_of_ranks(choices_of_ranks: Iterable[Mapping[str, str]]) -> dict[str, str]:
    """Return the kernels that any rank used: the stages of a pipeline use different operations."""
    names: dict[str, set[str]] = {}
    for choices in choices_of_ranks:
        for operation, name in choices.items():
            names.setdefault(operation, set()).add(name)
    return {operation: _OR.join(sorted(used)) for operation, used in sorted(names.items())}


def mixed_kernels(kernels: Mapping[str, str]) -> list[str]:
    """Return the operations for which ranks used different kernels."""
    return [f"{operation}: {names}" for operation, names in kernels.items() if _OR in names]


def _validation_words(summary: dict[str, Any]) -> list[str]:
    if summary["validation_loss"] is None:
        return []
    step = summary["validation_step"]
    at = f" after step {step:,}" if step != summary["steps"] else ""
    result = f"{summary['validation_loss']:.4f}{_extent(summary)}{at}"
    entropy = f"the text's unigram entropy is {summary['unigram_entropy']:.4f}"
    return [f"validation: {result}; {entropy}"]


def _memory_words(fullest: Mapping[str, Any] | None) -> list[str]:
    if fullest is None:
        return []
    where = f"rank {fullest['rank']} on {fullest['host']}, at step {fullest['step']:,}"
    predicted = fullest["predicted"]
    beside = f" (predicted: {format_bytes(predicted)})" if predicted else ""
    return [f"memory:     at most {format_bytes(fullest['held'])}: {where}{beside}"]


def _step_words(step: Mapping[str, Any] | None) -> list[str]:
    said = (step or {}).get("predicted") or {}
    if not step or "step_seconds" not in said:
        return []
    predicted = f"{said['step_seconds']:.3g} s predicted for {said['cluster']}"
    return [f"a step:     {step['seconds']:.3g} s in the median, {predicted}"]


def _extent(summary: dict[str, Any]) -> str:
    """Return how much of the split was read, and the standard error; "" if metrics say neither."""
    tokens = summary.get("validation_tokens")
    if tokens is None:
        return ""
    of_split = summary["validation_tokens_of_split"]
    if tokens == of_split:
        return " over the whole split"
    error = format_loss(summary.get("validation_standard_error"))
    return f" ± {error} (standard error), over {tokens:,} of {of_split:,} tokens"


def _validation_of(metrics: dict[str, Any]) -> dict[str, Any]:
    figures = {name: value for name, value in metrics.items() if name.startswith(_VALIDATION)}
    return figures | {"validation_step": metrics["step"]}


def _number(value: Any) -> float | None:
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) else None


# -- the last steps --------------------------------------------------------------------------------

# Of one step: step, loss, grad_norm, lr, tokens, tokens_per_second, and the seconds step_seconds,
# data_seconds, comm_seconds, compute_seconds.
Metrics = Mapping[str, Any]


def tokens_per_second(steps: Collection[Metrics]) -> float | None:
    seconds = _sum(steps, "step_seconds")
    return _sum(steps, "tokens") / seconds if seconds > 0 else None


def shares(steps: Collection[Metrics]) -> dict[str, float]:
    """Return the shares of the steps' time in computation, communication, data and the rest."""
    seconds = _sum(steps, "step_seconds")
    if seconds <= 0:
        return {}
    parts = {"compute": "compute_seconds", "communication": "comm_seconds", "data": "data_seconds"}
    known = {kind: _sum(steps, key) / seconds for kind, key in parts.items()}
    return known | {"other": max(0.0, 1.0 - sum(known.values()))}


def _sum(steps: Collection[Metrics], key: str) -> float:
    return sum(float(metrics.get(key) or 0.0) for metrics in steps)


class Pace:
    """Time left, from the pace of the last steps by the clock: evaluations and saves count."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self._seen: deque[tuple[float, int]] = deque(maxlen=200)

    def step(self, step: int, now: float | None = None) -> None:
        self._seen.append((time.monotonic() if now is None else now, step))

    def left(self) -> str:
        """Return h:mm:ss, or "?" as long as nothing can be said."""
        if len(self._seen) < 2:
            return "?"
        (first, begin), (last, end) = self._seen[0], self._seen[-1]
        if end <= begin:
            return "?"
        return format_duration((last - first) / (end - begin) * max(0, self.steps - end))
