"""How a run stands, from its own files: the scheduler may have forgotten its jobs long ago."""

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
from hpczero.batch.command import Queued
from hpczero.batch.submission import Submission
from hpczero.lock import Holder

_STALLED_AFTER = 10  # times the median step without another one
_SHORTEST = 60.0  # seconds: a short step is no reason to worry soon
_START = 600.0  # nor is the first one of a job, which comes after a checkpoint has been read
_RECENT = 200  # steps that the pace is taken from
_TAIL = 1 << 20  # bytes that are read of a file's end
_WRITTEN = ("metrics.jsonl", "events.jsonl", "summary.json", "spec.toml", "batch")
_MOST = 1e15  # steps, and seconds of one, that can be meant
_STEP = re.compile(r"step-([0-9]{8,18})")
_CODE = re.compile(r"[0-9]{1,3}")  # of a process that ended
_WITHOUT_A_WORD = "it ended without a word: killed, or its node failed"


@dataclass(frozen=True)
class Link:
    """A job of a run."""

    number: str
    state: str  # "queued", "held", "running", "finished", "interrupted", "failed", "passed", "cancelled", "gone", "unknown"
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
    seconds_left: float | None  # of the run, at its pace
    job_seconds_left: float | None  # of the job that runs
    last_save: int | None
    node_hours: float
    links: list[Link] = field(default_factory=list)
    last_lines: list[str] = field(default_factory=list)  # of a failed job
    age_seconds: float | None = None  # since the run last wrote something


@dataclass(frozen=True)
class _Seen:
    """The words of a run's files and of its scheduler, before a state is made of them."""

    records: list[Submission]
    links: list[Link]
    metrics: list[dict[str, Any]]
    summary: dict[str, Any]
    holder: Holder | None  # who writes into the run's folder now
    began: float  # when the run was last started; 0.0: never
    last_save: int | None

    @property
    def over(self) -> str:
        """Why the newest jobs have nothing left to do, unless somebody started the run since."""
        return self.records[-1].over if self.records and not self._started_since else ""

    @property
    def last_ended(self) -> Link | None:
        """The last job that did something, unless somebody started the run since."""
        ended = [link for link in self.links if link.state not in ("passed", "cancelled")]
        return ended[-1] if ended and not self._started_since else None

    @property
    def _started_since(self) -> bool:
        """Return True if the run was started after the last word of its newest jobs."""
        return self.began > self.records[-1].last_word


def of(
    run: Path, known: Sequence[Queued], silent: Collection[str] = (), now: float | None = None
) -> Progress:
    """`known`: what the schedulers say of the run's jobs; `silent`: those of them that say nothing."""
    now = time.time() if now is None else now
    seen = _look(run, known, silent)
    records, links = seen.records, seen.links
    last: dict[str, Any] = seen.metrics[-1] if seen.metrics else {}
    step, steps = int(last.get("step", 0)), _steps(run, records)
    median = (
        statistics.median(one["step_seconds"] for one in seen.metrics[-_RECENT:])
        if seen.metrics
        else None
    )
    state, reason = _state(seen)
    if state == "running" and median is not None and step < steps:
        stepped = _changed(run / "metrics.jsonl")
        silence = now - max(stepped, seen.began)
        if silence > max(_STALLED_AFTER * median, _SHORTEST if stepped > seen.began else _START):
            state, reason = "STALLED", f"no step for {silence:,.0f} s; one takes {median:.3g} s"
    failed = (
        next((link for link in reversed(links) if link.state in ("failed", "gone")), None)
        if state == "failed"
        else None
    )
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
        last_lines=_last_lines(records, failed.number) if failed else [],
        age_seconds=max(0.0, now - written) if written else None,
    )


def _look(run: Path, known: Sequence[Queued], silent: Collection[str]) -> _Seen:
    records, holder = submission.of_run(run), lock.living_holder(run)
    steps = [line for line in lines_of(run / "metrics.jsonl") if _is_step(line)]
    job = holder.job or "" if holder else ""
    links = [
        link
        for record in records
        for link in _links(record, known, job if record.scheduler in silent else None)
    ]
    return _Seen(
        records, links, steps, _json(run / "summary.json"), holder, _began(run), _last_save(run)
    )


def _state(seen: _Seen) -> tuple[str, str]:
    if seen.holder and seen.holder.job not in [link.number for link in seen.links]:
        return "running", str(seen.holder)
    for state in ("running", "queued", "held"):
        if found := next((link for link in seen.links if link.state == state), None):
            return ("queued" if state == "held" else state), found.reason
    if seen.summary.get("state") == "finished":
        return "finished", ""
    if found := next((link for link in seen.links if link.state == "unknown"), None):
        return "unknown", found.reason
    if seen.over == "cancelled":
        return "cancelled", ""
    return _ended(seen)


