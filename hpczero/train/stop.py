"""Requests to stop: SIGTERM, SIGINT, SIGUSR2, a file named `stop` in the run directory, and the end of the job's time.

A handler only sets a flag; the trainer asks at every step boundary and all ranks agree there. A second SIGINT ends the process at once.
"""

import signal
import time
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from hpczero.train.deadline import Deadline

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

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
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
