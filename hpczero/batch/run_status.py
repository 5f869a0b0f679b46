"""The state of a run, from its own files: the scheduler may have forgotten its jobs long ago."""

import json
import math
import os
import re
import statistics
import time
import tomllib
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from hpczero import lock, safe_files
from hpczero.batch import submission
from hpczero.batch.command import QueuedJob
from hpczero.batch.submission import Submission
from hpczero.lock import Holder

_STALLED_AFTER = 10  # times the median step without another one
_SHORTEST = 60.0  # seconds: a short step is no reason to worry soon
_START = 600.0  # nor is the first one of a job, which comes after a checkpoint has been read
_RECENT = 200  # steps that the pace is taken from
_TAIL = 1 << 20  # bytes that are read of a file's end
_LAST_LINES = 12  # of a failed job's output, shown with its state
_WRITTEN = ("metrics.jsonl", "events.jsonl", "summary.json", "spec.toml", "batch")
_MOST = 1e15  # steps, or seconds of a step: larger figures are nonsense
_MOST_BYTES = 1e18
_STEP = re.compile(r"step-([0-9]{8,18})")
_CODE = re.compile(r"[0-9]{1,3}")  # of a process that ended
_GOOD = {"0": "finished", "75": "interrupted", "passed": "passed"}  # last event -> state
_WITHOUT_A_WORD = "it ended without a word: killed, or its node failed"


@dataclass(frozen=True)
class Link:
    """A job of the run's chain."""

    number: str
    # "queued", "held", "running", "finished", "interrupted", "failed", "passed", "cancelled",
    # "gone", "unknown"
    state: str
    reason: str = ""
    start: str = ""


@dataclass(frozen=True)
class Progress:
    run: Path
    # "queued", "running", "STALLED", "finished", "continues", "stopped", "cancelled", "failed",
    # "unknown", "new" (docs/batch.md)
    state: str
    reason: str
    step: int
    steps: int
    loss: float | None
    seconds_per_step: float | None
    tokens_per_second: float | None
    seconds_left: float | None  # of the run, at its present pace
    job_seconds_left: float | None  # of the running job
    last_save: int | None
    node_hours: float
    links: list[Link] = field(default_factory=list)
    last_lines: list[str] = field(default_factory=list)  # of a failed job
    age_seconds: float | None = None  # since the run last wrote a file
    held: float | None = None  # bytes, by the fullest rank at its widest moment; known at the end
    validation_loss: float | None = None  # of the last evaluation


@dataclass(frozen=True)
class _Seen:
    """Everything that a run's files and its scheduler say: `_state` draws the conclusion."""

    records: list[Submission]
    links: list[Link]
    metrics: list[dict[str, Any]]
    summary: dict[str, Any]
    holder: Holder | None  # the process that writes into the run's folder now
    began: float  # time of the run's last start; 0.0: never
    last_save: int | None

    @property
    def over(self) -> str:
        """The reason why nothing is left to do; "" if the run was started since."""
        return self.records[-1].closed_reason if self.records and not self._started_since else ""

    @property
    def last_ended(self) -> Link | None:
        """The last job that did something; None if the run was started since."""
        ended = [link for link in self.links if link.state not in ("passed", "cancelled")]
        return ended[-1] if ended and not self._started_since else None

    @property
    def _started_since(self) -> bool:
        """Return True if the run was started after the last word of its newest jobs."""
        return self.began > self.records[-1].last_event_time


def status_of(
    run: Path, known: Sequence[QueuedJob], silent: Collection[str] = (), now: float | None = None
) -> Progress:
    """Return the state of a run.

    `known`: the schedulers' descriptions of its jobs; `silent`: the schedulers that do not answer.
    """
    now = time.time() if now is None else now
    seen = _look(run, known, silent)
    records = seen.records
    links = seen.links
    last: dict[str, Any] = {}
    median = None
    if seen.metrics:
        last = seen.metrics[-1]
        median = statistics.median(line["step_seconds"] for line in seen.metrics[-_RECENT:])
    step = int(last.get("step", 0))
    steps = _steps(run, records)
    state, reason = _state(seen)
    if state == "running" and median is not None and step < steps:
        stepped = _changed(run / "metrics.jsonl")
        silence = now - max(stepped, seen.began)
        patience = _SHORTEST if stepped > seen.began else _START
        if silence > max(_STALLED_AFTER * median, patience):
            state = "STALLED"
            reason = f"no step for {silence:,.0f} s; one takes {median:.3g} s"
    failed = [link.number for link in links if link.state in ("failed", "gone")]
    written = max(_changed(run / name) for name in _WRITTEN)
    return Progress(
        run=run,
        state=state,
        reason=reason,
        step=step,
        steps=steps,
        loss=_number(last.get("loss")),
        seconds_per_step=median,
        tokens_per_second=_number(last.get("tokens_per_second")),
        seconds_left=median * (steps - step) if median is not None and step < steps else None,
        job_seconds_left=_job_seconds_left(records, links, now),
        last_save=seen.last_save,
        node_hours=sum(_node_hours(record, now) for record in records),
        links=links,
        last_lines=_last_lines(records, failed[-1]) if state == "failed" and failed else [],
        age_seconds=max(0.0, now - written) if written else None,
        held=_held(seen.summary),
        validation_loss=_validation_loss(seen),
    )


