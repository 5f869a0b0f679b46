"""Ranks that others wait for, step after step, and the reason why (pure).

A rank is slow where its own part of a step (all but its waits for others) takes longer than that of
the other ranks, by more than a share of the step, in most of the rows of `rank_times`. Noise hits
one rank here and another there: what is the same rank again and again is none.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hpczero.runs.columns import Numbers
from hpczero.runs.rank_times import RankTimes
from hpczero.runs.record import Run

_SHARE = 0.15  # of a step, by which its own part is longer than the other ranks' median
_SHARE_ALONE = 0.2  # where it is alone in its stage, and the others have other work
_MOST_ROWS = 0.6  # share of the rows in which that is so
_LEAST_ROWS = 10
_LATEST = 20  # rows that are looked at
LATEST_OF_ALL = 60  # from which they are taken, where many have saves
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
    seconds: float  # that its own part of a step takes longer than the median of the others
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


def stragglers(run: Run, times: Sequence[RankTimes]) -> list[Straggler]:
    """Return the slow ranks of the newest job's last rows, the slowest first."""
    if not times or times[-1].ranks < 2:
        return []
    latest = times[-1].newest(_LATEST)
    calm = _without_saves(times[-1].newest(LATEST_OF_ALL)).newest(_LATEST)
    is_calm = len(calm.first) >= _LEAST_ROWS
    rows = calm if is_calm else latest
    if len(rows.first) < _LEAST_ROWS:
        return []
    behind = _behind(rows, compares_computing=is_calm)
    behind["save"] = np.broadcast_to(_behind_in_saves(latest), (len(rows.first), rows.ranks))
    more = np.sum(list(behind.values()), axis=0)
    saves = float(latest.of_field["save"].sum(axis=0).max() / latest.steps.sum())
    steps = rows.a_step("step").mean(axis=1) + saves
    _, at, ranks = np.unique(rows.of_field["stage"][-1], return_inverse=True, return_counts=True)
    share = np.where(ranks[at] == 1, _SHARE_ALONE, _SHARE)
    seconds = np.median(more, axis=0)
    is_slow = (more > share * steps[:, None]).mean(axis=0) >= _MOST_ROWS
    found = [
        Straggler(
            rank,
            run.host_of(rank, rows.ranks, float(rows.first[-1])),
            _cause(rows, behind, rank),
            float(seconds[rank]),
            float(np.median(steps)),
            int(rows.first[0]),
            int(rows.last[-1]),
        )
        for rank in np.flatnonzero(is_slow).tolist()
    ]
    return sorted(found, key=lambda one: -one.seconds)


def _own_parts(job: RankTimes) -> dict[str, Numbers]:
    """Return seconds a step [rows, ranks] that a rank takes for itself, by cause, without saves.

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
    }


def _without_saves(job: RankTimes) -> RankTimes:
    """Return the rows in which no save was written: rank 0 then has work that others have not."""
    saved = job.of_field["save"].max(axis=1) > 0
    begun = np.append(saved[1:], False)
    return job.part(~(saved | begun))


def _behind(job: RankTimes, compares_computing: bool) -> dict[str, Numbers]:
    """Return by how much each part is longer than is usual [rows, ranks].

    Computing, and the loss of a processor, are compared within a stage of the pipeline: others have
    other work, and do it at other moments. A rank that is alone there is not compared in its
    computing. More samples may take more time, and more computing loses the processor more often.
    """
    parts = _own_parts(job)
    compute, taken = parts.pop("compute"), parts.pop("taken")
    behind = {name: _more_than_others(part) for name, part in parts.items()}
    if not compares_computing:
        return behind
    behind["compute"] = np.zeros_like(compute)
    behind["taken"] = _more_than_others(taken, compute)
    stages = job.of_field["stage"][-1]
    for stage in np.unique(stages):
        peers = stages == stage
        if peers.sum() > 1:
            samples = job.of_field["samples"][:, peers]
            behind["compute"][:, peers] = _more_than_others(compute[:, peers], samples)
            behind["taken"][:, peers] = _more_than_others(taken[:, peers], compute[:, peers])
    return behind


def _behind_in_saves(job: RankTimes) -> Numbers:
    """Return by how much the saves are longer than is usual, in seconds of each step [ranks].

    Most rows may have no save. A single long one says nothing.
    """
    seconds = job.of_field["save"]
    saves = seconds[seconds.max(axis=1) > 0]
    if len(saves) < _LEAST_SAVES:
        return np.zeros(job.ranks)
    more = np.median(_more_than_others(saves), axis=0)
    behind: Numbers = more * len(saves) / job.steps.sum()
    return behind


def _more_than_others(values: Numbers, work: Numbers | None = None) -> Numbers:
    """Return how much more each rank has than the median of the others [rows, ranks].

    Who has more `work` than others may have more, in proportion.
    """
    usual = _median_of_others(values)
    if work is not None:
        each = _median_of_others(values / np.maximum(work, _TINY))
        usual = np.maximum(usual, work * each)
    return values - usual


def _median_of_others(values: Numbers) -> Numbers:
    """Return for each rank the median of all others' values [rows, ranks]."""
    in_order = np.sort(values, axis=1)
    place = values.argsort(axis=1).argsort(axis=1)
    others = values.shape[1] - 1

    def other(at: int) -> Numbers:
        return np.take_along_axis(in_order, at + (place <= at), axis=1)

    median: Numbers = (other((others - 1) // 2) + other(others // 2)) / 2
    return median


def _cause(job: RankTimes, behind: dict[str, Numbers], rank: int) -> str:
    """Return the part by which the rank is behind most.

    A main thread that waits for its helpers, whose processors are taken, may spin or sleep.
    """
    of_rank = {name: float(np.median(part[:, rank])) for name, part in behind.items()}
    cause = max(of_rank, key=lambda name: of_rank[name])
    late = float(np.median(_more_than_others(job.a_step("helpers"))[:, rank]))
    return "taken" if cause in ("compute", "stopped") and late > of_rank[cause] / 2 else cause
