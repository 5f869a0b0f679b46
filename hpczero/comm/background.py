"""Operations between nodes go on while the rank computes.

MPI moves larger messages only inside its calls. Polls between layers come too seldom for a network: a thread makes them while something is on its
way to or from another node, a thousand times a second, which costs some 3 % of a core then, and nothing else. All calls of MPI are made
under one lock, so MPI_THREAD_SERIALIZED is enough.
"""

import threading
import time
from collections.abc import Callable

_PERIOD = 0.001  # seconds; with UCX's own segment size over TCP (see env.prepare_mpi) half of what 1 Gbit/s carries


class Background:
    def __init__(self, advance: Callable[[], bool]) -> None:
        """`advance` moves what can move, and says whether there is more to come."""
        self._advance = advance
        self._awake = threading.Event()
        self._thread: threading.Thread | None = None
        self._ends = False

    def wake(self) -> None:
        """Something has been started."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="hpczero-messages", daemon=True)
            self._thread.start()
        self._awake.set()

    def close(self) -> None:
        if self._thread:
            self._ends = True
            self._awake.set()
            self._thread.join()

    def _run(self) -> None:
        while True:
            self._awake.wait()
            if self._ends:
                return
            self._awake.clear()
            if self._advance():
                self._awake.set()
                time.sleep(_PERIOD)
