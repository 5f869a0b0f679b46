"""Requests to stop: SIGTERM, SIGINT, SIGUSR2, a file named `stop` in the run directory, and the end of the job's time.

A handler only sets a flag; the trainer asks at every step boundary and all ranks agree there. A second SIGINT ends the process at once.
"""

import signal
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

# When the job ends, and whether there is time to go on (rank 0 asks).
#
# A look is taken at every step boundary, and between the batches of an evaluation. There must be time for what lies between two looks, for the save
# after it, and for the end of the program: the longest of the recent intervals and of the saves so far, and half as much again.
_SPARE = 1.5  # times what was measured
_ENDING = 8.0  # seconds: the run's last words, MPI's end, the launcher's
_INTERVALS = 50  # that are remembered
WRITTEN = 200e6  # bytes a second that a node writes, as long as no save has shown it


class Deadline:
    def __init__(
        self, at: float | None, save_seconds: float, clock: Callable[[], float] = time.time
    ) -> None:
        """`at`: seconds since 1970, or None where nobody knows; `save_seconds`: an estimate, until a save has been measured."""
        self.at, self._clock = at, clock
        self._estimate, self._longest_save = save_seconds, 0.0
        self._looked: float | None = None
        self._intervals: deque[float] = deque(maxlen=_INTERVALS)

    def saved(self, seconds: float) -> None:
        self._longest_save = max(self._longest_save, seconds)

    @property
    def needed(self) -> float:
        """Seconds from one look to the end of the program, if the run is asked to stop at the next."""
        save = self._longest_save or self._estimate
        return _SPARE * (max(self._intervals, default=0.0) + save) + _ENDING

    def is_near(self) -> bool:
        """A look."""
        now = self._clock()
        if self._looked is not None:
            self._intervals.append(now - self._looked)
        self._looked = now
        return self.at is not None and now + self.needed >= self.at


REASONS = ("SIGTERM", "SIGINT", "SIGUSR2", "stop file", "the end of the job's time")
_LOOK_EVERY = 1.0  # seconds between two looks for the stop file: a file system's metadata server has other things to do


class StopRequests:
    """`with StopRequests(run_directory, deadline) as requests:` then `requests.pending()`; both are None where another rank looks after them."""

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
        """Which of REASONS have been seen so far."""
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
