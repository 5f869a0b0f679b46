"""Seconds of each rank, gathered every `train.log_every` steps into `<run>/rank_times`.

A step's seconds are those in which the rank waited for others, waited for data, and computed. Of
computing the main thread's processor time is kept, too, and of the step the time in which it could
have run but another one had its processor; where it did neither, and pages came from a disk
meanwhile, that is what it waited for. So a rank that computes longer than others tells why.
"""

import os
import resource
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from hpczero import processors, safe_files
from hpczero.comm.world import World
from hpczero.errors import InputError
from hpczero.runs import rank_times


class RankClock:
    """On every rank; `flush` is collective, and `step` is on every `every`-th step."""

    def __init__(
        self,
        world: World,
        every: int,
        run: Path | None,
        warn: Callable[[str], None],
        stage: int = 0,
        samples: int = 1,
    ) -> None:
        """`run`: the run's directory on rank 0, None elsewhere. `samples`: of a step.

        Where a row cannot be written the run is warned, once, and goes on without.
        """
        self._role = {"stage": float(stage), "samples": float(samples)}
        self._world = world
        self._every = every
        self._run = run
        self._warn = warn
        self._file: int | None = None
        self._written = 0  # bytes
        self._begin_row()

    def _begin_row(self) -> None:
        self._first = self._last = 0
        self._sums = dict.fromkeys(rank_times.FIELDS, 0.0) | self._role
        self._helpers = processors.helpers_waited_for_core()

    def begin(self) -> None:
        """Begin a step."""
        self._processor = self._processor_time()
        self._taken = processors.waited_for_core()
        self._faults = _pages_from_disks()

    def step(self, step: int, seconds: float, wait: float, data: float) -> None:
        """End a step that took so long, of which the rank waited for others and for data."""
        sums = self._sums
        compute = seconds - wait - data
        processor = self._processor_time() - self._processor
        taken = processors.waited_for_core() - self._taken
        sums["step"] += seconds
        sums["compute"] += compute
        sums["wait"] += wait
        sums["data"] += data
        sums["processor"] += processor
        sums["taken"] += taken
        if _pages_from_disks() > self._faults:
            sums["paged"] += max(0.0, compute - processor - taken)
        self._first = self._first or step
        self._last = step
        if step % self._every == 0:
            self.flush()

    def saved(self, seconds: float) -> None:
        """Count seconds in which training stood still for this rank's data of a checkpoint."""
        self._sums["save"] += seconds

    def flush(self) -> None:
        """Write a row of the steps since the last one, if there were any."""
        if not self._last:
            return
        helpers = processors.helpers_waited_for_core() - self._helpers
        self._sums["helpers"] = max(0.0, helpers)  # some may have ended
        of_ranks = self._world.gather_objects([round(s, 6) for s in self._sums.values()])
        # a folder that was removed is restored by its other writers, with a spec
        if of_ranks is not None and self._run and self._run.is_dir():
            try:
                self._write(self._run, of_ranks)
            except (OSError, InputError) as error:
                where = self._run / rank_times.FOLDER
                why = error.strerror if isinstance(error, OSError) else error
                self._warn(f"times of ranks are not written any more: {where}: {why}")
                self._run = None
        self._begin_row()

    def _write(self, run: Path, of_ranks: Sequence[Sequence[float]]) -> None:
        content = rank_times.row(self._first, self._last, of_ranks)
        if self._file is None:
            path = rank_times.next_file(run)
            safe_files.make_own_folder(path.parent)
            self._file = safe_files.create(path)
            content = rank_times.head(len(of_ranks)) + content
        safe_files.write_at(self._file, memoryview(content), self._written)
        self._written += len(content)

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
        self._file = None

    def _processor_time(self) -> float:
        return time.thread_time() - self._world.progress.spun


def _pages_from_disks() -> int:
    """Return how many pages this process has waited for so far, in all its threads.

    One that waits for a page may hold the lock of Python, which the others then wait for.
    """
    return resource.getrusage(resource.RUSAGE_SELF).ru_majflt
