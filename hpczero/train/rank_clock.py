"""Seconds of each rank, gathered every `train.log_every` steps into `<run>/rank_times`.

A step's seconds are those in which the rank waited for others, waited for data, and computed. Of
computing the main thread's processor time is kept, too, and of the step the time in which it could
have run but another one had its processor; where it did neither, and pages came from a disk
meanwhile, that is what it waited for. So a rank that computes longer than others tells why.
"""

import contextlib
import os
import resource
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from hpczero import safe_files
from hpczero.comm.world import World
from hpczero.errors import InputError
from hpczero.runs import rank_times
from hpczero.train.energy_meter import EnergyMeter

_SCHEDULE = "/proc/thread-self/schedstat"  # ns on a processor, ns waiting for one, turns
_THREADS = Path("/proc/self/task")


class RankClock:
    """On every rank; `flush` is collective, and `step` is on every `every`-th step."""

    def __init__(
        self,
        world: World,
        every: int,
        run: Path | None,
        warn: Callable[[str], None],
        energy: EnergyMeter | None = None,
    ) -> None:
        """`run`: the run's directory on rank 0, None elsewhere. `energy` is noted along with rows.

        Where a row cannot be written the run is warned, once, and goes on without.
        """
        self._role = {"stage": 0.0, "samples": 1.0}
        self._world = world
        self._every = every
        self._run = run
        self._warn = warn
        self._energy = energy
        self._schedule = _opened(_SCHEDULE)
        self._file: int | None = None
        self._written = 0  # bytes
        self._begin_row()

    def works(self, stage: int, samples: int) -> None:
        """Note this rank's part of the pipeline and of a step: other work takes other times."""
        self._role = {"stage": float(stage), "samples": float(samples)}
        self._begin_row()

    def _begin_row(self) -> None:
        self._first = self._last = 0
        self._sums = dict.fromkeys(rank_times.FIELDS, 0.0) | self._role
        self._helpers = self._helpers_waited()

    def begin(self) -> None:
        """Begin a step."""
        self._processor = self._processor_time()
        self._taken = self._waited_for_processor()
        self._faults = _pages_from_disks()

    def step(self, step: int, seconds: float, wait: float, data: float) -> None:
        """End a step that took so long, of which the rank waited for others and for data."""
        sums = self._sums
        compute = seconds - wait - data
        processor = self._processor_time() - self._processor
        taken = self._waited_for_processor() - self._taken
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

    def flush(self, at_end: bool = False) -> None:
        """Write a row of the steps since the last one, if there were any, and their energy."""
        if self._last:
            self._flush()
        if self._energy:
            self._energy.note(at_end)

    def _flush(self) -> None:
        self._sums["helpers"] = max(0.0, self._helpers_waited() - self._helpers)
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
        if self._energy:
            self._energy.close()
        for file in (self._file, self._schedule):
            if file is not None:
                os.close(file)
        self._file = self._schedule = None

    def _processor_time(self) -> float:
        return time.thread_time() - self._world.progress.spun

    def _waited_for_processor(self) -> float:
        if self._schedule is None:
            return 0.0
        with contextlib.suppress(OSError, ValueError, IndexError):
            return 1e-9 * int(os.pread(self._schedule, 100, 0).split()[1])
        return 0.0

    def _helpers_waited(self) -> float:
        """Return the seconds in which other threads of this process waited for a processor."""
        own = str(threading.get_native_id())
        total = 0.0
        with contextlib.suppress(OSError):
            for thread in _THREADS.iterdir():
                with contextlib.suppress(OSError, ValueError, IndexError):
                    if thread.name != own:
                        total += 1e-9 * int((thread / "schedstat").read_bytes().split()[1])
        return total


def _pages_from_disks() -> int:
    """Return how many pages this process has waited for so far, in all its threads.

    One that waits for a page may hold the lock of Python, which the others then wait for.
    """
    return resource.getrusage(resource.RUSAGE_SELF).ru_majflt


def _opened(path: str) -> int | None:
    """Return a descriptor; None where the kernel does not say this."""
    with contextlib.suppress(OSError):
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    return None
