"""How a run stands, from its own files: the scheduler may have forgotten its jobs long ago."""

import json
import statistics
import time
import tomllib
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from hpczero.batch import submission
from hpczero.batch.queued import Queued
from hpczero.batch.submission import Submission

_STALLED_AFTER = 10  # times the median step without another one
_SHORTEST = 60.0  # seconds: a short step is no reason to worry soon
_START = 600.0  # nor is the first one of a job, which comes after a checkpoint has been read
_RECENT = 200  # steps that the pace is taken from
_TAIL = 1 << 20  # bytes that are read of a file's end


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
    state: str  # "queued", "running", "STALLED", "finished", "stopped", "failed", "unknown", "new"
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


def of(run: Path, known: Sequence[Queued], silent: Collection[str] = (), now: float | None = None) -> Progress:
    """`known`: what the schedulers say of the run's jobs; `silent`: those of them that say nothing."""
    now = time.time() if now is None else now
    records, metrics, summary = submission.of_run(run), lines_of(run / "metrics.jsonl"), _json(run / "summary.json")
    links = [link for record in records for link in _links(record, known, record.scheduler in silent)]
    last: dict[str, Any] = metrics[-1] if metrics else {}
    step, steps = int(last.get("step", 0)), _steps(run, records)
    median = statistics.median(float(one["step_seconds"]) for one in metrics[-_RECENT:]) if metrics else None
    state, reason = _state(run, links, summary, records)
    if state == "running" and median is not None and step < steps:
        stepped, began = (run / "metrics.jsonl").stat().st_mtime, _began(run)
        silence = now - max(stepped, began)
        if silence > max(_STALLED_AFTER * median, _SHORTEST if stepped > began else _START):
            state, reason = "STALLED", f"no step for {silence:,.0f} s; one takes {median:.3g} s"
    failed = next((link for link in reversed(links) if link.state in ("failed", "gone")), None) if state == "failed" else None
    return Progress(
        run=run,
        state=state,
        reason=reason,
        step=step,
        steps=steps,
        loss=last.get("loss"),
        seconds_per_step=median,
        tokens_per_second=last.get("tokens_per_second"),
        seconds_left=median * (steps - step) if median is not None and step < steps else None,
        job_seconds_left=_job_seconds_left(records, links, now),
        last_save=_last_save(run),
        node_hours=sum(_node_hours(record, now) for record in records),
        links=links,
        last_lines=_last_lines(records, failed.number) if failed else [],
    )


def _state(run: Path, links: Sequence[Link], summary: dict[str, Any], records: Sequence[Submission]) -> tuple[str, str]:
    for state in ("running", "queued", "held"):
        if found := next((link for link in links if link.state == state), None):
            return ("queued" if state == "held" else state), found.reason
    if summary.get("state") == "finished":
        return "finished", ""
    if found := next((link for link in links if link.state == "unknown"), None):
        return "unknown", found.reason
    over = records[-1].over if records else ""
    ended = [link for link in links if link.state not in ("passed", "cancelled")]
    if ended and ended[-1].state in ("failed", "gone"):
        return "failed", over or ended[-1].reason
    if ended or summary:
        return "stopped", over or str(summary.get("reason", ""))
    return "new", ""


def _links(record: Submission, known: Sequence[Queued], silent: bool) -> list[Link]:
    """The scheduler's word for what is in the queue, the jobs' own for what has ended."""
    by_number = {job.number: job for job in known}
    told: dict[str, str] = {}
    for _, number, event, detail in record.events():
        told[number] = detail if event == "ended" else event
    found = []
    for number in record.jobs:
        job, own = by_number.get(number), told.get(number, "")
        if job and job.lives:
            found.append(Link(number, job.state, job.reason, job.start))
        elif own.isdigit():
            state = {"0": "finished", "75": "interrupted"}.get(own, "failed")
            found.append(Link(number, state, "" if own in ("0", "75") else _why(own, job)))
        elif own == "passed":
            found.append(Link(number, "passed"))
        elif silent:
            found.append(Link(number, "unknown", "the scheduler does not answer"))
        elif own == "began":
            found.append(Link(number, "gone", job.reason if job else "it ended without a word: killed, or its node failed"))
        elif record.over:
            found.append(Link(number, "cancelled"))
        else:
            found.append(Link(number, "gone", f"never began{f': {job.reason}' if job else ''}"))
    return found


def _why(code: str, job: Queued | None) -> str:
    signal = f" (signal {int(code) - 128})" if 128 < int(code) < 160 else ""
    meaning = " (the input is wrong)" if code == "2" else signal
    said = f", {job.reason}" if job and job.reason not in ("COMPLETED", "FAILED", "") and "exit status" not in job.reason else ""
    return f"exit code {code}{meaning}{said}"


def _node_hours(record: Submission, now: float) -> float:
    """From each job's beginning to its end, or, where it said nothing of one, to the last sign of life."""
    began: dict[str, float] = {}
    seconds = 0.0
    for moment, number, event, _ in record.events():
        if event == "began":
            began[number] = _seconds(moment)
        elif event == "ended" and number in began:
            seconds += _seconds(moment) - began.pop(number)
    for number, begin in began.items():
        log = record.log(number)
        last = log.stat().st_mtime if log.exists() else begin
        seconds += min(max(0.0, last - begin), record.walltime)
    return seconds * record.nodes / 3600


def _job_seconds_left(records: Sequence[Submission], links: Sequence[Link], now: float) -> float | None:
    running = next((link.number for link in links if link.state == "running"), None)
    for record in records:
        began = [_seconds(moment) for moment, number, event, _ in record.events() if (number, event) == (running, "began")]
        if began:
            return max(0.0, began[-1] + record.walltime - now)
    return None


def _seconds(moment: str) -> float:
    try:
        return datetime.fromisoformat(moment).timestamp()
    except ValueError:
        return 0.0


def _steps(run: Path, records: Sequence[Submission]) -> int:
    """What the newest resolved spec asks for."""
    for path in [*(record.path / "spec.toml" for record in reversed(records)), run / "spec.toml"]:
        try:
            return int(tomllib.loads(path.read_text(encoding="utf-8"))["train"]["steps"])
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return 0


def _last_save(run: Path) -> int | None:
    steps = [int(path.parent.name.removeprefix("step-")) for path in run.glob("checkpoints/step-*/MANIFEST.json") if path.parent.name[5:].isdigit()]
    return max(steps, default=None)


def _began(run: Path) -> float:
    """When the run was last started."""
    events = [event for event in lines_of(run / "events.jsonl") if event.get("event") == "start"]
    return _seconds(str(events[-1].get("time", ""))) if events else 0.0


def _last_lines(records: Sequence[Submission], number: str, count: int = 12) -> list[str]:
    for record in reversed(records):
        if number in record.jobs:
            return [line for line in _tail(record.log(number)).splitlines() if line.strip()][-count:]
    return []


def lines_of(path: Path) -> list[dict[str, Any]]:
    """The last lines of a file of JSON lines; one that is being written is left out."""
    found = []
    for line in _tail(path).splitlines():
        try:
            value = json.loads(line)
        except ValueError:
            continue
        if isinstance(value, dict):
            found.append(value)
    return found


def _tail(path: Path) -> str:
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _TAIL))
            return file.read().decode("utf-8", "replace")
    except OSError:
        return ""


def _json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}
