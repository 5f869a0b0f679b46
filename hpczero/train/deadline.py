"""When the job ends, and whether there is time to go on (rank 0 asks).

A look is taken at every step boundary, and between the batches of an evaluation. There must be time for what lies between two looks, for the save
after it, and for the end of the program: the longest of the recent intervals and of the saves so far, and half as much again.
"""

import time
from collections import deque
from collections.abc import Callable

_SPARE = 1.5  # times what was measured
_ENDING = 8.0  # seconds: the run's last words, MPI's end, the launcher's
_INTERVALS = 50  # that are remembered
WRITTEN = 200e6  # bytes a second that a node writes, as long as no save has shown it


class Deadline:
    def __init__(self, at: float | None, save_seconds: float, clock: Callable[[], float] = time.time) -> None:
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