def _ended(seen: _Seen) -> tuple[str, str]:
    """Return the state of a run that is not finished and that nobody works on, and the reason."""
    last, said = seen.last_ended, seen.summary.get("state")
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


def _links(record: Submission, known: Sequence[Queued], alive: str | None) -> list[Link]:
    """Take the scheduler's word for what is in the queue, the jobs' own for what has ended.

    `alive`: where the scheduler says nothing, the job that writes into the run's folder.
    """
    by_number = {job.number: job for job in known}
    told: dict[str, str] = {}
    for _, number, event, detail in record.events():
        told[number] = detail if event == "ended" else event
    found = []
    for number in record.jobs:
        job, own = by_number.get(number), told.get(number, "")
        if job and job.lives:
            found.append(Link(number, job.state, job.reason, job.start))
        elif _CODE.fullmatch(own):
            state = {"0": "finished", "75": "interrupted"}.get(own, "failed")
            found.append(Link(number, state, "" if own in ("0", "75") else _why(own, job)))
        elif own == "passed":
            found.append(Link(number, "passed"))
        elif alive is not None:
            unknown = Link(number, "unknown", "the scheduler does not answer")
            found.append(Link(number, "running") if number == alive else unknown)
        elif own == "began":
            found.append(Link(number, "gone", job.reason if job else _WITHOUT_A_WORD))
        elif record.over:
            found.append(Link(number, "cancelled"))
        else:
            found.append(Link(number, "gone", f"never began{f': {job.reason}' if job else ''}"))
    return found


def _why(code: str, job: Queued | None) -> str:
    signal = f" (signal {int(code) - 128})" if 128 < int(code) < 160 else ""
    meaning = " (the input is wrong)" if code == "2" else signal
    said = (
        f", {job.reason}"
        if job and job.reason not in ("COMPLETED", "FAILED", "") and "exit status" not in job.reason
        else ""
    )
    return f"exit code {code}{meaning}{said}"


def _node_hours(record: Submission, now: float) -> float:
    """From each job's beginning to its end, or, where it said nothing of one, to the last sign of life.

    That of a job that began again is gone: it counts up to then.
    """
    began: dict[str, float] = {}
    seconds = 0.0
    for moment, number, event, _ in record.events():
        if event == "began":
            now_begun = _seconds(moment)
            before = now_begun - began.get(number, now_begun)
            seconds += min(max(0.0, before), record.walltime)
            began[number] = now_begun
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
    """Return a finite number; None for anything else that JSON may have there."""
    try:
        number = float(value) if isinstance(value, (int, float)) else math.nan
    except OverflowError:  # JSON's whole numbers have any length
        return None
    return number if math.isfinite(number) else None


def _is_step(line: dict[str, Any]) -> bool:
    """Return True for a line of metrics whose step and time can be meant."""
    found = [_number(line.get(name)) for name in ("step", "step_seconds")]
    return all(number is not None and 0 <= number < _MOST for number in found)


def _changed(path: Path) -> float:
    """When it was last written; 0.0: it is not there."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _steps(run: Path, records: Sequence[Submission]) -> int:
    """What the newest resolved spec asks for."""
    for path in [*(record.path / "spec.toml" for record in reversed(records)), run / "spec.toml"]:
        try:
            found = _number(tomllib.loads(_tail(path))["train"]["steps"])
        except (ValueError, KeyError, TypeError, RecursionError):
            continue
        if found is not None and 0 <= found < _MOST:
            return int(found)
    return 0


def _last_save(run: Path) -> int | None:
    folders = (path.parent.name for path in run.glob("checkpoints/step-*/MANIFEST.json"))
    steps = [int(found.group(1)) for name in folders if (found := _STEP.fullmatch(name))]
    return max(steps, default=None)


def _began(run: Path) -> float:
    """When the run was last started."""
    events = [event for event in lines_of(run / "events.jsonl") if event.get("event") == "start"]
    return _seconds(str(events[-1].get("time", ""))) if events else 0.0


def _last_lines(records: Sequence[Submission], number: str, count: int = 12) -> list[str]:
    for record in reversed(records):
        if number in record.jobs:
            text = "\n".join(
                _tail(path) for path in (record.log(number), record.last_words(number))
            )
            return [line for line in text.splitlines() if line.strip()][-count:]
    return []


def lines_of(path: Path) -> list[dict[str, Any]]:
    """The last lines of a file of JSON lines; one that is being written is left out."""
    found = []
    for line in _tail(path).splitlines():
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict):
            found.append(value)
    return found


def _tail(path: Path) -> str:
    try:
        with os.fdopen(safe_files.open_to_read(path), "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL))
            return file.read(_TAIL).decode("utf-8", "replace")
    except OSError:
        return ""


def _json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(_tail(path))
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
