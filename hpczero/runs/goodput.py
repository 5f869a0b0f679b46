"""A run's time, by what it went into: every second of every rank is booked once (pure).

The time of a job is from the start of its processes to its last sign of life; where the batch
system started it, that of the job's script. What a rank computed or waited for is the mean over
ranks where `rank_times` has it, else rank 0's.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf, isfinite
from pathlib import Path

import numpy as np

from hpczero.runs import rank_times
from hpczero.runs.columns import TIME, Numbers, number, seconds_of
from hpczero.runs.job_scripts import JobScript, job_scripts, seconds_in_queue
from hpczero.runs.rank_times import RankTimes
from hpczero.runs.record import Job, Run, read_run

# lost: steps that were computed, and again after the next start; ending: after the last step and
# save; idle: all that is none of these, between steps and after the last one of a job that died
KINDS = (
    *("computing", "communication", "data", "evaluation", "saving"),
    *("start", "restart", "lost", "ending", "idle"),
)
USEFUL = ("computing", "communication", "data", "evaluation")
_MOST = 100_000_000  # bytes of metrics: some 300,000 steps
_LARGEST = 1e12  # seconds
# parts of a step: the metric, and the field of `rank_times`
_OF_STEPS = {
    "computing": ("compute_seconds", "compute"),
    "communication": ("comm_seconds", "wait"),
    "data": ("data_seconds", "data"),
}


@dataclass(frozen=True)
class Goodput:
    """Rank-seconds by kind, which add up to those that the jobs had.

    `queued`: seconds that the run waited for its jobs to begin, beside these; None: not known.
    `tokens`: of the steps that count.
    """

    of_kind: Mapping[str, float]
    queued: float | None = None
    tokens: float = 0.0

    @property
    def allocated(self) -> float:
        return sum(self.of_kind.values())

    @property
    def share(self) -> float | None:
        """Return the share of useful time; None for no time at all."""
        useful = sum(self.of_kind[kind] for kind in USEFUL)
        return useful / self.allocated if self.allocated > 0 else None

    def as_data(self) -> dict[str, float | None]:
        booked = {**self.of_kind, "allocated": self.allocated, "share": self.share}
        return booked | {"queue": self.queued}


def goodput(
    run: Run, times: Sequence[RankTimes] = (), scripts: Sequence[JobScript] = ()
) -> Goodput:
    """Book the time of all jobs; `scripts`: those that the batch system started them by."""
    sums = dict.fromkeys(KINDS, 0.0)
    for job, (began, ended) in zip(run.jobs, _bounds(run.jobs, scripts), strict=True):
        for kind, seconds in _of_job(run, job, times, began, ended).items():
            sums[kind] += seconds * max(1, len(job.ranks))
    return Goodput(sums, seconds_in_queue(run, scripts), _sum(run.metrics["tokens"]))


def goodput_in(path: Path) -> Goodput | None:
    """Return that of the run in a directory; None where reading it all would take minutes."""
    try:
        size = (path / "metrics.jsonl").stat().st_size
    except OSError:
        size = 0
    if size > _MOST:
        return None
    return goodput_of(read_run(path))


def goodput_of(run: Run) -> Goodput:
    """Book a run with all that its directory says."""
    return goodput(run, rank_times.read(run.path), job_scripts(run.path))


def _bounds(jobs: Sequence[Job], scripts: Sequence[JobScript]) -> list[tuple[float, float]]:
    """Return begin and end of each job; several that the batch system started as one join on."""
    bounds = []
    for job in jobs:
        began = seconds_of(job.start.get("began"))
        began = min(began, job.began) if isfinite(began) else job.began
        known = isfinite(began) and isfinite(job.ended)
        bounds.append((began, max(began, job.ended)) if known else (0.0, 0.0))
    for at_one, one in enumerate(scripts):
        until = scripts[at_one + 1].began if at_one + 1 < len(scripts) else inf
        inside = [
            at
            for at, job in enumerate(jobs)
            if job.start.get("job") == one.job and one.began <= job.began < min(one.ended, until)
        ]
        if not inside:
            continue
        before = one.began
        for at in inside:
            begin, end = bounds[at]
            bounds[at] = min(before, begin), end
            before = end
        if isfinite(one.ended):
            begin, end = bounds[inside[-1]]
            bounds[inside[-1]] = begin, max(end, one.ended)
    return bounds


def _of_job(
    run: Run, job: Job, times: Sequence[RankTimes], began: float, ended: float
) -> dict[str, float]:
    """Return a rank's seconds by kind; where clocks differ, no more than the job had."""
    metrics = run.metrics
    own = (metrics[TIME] >= job.began) & (metrics[TIME] <= job.ended)
    whole = ended - began
    found = {kind: _sum(metrics[name][own]) for kind, (name, _) in _OF_STEPS.items()}
    found = _of_mean_rank(found, metrics["step"][own], times)
    evaluations = _sum(metrics["evaluation_seconds"][own])
    saves = [
        number(event.get("stalled"))
        for event in run.events_named("save")
        if job.began <= seconds_of(event.get(TIME)) <= job.ended
    ]
    start = "restart" if job.number > 1 else "start"
    first = _first_step(job, run)
    booked = found | {
        "evaluation": evaluations,
        "saving": _sum(np.array(saves)),
        "lost": job.lost,
        start: min(whole, max(0.0, (ended if first is None else first) - began)),
        "ending": 0.0 if first is None else ended - _last_work(job, run),
    }
    total = sum(booked.values())
    if total > whole:
        booked = {kind: seconds / total * whole for kind, seconds in booked.items()}
    return booked | {"idle": max(0.0, whole - total)}


def _last_work(job: Job, run: Run) -> float:
    """Return when a job that came to its end had done its last step and save; else its end."""
    if not job.state:
        return job.ended
    times = run.metrics[TIME]
    saves = [seconds_of(event.get(TIME)) for event in run.events_named("first", "save")]
    moments = [*times[(times >= job.began) & (times <= job.ended)].tolist(), *saves]
    return max((one for one in moments if job.began <= one <= job.ended), default=job.ended)


def _first_step(job: Job, run: Run) -> float | None:
    """Return when the first step of a job began; None if it made none."""
    first = run.events_named("first")
    its_own = [event for event in first if job.began <= seconds_of(event.get(TIME)) <= job.ended]
    if not its_own:
        return None
    event = its_own[0]
    line = np.flatnonzero(run.metrics["step"] == number(event.get("step")))
    evaluated = run.metrics["evaluation_seconds"][line[0]] if len(line) else 0.0
    seconds = number(event.get("seconds")) + (evaluated if isfinite(evaluated) else 0.0)
    return seconds_of(event.get(TIME)) - (seconds if isfinite(seconds) else 0.0)


def _of_mean_rank(
    of_first: dict[str, float], steps: Numbers, times: Sequence[RankTimes]
) -> dict[str, float]:
    """Divide the seconds of steps as the mean rank did; all kinds together stay what they were."""
    sums = dict.fromkeys(_OF_STEPS, 0.0)
    for one in times:
        rows = np.isin(one.last, steps)
        for kind, (_, field) in _OF_STEPS.items():
            sums[kind] += float(one.of_field[field][rows].mean(axis=1).sum())
    total = sum(sums.values())
    if not total > 0:
        return of_first
    whole = sum(of_first.values())
    return {kind: seconds / total * whole for kind, seconds in sums.items()}


def _sum(values: Numbers) -> float:
    """Return the sum of the values that are seconds."""
    return float(values[(values > 0) & (values < _LARGEST)].sum())