def _look(run: Path, known: Sequence[QueuedJob], silent: Collection[str]) -> _Seen:
    records = submission.of_run(run)
    holder = lock.living_holder(run)
    job = holder.job or "" if holder else ""
    links: list[Link] = []
    for record in records:
        links += _links(record, known, job if record.scheduler in silent else None)
    metrics = [line for line in lines_of(run / "metrics.jsonl") if _is_step(line)]
    summary = _json(run / "summary.json")
    return _Seen(records, links, metrics, summary, holder, _began(run), _last_save(run))


def _state(seen: _Seen) -> tuple[str, str]:
    if seen.holder and seen.holder.job not in [link.number for link in seen.links]:
        return "running", str(seen.holder)
    first = {link.state: link for link in reversed(seen.links)}
    for state in ("running", "queued", "held"):
        if state in first:
            return ("queued" if state == "held" else state), first[state].reason
    if seen.summary.get("state") == "finished":
        return "finished", ""
    if "unknown" in first:
        return "unknown", first["unknown"].reason
    if seen.over == "cancelled":
        return "cancelled", ""
    return _ended(seen)


def _ended(seen: _Seen) -> tuple[str, str]:
    """Return the state, and the reason, of a run that is neither finished nor in progress."""
    last = seen.last_ended
    said = seen.summary.get("state")
    reason = str(seen.summary.get("reason") or "")
    if last and last.state in ("failed", "gone"):
        return "failed", seen.over or last.reason
    if said == "failed":
        return "failed", reason
    if said == "stopped" or last:
        goes_on = seen.last_save is not None and not seen.over
        return ("continues" if goes_on else "stopped"), seen.over or reason
    if seen.began:
        return "failed", _WITHOUT_A_WORD
    return "new", ""


def _links(record: Submission, known: Sequence[QueuedJob], alive: str | None) -> list[Link]:
    """Describe live jobs by the scheduler's words, ended ones by their own.

    `alive`: None, or under a silent scheduler the job that writes into the run's folder ("": none).
    """
    in_queue = {job.number: job for job in known}
    last_event = record.last_events()
    return [
        _link(record, number, in_queue.get(number), last_event.get(number, ""), alive)
        for number in record.jobs
    ]


def _link(
    record: Submission, number: str, job: QueuedJob | None, event: str, alive: str | None
) -> Link:
    if job and job.is_alive:
        return Link(number, job.state, job.reason, job.start)
    if event in _GOOD:
        return Link(number, _GOOD[event])
    if _CODE.fullmatch(event):
        return Link(number, "failed", _why(event, job))
    if alive is not None and number == alive:
        return Link(number, "running")
    if alive is not None:
        return Link(number, "unknown", "the scheduler does not answer")
    if event == "began":
        return Link(number, "gone", job.reason if job else _WITHOUT_A_WORD)
    if record.closed_reason:
        return Link(number, "cancelled")
    return Link(number, "gone", f"never began: {job.reason}" if job else "never began")


def _why(code: str, job: QueuedJob | None) -> str:
    """Explain the exit code of a failed job, also by the scheduler's words if they add any."""
    meaning = ""
    if code == "2":
        meaning = " (the input is wrong)"
    elif 128 < int(code) < 160:
        meaning = f" (signal {int(code) - 128})"
    reason = job.reason if job else ""
    if reason in ("COMPLETED", "FAILED", "") or "exit status" in reason:
        return f"exit code {code}{meaning}"
    return f"exit code {code}{meaning}, {reason}"


