"""A run's time, by what it went into: every second of every rank is booked once (pure).

The time of a job is from the start of its processes to its last sign of life. What a rank computed
or waited for is the mean over ranks where `rank_times` has it, else rank 0's.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path

import numpy as np

from hpczero.runs import rank_times
from hpczero.runs.columns import TIME, Numbers, number, seconds_of
from hpczero.runs.rank_times import RankTimes
from hpczero.runs.record import Job, Run, read_run

# lost: steps that were computed, and again after the next start; other: between all of these
KINDS = (
    *("computing", "communication", "data", "evaluation", "saving"),
    *("start", "restart", "lost", "other", "queue"),
)
USEFUL = ("computing", "communication", "data", "evaluation")
_MOST = 100_000_000  # bytes of metrics: some 300,000 steps
_OF_STEPS = {
    "computing": "compute_seconds",
    "communication": "comm_seconds",
    "data": "data_seconds",
}
_LARGEST = 1e12  # seconds
_OF_RANKS = {"computing": "compute", "communication": "wait", "data": "data"}


@dataclass(frozen=True)
class Goodput:
    """Rank-seconds by kind; all but "queue" add up to those that the jobs had."""

    of_kind: Mapping[str, float]

    @property
    def allocated(self) -> float:
        return sum(seconds for kind, seconds in self.of_kind.items() if kind != "queue")

    @property
    def share(self) -> float | None:
        """Return the share of useful time; None for no time at all."""
        useful = sum(self.of_kind[kind] for kind in USEFUL)
        return useful / self.allocated if self.allocated > 0 else None

    def as_data(self) -> dict[str, float | None]:
        return {**self.of_kind, "allocated": self.allocated, "share": self.share}


def goodput(run: Run, times: Sequence[RankTimes] = (), queued: float = 0.0) -> Goodput:
    """Book the time of all jobs; `queued`: seconds that they waited in a queue, each for itself."""
    sums = dict.fromkeys(KINDS, 0.0)
    jobs = run.jobs
    for job in jobs:
        for kind, seconds in _of_job(run, job, times).items():
            sums[kind] += seconds * _ranks(job)
    sums["queue"] = queued * max(map(_ranks, jobs), default=1)
    return Goodput(sums)


def goodput_in(path: Path) -> Goodput | None:
    """Return that of the run in a directory; None where reading it all would take minutes."""
    try:
        size = (path / "metrics.jsonl").stat().st_size
    except OSError:
        size = 0
    return goodput(read_run(path), rank_times.read(path)) if size <= _MOST else None


def _ranks(job: Job) -> int:
    return max(1, len(job.ranks))


def _of_job(run: Run, job: Job, times: Sequence[RankTimes]) -> dict[str, float]:
    """Return a rank's seconds by kind; where clocks differ, no more than the job had."""
    metrics = run.metrics
    own = (metrics[TIME] >= job.began) & (metrics[TIME] <= job.ended)
    began = seconds_of(job.start.get("began"))
    began = min(began, job.began) if isfinite(began) else job.began
    whole = max(0.0, job.ended - began)
    found = {kind: _sum(metrics[name][own]) for kind, name in _OF_STEPS.items()}
    found = _of_mean_rank(found, metrics["step"][own], times)
    evaluations = _sum(metrics["evaluation_seconds"][own])
    saves = [
        number(event.get("stalled"))
        for event in run.events_named("save")
        if job.began <= seconds_of(event.get(TIME)) <= job.ended
    ]
    start = "restart" if job.number > 1 else "start"
    booked = found | {
        "evaluation": evaluations,
        "saving": _sum(np.array(saves)),
        "lost": job.lost,
        start: min(whole, max(0.0, _first_step(job, run) - began)),
    }
    total = sum(booked.values())
    if total > whole:
        booked = {kind: seconds / total * whole for kind, seconds in booked.items()}
    return booked | {"other": max(0.0, whole - total)}


def _first_step(job: Job, run: Run) -> float:
    """Return when the first step of a job began; its end if it made none."""
    first = run.events_named("first")
    its_own = [event for event in first if job.began <= seconds_of(event.get(TIME)) <= job.ended]
    if not its_own:
        return job.ended
    event = its_own[0]
    line = np.flatnonzero(run.metrics["step"] == number(event.get("step")))
    evaluated = run.metrics["evaluation_seconds"][line[0]] if len(line) else 0.0
    seconds = number(event.get("seconds")) + (evaluated if isfinite(evaluated) else 0.0)
    return seconds_of(event.get(TIME)) - (seconds if isfinite(seconds) else 0.0)


def _of_mean_rank(
    of_first: dict[str, float], steps: Numbers, times: Sequence[RankTimes]
) -> dict[str, float]:
    """Divide the seconds of steps as the mean rank did; all kinds together stay what they were."""
    sums = dict.fromkeys(_OF_RANKS, 0.0)
    for one in times:
        rows = np.isin(one.last, steps)
        for kind, field in _OF_RANKS.items():
            sums[kind] += float(one.of_field[field][rows].mean(axis=1).sum())
    total = sum(sums.values())
    if not total > 0:
        return of_first
    whole = sum(of_first.values())
    return {kind: seconds / total * whole for kind, seconds in sums.items()}


def _sum(values: Numbers) -> float:
    """Return the sum of the values that are seconds."""
    return float(values[(values > 0) & (values < _LARGEST)].sum())
