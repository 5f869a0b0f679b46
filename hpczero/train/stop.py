"""Requests to stop: SIGTERM, SIGINT, SIGUSR2, a `stop` file, and the end of the job's time.

The file lies in the run directory. A handler only sets a flag; the trainer asks at every step
boundary, and all ranks agree there. A second SIGINT ends the process at once.
"""

import signal
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

WRITTEN = 200e6  # bytes a second that a node writes, as long as no save has been measured
REASONS = ("SIGTERM", "SIGINT", "SIGUSR2", "stop file", "the end of the job's time")

_SPARE = 1.5  # times the measured seconds
_ENDING = 8.0  # seconds: the run's last words, the end of MPI and of the launcher
_INTERVALS = 50  # that are remembered
_LOOK_EVERY = 1.0  # seconds between two looks for the stop file: metadata servers are shared


class Deadline:
    """The end of the job's time, on rank 0, which asks whether it `is_near`.

    It asks at every step boundary, and between the batches of an evaluation. There must be time for
    what lies between two looks, for the save after it, and for the end of the program: the longest
    of the recent intervals and of the saves so far, and half as much again.
    """

    def __init__(
        self, at: float | None, save_seconds: float, clock: Callable[[], float] = time.time
    ) -> None:
        """`at`: seconds since 1970, or None if unknown; `save_seconds`: the estimate of a save."""
        self.at, self._clock = at, clock
        self._estimate, self._longest_save = save_seconds, 0.0
        self._looked: float | None = None
        self._intervals: deque[float] = deque(maxlen=_INTERVALS)

    def saved(self, seconds: float) -> None:
        self._longest_save = max(self._longest_save, seconds)

    @property
    def needed(self) -> float:
        """Seconds from a look to the end of the program, if the next look asks the run to stop."""
        save = self._longest_save or self._estimate
        return _SPARE * (max(self._intervals, default=0.0) + save) + _ENDING

    def is_near(self) -> bool:
        """Look at the clock."""
        now = self._clock()
        if self._looked is not None:
            self._intervals.append(now - self._looked)
        self._looked = now
        return self.at is not None and now + self.needed >= self.at


class StopRequests:
    """Collects requests inside `with StopRequests(run_directory, deadline) as requests:`.

    Both arguments are None on the ranks that do not watch them.
    """

    def __init__(self, run_directory: Path | None, deadline: Deadline | None = None) -> None:
        self._deadline = deadline
        self._file = run_directory / "stop" if run_directory else None
        self._seen = [False] * len(REASONS)
        self._before: dict[signal.Signals, Any] = {}
        self._looked = 0.0

    def __enter__(self) -> "StopRequests":
        for name in REASONS[:3]:
            number = signal.Signals[name]
            self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def pending(self) -> list[bool]:
        """Return for each of REASONS whether it has been seen so far."""
        if self._file and time.monotonic() - self._looked > _LOOK_EVERY:
            self._looked = time.monotonic()
            self._seen[3] = self._file.exists()
        if self._deadline and self._deadline.is_near():
            self._seen[4] = True
        return list(self._seen)

    def _note(self, number: int, frame: FrameType | None) -> None:
        index = REASONS.index(signal.Signals(number).name)
        if number == signal.SIGINT and self._seen[index]:
            raise KeyboardInterrupt
        self._seen[index] = True
