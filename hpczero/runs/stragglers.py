"""Ranks that others wait for, step after step, and the reason why (pure).

A rank is slow where its own part of a step (all but its waits for others) takes longer than that of
the other ranks, by more than a share of the step, in most of the rows of `rank_times`. Noise hits
one rank here and another there: what is the same rank again and again is none.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from hpczero.runs import rank_times
from hpczero.runs.columns import Numbers
from hpczero.runs.rank_times import RankTimes
from hpczero.runs.record import Run

_SHARE = 0.15  # of a step, by which its own part is longer than the other ranks' median
_SHARE_ALONE = 0.2  # where it is alone in its stage, and the others have other work
_MOST_ROWS = 0.6  # share of the rows in which that is so
_LEAST_ROWS = 10
_LATEST = 20  # rows that are looked at
_LATEST_OF_ALL = 60  # from which they are taken, where many have saves
CAUSES = {
    "compute": "its computing takes longer: a slower processor, or more work",
    "taken": "another process takes its processor",
    "stopped": "it stood still: its process is stopped again and again, or waits in the kernel",
    "paged": "it waits for pages from a disk: files that it maps, or memory that was swapped out",
    "data": "it waits for its data: a slow disk or file server, or reading takes more than a step",
    "save": "its part of the checkpoints takes longer to write: a slow disk or file server",
}
_LEAST_SAVES = 3
_TINY = 1e-9


@dataclass(frozen=True)
class Straggler:
    rank: int
    host: str
    cause: str  # a name of CAUSES
    seconds: float  # that it takes longer than the median rank, a step
    step_seconds: float
    first: int  # steps that were looked at
    last: int

    @property
    def words(self) -> str:
        share = self.seconds / self.step_seconds if self.step_seconds else 0.0
        return (
            f"Rank {self.rank} on {self.host} is slow: in steps {self.first:,} to {self.last:,} "
            f"its own part of a step took {self.seconds:.3g} s longer than that of the other ranks "
            f"({share:.0%} of a step). The cause: {CAUSES[self.cause]}."
        )

    def as_data(self) -> dict[str, Any]:
        return asdict(self)


def stragglers(run: Run, times: Sequence[RankTimes] | None = None) -> list[Straggler]:
    """Return the slow ranks of the newest job's last rows, the slowest first."""
    jobs = rank_times.read(run.path) if times is None else times
    if not jobs or jobs[-1].ranks < 2:
        return []
    latest = jobs[-1].newest(_LATEST)
    if len(latest.first) < _LEAST_ROWS:
        return []
    job = _without_saves(jobs[-1].newest(_LATEST_OF_ALL)).newest(_LATEST)
    in_saves = _behind_in_saves(latest)
    is_saving = len(job.first) < _LEAST_ROWS
    job = latest if is_saving else job
    behind = _behind(job)
    if is_saving:
        del behind["compute"], behind["taken"]
    behind["save"] = np.broadcast_to(in_saves, (len(job.first), job.ranks))
    more = np.sum(list(behind.values()), axis=0)
    saves = float(latest.of_field["save"].sum(axis=0).max() / latest.steps.sum())
    steps = job.a_step("step").mean(axis=1) + saves
    alone = np.sum([peers * (peers.sum() == 1) for peers in _peers(job)], axis=0)
    share = np.where(alone, _SHARE_ALONE, _SHARE)
    is_slow = (more > share * steps[:, None]).mean(axis=0) >= _MOST_ROWS
    excess = np.median(more, axis=0)
    hosts = _hosts(run, job)
    found = [
        Straggler(
            int(rank),
            hosts.get(int(rank), "an unknown host"),
            _cause(job, behind, int(rank)),
            float(excess[rank]),
            float(np.median(steps)),
            int(job.first[0]),
            int(job.last[-1]),
        )
        for rank in np.flatnonzero(is_slow)
    ]
    return sorted(found, key=lambda one: -one.seconds)


def _hosts(run: Run, times: RankTimes) -> dict[int, str]:
    """Return the hosts of the newest job that can have made these steps on as many ranks."""
    jobs = [
        job for job in run.jobs if len(job.ranks) == times.ranks and job.first < times.first[-1]
    ]
    return jobs[-1].hosts if jobs else {}


