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

_SHARE = 0.1  # of a step, by which its own part is longer than the other ranks' median
_MOST_ROWS = 0.6  # share of the rows in which that is so
_LEAST_ROWS = 5
_LATEST = 20  # rows that are looked at
_CAUSES = {
    "compute": "its computing takes longer: a slower processor, or more work",
    "taken": "another process takes its processor",
    "stopped": "it stood still, neither computing nor waiting for a processor (stopped, or a disk)",
    "disk": "it waits for its data, or for a checkpoint to be written",
}


@dataclass(frozen=True)
class Straggler:
    rank: int
    host: str
    cause: str  # a name of _CAUSES
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
            f"({share:.0%} of a step). The cause: {_CAUSES[self.cause]}."
        )

    def as_data(self) -> dict[str, Any]:
        return asdict(self)


def stragglers(run: Run, times: Sequence[RankTimes] | None = None) -> list[Straggler]:
    """Return the slow ranks of the newest job's last rows, the slowest first."""
    jobs = rank_times.read(run.path) if times is None else times
    if not jobs or jobs[-1].ranks < 2:
        return []
    job = jobs[-1]
    latest = slice(-_LATEST, None)
    parts = own_parts(job)
    steps = job.a_step("step")[latest].mean(axis=1)
    total = np.sum(list(parts.values()), axis=0)[latest]
    if len(total) < _LEAST_ROWS:
        return []
    more = _more_than_others(total)
    is_slow = (more > _SHARE * steps[:, None]).mean(axis=0) >= _MOST_ROWS
    excess = np.median(more, axis=0)
    hosts = _hosts(run, job)
    first, last = int(job.first[latest][0]), int(job.last[-1])
    found = [
        Straggler(
            int(rank),
            hosts.get(int(rank), "an unknown host"),
            _cause({name: part[latest] for name, part in parts.items()}, int(rank)),
            float(excess[rank]),
            float(np.median(steps)),
            first,
            last,
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

    Computing off the processor is "taken" as far as another one had it, else "stopped".
    """
    compute = job.a_step("compute")
    off = np.clip(compute - job.a_step("processor"), 0.0, None)
    taken = np.minimum(off, job.a_step("taken"))
    disk = job.a_step("data") + job.a_step("save")
    return {"compute": compute - off, "taken": taken, "stopped": off - taken, "disk": disk}


def _more_than_others(values: Numbers) -> Numbers:
    """Return how much more each rank has than the median of the others [rows, ranks]."""
    order = np.argsort(values, axis=1)
    place = np.argsort(order, axis=1)
    in_order = np.take_along_axis(values, order, axis=1)
    others = values.shape[1] - 1
    middle = [
        np.where(at < place, in_order[:, at, None], in_order[:, at + 1, None])
        for at in ((others - 1) // 2, others // 2)
    ]
    return values - (middle[0] + middle[1]) / 2


def _cause(parts: dict[str, Numbers], rank: int) -> str:
    """Return the part by which the rank is behind most."""
    behind = {
        name: float(np.median(_more_than_others(part)[:, rank])) for name, part in parts.items()
    }
    return max(behind, key=lambda name: behind[name])