def _node_hours(record: Submission, now: float) -> float:
    """Count each job from its beginning to its end, else to the last change of its log.

    A job that was requeued without an end counts up to its next beginning.
    """
    began: dict[str, float] = {}
    seconds = 0.0
    for moment, number, event, _ in record.events():
        if event == "began":
            begins = _seconds(moment)
            before = begins - began.get(number, begins)
            seconds += min(max(0.0, before), record.walltime)
            began[number] = begins
        elif event == "ended" and number in began:
            seconds += _seconds(moment) - began.pop(number)
    for number, begin in began.items():
        log = record.log(number)
        last = log.stat().st_mtime if log.exists() else begin
        seconds += min(max(0.0, last - begin), record.walltime)
    return seconds * record.nodes / 3600


def _job_seconds_left(
    records: Sequence[Submission], links: Sequence[Link], now: float
) -> float | None:
    running = next((link.number for link in links if link.state == "running"), None)
    for record in records:
        began = [
            _seconds(moment)
            for moment, number, event, _ in record.events()
            if (number, event) == (running, "began")
        ]
        if began:
            return max(0.0, began[-1] + record.walltime - now)
    return None


def _seconds(moment: str) -> float:
    try:
        return datetime.fromisoformat(moment).timestamp()
    except (ValueError, OverflowError):
        return 0.0


def _number(value: Any) -> float | None:
    """Return a finite number; None for any other value of JSON."""
    try:
        number = float(value) if isinstance(value, (int, float)) else math.nan
    except OverflowError:  # JSON's whole numbers have any length
        return None
    return number if math.isfinite(number) else None


def _held(summary: dict[str, Any]) -> float | None:
    fullest = summary.get("fullest")
    held = _number(fullest.get("held")) if isinstance(fullest, dict) else None
    return held if held is not None and 0 <= held < _MOST_BYTES else None


def _validation_loss(seen: _Seen) -> float | None:
    """Return the newest that is among the last lines, else that of the summary."""
    lines = [*reversed(seen.metrics), seen.summary]
    losses = (_number(line.get("validation_loss")) for line in lines)
    return next((loss for loss in losses if loss is not None), None)


def _is_step(line: dict[str, Any]) -> bool:
    """Return True for a line of metrics with a plausible step and time."""
    numbers = [_number(line.get(name)) for name in ("step", "step_seconds")]
    return all(number is not None and 0 <= number < _MOST for number in numbers)


def _changed(path: Path) -> float:
    """Return the time of the file's last change; 0.0 if there is no file."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _steps(run: Path, records: Sequence[Submission]) -> int:
    """Return the number of steps in the newest resolved spec."""
    for path in [*(record.path / "spec.toml" for record in reversed(records)), run / "spec.toml"]:
        try:
            steps = _number(tomllib.loads(_tail(path))["train"]["steps"])
        except (ValueError, KeyError, TypeError, RecursionError):
            continue
        if steps is not None and 0 <= steps < _MOST:
            return int(steps)
    return 0


def _last_save(run: Path) -> int | None:
    folders = (path.parent.name for path in run.glob("checkpoints/step-*/MANIFEST.json"))
    return max((int(step[1]) for name in folders if (step := _STEP.fullmatch(name))), default=None)


def _began(run: Path) -> float:
    """Return the time of the run's last start; 0.0 if it was never started."""
    starts = [event for event in lines_of(run / "events.jsonl") if event.get("event") == "start"]
    return _seconds(str(starts[-1].get("time", ""))) if starts else 0.0


def _last_lines(records: Sequence[Submission], number: str) -> list[str]:
    for record in reversed(records):
        if number in record.jobs:
            text = "\n".join(
                _tail(path) for path in (record.log(number), record.message_file(number))
            )
            return [line for line in text.splitlines() if line.strip()][-_LAST_LINES:]
    return []


def lines_of(path: Path) -> list[dict[str, Any]]:
    """Return the last objects of a file of JSON lines; one that is half written is left out."""
    objects = map(_object, _tail(path).splitlines())
    return [value for value in objects if value is not None]


def _tail(path: Path) -> str:
    try:
        with os.fdopen(safe_files.open_to_read(path), "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL))
            return file.read(_TAIL).decode("utf-8", "replace")
    except OSError:
        return ""


def _json(path: Path) -> dict[str, Any]:
    return _object(_tail(path)) or {}


def _object(text: str) -> dict[str, Any] | None:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
