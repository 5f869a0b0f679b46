"""Seconds of each rank, gathered every `train.log_every` steps into `<run>/rank_times`.

A step's seconds are those in which the rank waited for others, waited for data, and computed. Of
computing the main thread's processor time is kept, too, and of the step the time in which it could
have run but another one had its processor: so a rank that computes longer than others tells why.
"""

import contextlib
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from hpczero import safe_files
from hpczero.comm.world import World
from hpczero.errors import InputError
from hpczero.runs import rank_times
from hpczero.train.energy_meter import EnergyMeter

_SCHEDULE = "/proc/thread-self/schedstat"  # ns on a processor, ns waiting for one, turns


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
        self._world = world
        self._every = every
        self._run = run
        self._warn = warn
        self._energy = energy
        self._schedule = _opened(_SCHEDULE)
        self._file: int | None = None
        self._written = 0  # bytes
        self._begin_row()

    def _begin_row(self) -> None:
        self._first = self._last = 0
        self._sums = dict.fromkeys(rank_times.FIELDS, 0.0)

    def begin(self) -> None:
        """Begin a step."""
        self._processor = self._processor_time()
        self._taken = self._waited_for_processor()

    def step(self, step: int, seconds: float, wait: float, data: float) -> None:
        """End a step that took so long, of which the rank waited for others and for data."""
        sums = self._sums
        sums["step"] += seconds
        sums["longest"] = max(sums["longest"], seconds)
        sums["compute"] += seconds - wait - data
        sums["wait"] += wait
        sums["data"] += data
        sums["processor"] += self._processor_time() - self._processor
        sums["taken"] += self._waited_for_processor() - self._taken
        self._first = self._first or step
        self._last = step
        if step % self._every == 0:
            self.flush()

    def saved(self, seconds: float) -> None:
        """Count seconds in which training stood still for a checkpoint."""
        self._sums["save"] += seconds

    def flush(self, at_end: bool = False) -> None:
        """Write a row of the steps since the last one, if there were any, and their energy."""
        if self._last:
            self._flush()
        if self._energy:
            self._energy.note(at_end)

    def _flush(self) -> None:
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


def _opened(path: str) -> int | None:
    """Return a descriptor; None where the kernel does not say this."""
    with contextlib.suppress(OSError):
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    return None
