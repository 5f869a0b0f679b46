"""Times of a loop of one's own: a step lasts from the end of the one before, without its saves."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from hpczero.comm.world import World
from hpczero.train.energy_meter import EnergyMeter
from hpczero.train.rank_clock import RankClock


class OwnClock:
    """On every rank. Rows are written from the moment at which there is a run's directory."""

    def __init__(self, world: World, every: int) -> None:
        self._world = world
        self._every = every
        self._rows: RankClock | None = None
        self._energy: EnergyMeter | None = None
        self._data = 0.0  # seconds of the step
        self._stood = 0.0  # seconds for checkpoints so far
        self._told = 0.0  # of these
        self._since: float | None = None  # it stands still
        self._begin()

    def _begin(self) -> None:
        self._began = time.perf_counter()
        self._communicated = self._world.ledger.seconds
        self._data = 0.0
        if self._rows:
            self._rows.begin()

    def open(self, run: Path | None, warn: Callable[[str], None]) -> None:
        """Write rows from now on. Collective; `run` is the directory on rank 0, None elsewhere."""
        self._energy = EnergyMeter(self._world, self._every, run, warn)
        self._rows = RankClock(self._world, self._every, run, warn)
        self._rows.begin()

    def begin_anew(self) -> None:
        """Begin a step, after a checkpoint was loaded. Collective."""
        if self._rows:
            self._rows.flush()
        self._begin()

    def waited_for_data(self, seconds: float) -> None:
        self._data += seconds

    @contextmanager
    def standing(self) -> Iterator[None]:
        """Count the time inside as one in which the loop stands still for a checkpoint."""
        self._since = time.perf_counter()
        communicated = self._world.ledger.seconds
        try:
            yield
        finally:
            seconds = time.perf_counter() - self._since
            self._since = None
            self._stood += seconds
            self._began += seconds
            self._communicated += self._world.ledger.seconds - communicated

    def saved(self, seconds: float) -> None:
        """Count seconds in which the loop stood still for this rank's data of a checkpoint."""
        if self._rows:
            self._rows.saved(seconds)

    def stalled(self) -> float:
        """Return for how long the loop has stood still since this was asked last."""
        now = self._stood
        if self._since is not None:
            now += time.perf_counter() - self._since
        seconds = now - self._told
        self._told = now
        return seconds

    def step(self, step: int) -> dict[str, float]:
        """End a step, and return its metrics. Collective."""
        seconds = time.perf_counter() - self._began
        wait = self._world.ledger.seconds - self._communicated
        data = self._data
        if self._rows:
            self._rows.step(step, seconds, wait, data)
        if self._energy:
            self._energy.step(step)
        self._begin()
        return {
            "step_seconds": seconds,
            "data_seconds": data,
            "comm_seconds": wait,
            "compute_seconds": max(0.0, seconds - data - wait),
        }

    def flush(self) -> None:
        """Write the last row, and the energy. Collective."""
        if self._rows:
            self._rows.flush()
        if self._energy:
            self._energy.note()

    def close(self) -> None:
        if self._rows:
            self._rows.close()
        if self._energy:
            self._energy.close()
        self._rows = self._energy = None
