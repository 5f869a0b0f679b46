"""Everything that a run has left in its directory, read without trusting it.

Whoever shows a run (report, compare, plot) asks `read_run`. A file that lacks, or is damaged, is a
gap, and one of the `problems`; nothing here raises for it.
"""

import itertools
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import inf, isfinite, isnan
from pathlib import Path
from typing import Any

from hpczero import safe_files
from hpczero.errors import InputError
from hpczero.runs import columns
from hpczero.runs.columns import TIME, Columns, seconds_of
from hpczero.spec.keys import flat
from hpczero.spec.load import load
from hpczero.spec.schema import Spec
from hpczero.text import printable

_MOST = 64 << 20  # bytes of a summary
_MOST_EVENTS = 200_000
_MOST_JOBS = 1_000
UNKNOWN_HOST = "an unknown host"
_MARKS = ("spec.toml", "metrics.jsonl", "events.jsonl")


@dataclass(frozen=True)
class Job:
    """One of the jobs that a run took: from a start to its stop, its death, or now.

    `first`: steps that were done before. `state`: as in summary.json; "" if it ended without a
    word, or still runs.
    """

    number: int
    began: float  # seconds since 1970
    ended: float  # of the last sign of life
    first: int
    last: int
    ranks: Sequence[Mapping[str, Any]]
    start: Mapping[str, Any]  # the event
    layout: Mapping[str, Any]  # the event; {} before it
    lost: float = 0.0  # seconds of its steps that the next job computed again
    state: str = ""
    reason: str = ""

    @cached_property
    def hosts(self) -> dict[int, str]:
        """Return each rank's host, fit to be printed."""
        known = [(one.get("rank"), printable(str(one.get("host")))) for one in self.ranks]
        return {rank: host for rank, host in known if isinstance(rank, int)}


@dataclass(frozen=True)
class Run:
    path: Path
    spec: Spec | None
    metrics: Columns
    events: Sequence[Mapping[str, Any]]
    memory: Sequence[Mapping[str, Any]]
    summary: Mapping[str, Any]
    problems: Sequence[str] = field(default_factory=tuple)

    @property
    def name(self) -> str:
        return self.path.name

    @cached_property
    def settings(self) -> dict[str, Any]:
        """Return "train.steps" -> value; {} if the spec cannot be read."""
        return flat(self.spec) if self.spec else {}

    @cached_property
    def changed_settings(self) -> dict[str, Any]:
        """Return the settings that are not the defaults."""
        defaults = flat(Spec())
        return {key: value for key, value in self.settings.items() if value != defaults[key]}

    @cached_property
    def jobs(self) -> list[Job]:
        return list(_jobs(self.events, self.metrics))

    @property
    def steps(self) -> int:
        """Return the last step that is known to be done."""
        last = self.metrics["step"][-1] if len(self.metrics) else 0
        return int(last)

    def host_of(self, rank: int, ranks: int | None = None, before: float = inf) -> str:
        """Return a rank's host in the newest job, of so many `ranks`, begun `before` a step."""
        for job in reversed(self.jobs):
            if ranks in (None, len(job.ranks)) and job.first < before:
                return job.hosts.get(rank, UNKNOWN_HOST)
        return UNKNOWN_HOST

    def events_named(self, *names: str) -> list[Mapping[str, Any]]:
        return [event for event in self.events if event.get("event") in names]


def read_run(path: Path, figures: bool = True) -> Run:
    """Read a run's directory; InputError if it is none. `figures`: of its steps and memory, too."""
    if not any(safe_files.is_seen(path / name) for name in _MARKS):
        raise InputError(f"{path} is no run: it has none of {', '.join(_MARKS)}")
    problems: list[str] = []
    spec = None
    try:
        spec = load(path / "spec.toml").spec
    except (InputError, OSError) as error:
        problems.append(f"spec.toml cannot be read: {error}")
    metrics = columns.read(path / "metrics.jsonl") if figures else Columns()
    if metrics.damaged:
        problems.append(f"metrics.jsonl: {metrics.damaged} damaged lines are left out")
    events = _objects(path / "events.jsonl", problems)
    memory = _objects(path / "memory.jsonl", problems) if figures else []
    return Run(path, spec, metrics, events, memory, _summary(path, problems), tuple(problems))


def _objects(path: Path, problems: list[str]) -> list[dict[str, Any]]:
    read = list(itertools.islice(columns.lines(path), _MOST_EVENTS + 1))
    if len(read) > _MOST_EVENTS:
        problems.append(f"{path.name}: only the first {_MOST_EVENTS:,} lines are shown")
    objects = [one for one in read[:_MOST_EVENTS] if one is not None]
    if damaged := min(len(read), _MOST_EVENTS) - len(objects):
        problems.append(f"{path.name}: {damaged} damaged lines are left out")
    return objects


def _summary(path: Path, problems: list[str]) -> dict[str, Any]:
    path = path / "summary.json"
    if not safe_files.is_seen(path):
        return {}
    try:
        with os.fdopen(safe_files.open_to_read(path), "rb") as file:
            value = json.loads(file.read(_MOST))
    except (OSError, ValueError, RecursionError):
        problems.append("summary.json cannot be read")
        return {}
    return value if isinstance(value, dict) else {}


def _first_of_name(events: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    return {str(event.get("event")): event for event in reversed(events)}


def _jobs(events: Sequence[Mapping[str, Any]], metrics: Columns) -> Iterator[Job]:
    begins = [at for at, event in enumerate(events) if event.get("event") == "start"]
    of_jobs = [events[begin:end] for begin, end in itertools.pairwise([*begins, len(events)])]
    first = max(0, len(of_jobs) - _MOST_JOBS)
    for number, (of_job, of_next) in enumerate(itertools.pairwise([*of_jobs[first:], []]), first):
        yield _job(number + 1, of_job, of_next, metrics)


def _job(
    number: int,
    events: Sequence[Mapping[str, Any]],
    of_next: Sequence[Mapping[str, Any]],
    metrics: Columns,
) -> Job:
    """Describe the job of these events; `of_next`: those of the next one, if there was one."""
    of_name = _first_of_name(events)
    after = _first_of_name(of_next)
    start = events[0]
    began = seconds_of(start.get(TIME))
    before = seconds_of(after["start"].get(TIME)) if after else inf
    times = metrics[TIME]
    its_own = (times >= began) & (times < before)
    signs = [seconds_of(event.get(TIME)) for event in events]
    # steps that the next job did again have no line any more
    again = after.get("resume", {})
    lost_until = seconds_of(again.get("lost_until"))
    lost = columns.number(again.get("lost_seconds"))
    signs += [lost_until] if began <= lost_until < before else []
    signs += [float(times[its_own].max())] if its_own.any() else []
    steps = metrics["step"][its_own]
    resumed = columns.number(of_name.get("resume", {}).get("step"))
    first = int(resumed) if isfinite(resumed) else 0
    stop = of_name.get("stop", {})
    ranks = start.get("ranks")
    return Job(
        number,
        began,
        max((sign for sign in signs if not isnan(sign)), default=began),
        first,
        int(steps[-1]) if len(steps) else first,
        [one for one in ranks if isinstance(one, dict)] if isinstance(ranks, list) else [],
        start,
        of_name.get("layout", {}),
        max(0.0, lost) if isfinite(lost) else 0.0,
        str(stop.get("state") or ""),
        str(stop.get("reason") or ""),
    )