def own_parts(job: RankTimes) -> dict[str, Numbers]:
    """Return seconds a step [rows, ranks] that a rank takes for itself, by cause.

    Computing off the processor is "taken" as far as another one had it, then "paged" as far as
    pages came from a disk, else "stopped".
    """
    compute = job.a_step("compute")
    off = np.clip(compute - job.a_step("processor"), 0.0, None)
    taken = np.minimum(off, job.a_step("taken"))
    paged = np.minimum(off - taken, job.a_step("paged"))
    return {
        "compute": compute - off,
        "taken": taken,
        "stopped": off - taken - paged,
        "paged": paged,
        "data": job.a_step("data"),
        "save": job.a_step("save"),
    }


def _without_saves(job: RankTimes) -> RankTimes:
    """Return the rows in which no save was written: rank 0 then has work that others have not."""
    saved = job.of_field["save"].max(axis=1) > 0
    begun = np.append(saved[1:], False)
    return job.part(~(saved | begun))


def _behind(job: RankTimes) -> dict[str, Numbers]:
    """Return by how much each part is longer than is usual [rows, ranks].

    Computing, and the loss of a processor, are compared within a stage of the pipeline: others have
    other work, and do it at other moments. A rank that is alone there is not compared in its
    computing. More samples may take more time, and more computing loses the processor more often.
    """
    parts = own_parts(job)
    compute, samples = parts["compute"], job.of_field["samples"]
    behind = {name: _more_than_others(part, np.ones_like(part)) for name, part in parts.items()}
    behind["taken"] = _more_than_others(parts["taken"], compute)
    behind["compute"] = np.zeros_like(compute)
    for peers in _peers(job):
        if peers.sum() > 1:
            for name, work in ("compute", samples), ("taken", compute):
                behind[name][:, peers] = _more_than_others(parts[name][:, peers], work[:, peers])
    return behind


def _peers(job: RankTimes) -> list[Numbers]:
    """Return for each stage of the pipeline which ranks it has."""
    stages = job.of_field["stage"][-1]
    return [stages == stage for stage in np.unique(stages)]


def _behind_in_saves(job: RankTimes) -> Numbers:
    """Return by how much the saves are longer than is usual, in seconds of each step [ranks].

    Most rows may have no save. A single long one says nothing.
    """
    seconds = job.of_field["save"]
    saves = seconds[seconds.max(axis=1) > 0]
    if len(saves) < _LEAST_SAVES:
        return np.zeros(job.ranks)
    more = np.median(_more_than_others(saves, np.ones_like(saves)), axis=0)
    behind: Numbers = more * len(saves) / job.steps.sum()
    return behind


def _more_than_others(values: Numbers, work: Numbers) -> Numbers:
    """Return how much more each rank has than the median of the others [rows, ranks].

    Who has more `work` than others may have more, in proportion.
    """
    a_work = values / np.maximum(work, _TINY)
    return values - np.maximum(_median_of_others(values), work * _median_of_others(a_work))


def _median_of_others(values: Numbers) -> Numbers:
    """Return for each rank the median of all others' values [rows, ranks]."""
    order = np.argsort(values, axis=1)
    place = np.argsort(order, axis=1)
    in_order = np.take_along_axis(values, order, axis=1)
    others = values.shape[1] - 1
    low, high = (
        np.where(at < place, in_order[:, at, None], in_order[:, at + 1, None])
        for at in ((others - 1) // 2, others // 2)
    )
    median: Numbers = (low + high) / 2
    return median


def _cause(job: RankTimes, behind: dict[str, Numbers], rank: int) -> str:
    """Return the part by which the rank is behind most.

    A main thread that waits for its helpers, whose processors are taken, may spin or sleep.
    """
    of_rank = {name: float(np.median(part[:, rank])) for name, part in behind.items()}
    cause = max(of_rank, key=lambda name: of_rank[name])
    helpers = job.a_step("helpers")
    late = float(np.median(_more_than_others(helpers, np.ones_like(helpers))[:, rank]))
    return "taken" if cause in ("compute", "stopped") and late > of_rank[cause] / 2 else cause
