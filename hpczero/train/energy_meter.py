"""The energy that a job takes, noted by rank 0 in `<run>/energy.jsonl`: a killed job keeps it.

One rank of each computer reads RAPL, and the first rank of each GPU NVML. RAPL knows computers
alone: other jobs on the same one count, too. A line has the sums since the job's start.
"""

import json
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from hpczero import env, safe_files
from hpczero.comm.world import World
from hpczero.errors import InputError
from hpczero.runs import energy
from hpczero.train import setup
from hpczero.train.energy_counters import Gpu, NotMeasured, Rapl

_EVERY = 5.0  # seconds between two lines, at least


class EnergyMeter:
    """On every rank; collective but for `close`. Without any counter nothing is done any more."""

    def __init__(self, world: World, run: Path | None, warn: Callable[[str], None]) -> None:
        """`run`: the run's directory on rank 0, None elsewhere.

        Where a line cannot be written the run is warned, once, and goes on without.
        """
        self._world = world
        self._run = run
        self._warn = warn
        self._began = datetime.now(UTC).isoformat(timespec="milliseconds")
        self._start = time.monotonic()
        self._written = -_EVERY
        self._rapl: Rapl | None = None
        self._gpu: Gpu | None = None
        self._facts: dict[str, Any] = {}
        of_ranks = world.gather_objects(self._open())
        if of_ranks is not None:
            self._facts = _facts(of_ranks)
        self.is_on: bool = world.broadcast_object(bool(self._facts.get("counters")))
        if not self.is_on:
            self._write([])

    def _open(self) -> list[Any]:
        """Open the counters of this rank; return for both kinds "" or why not, None: not its."""
        computer, gpu = setup.computer_of(self._world), self._world.device.identity
        places = self._world.all_gather_objects([computer, gpu])
        reads = [one[0] for one in places].index(computer) == self._world.rank
        uses = bool(gpu) and [tuple(one) for one in places].index((computer, gpu)) == (
            self._world.rank
        )
        why: list[Any] = [None, None]
        if reads:
            try:
                self._rapl = Rapl(env.powercap())
                why[0] = ""
            except NotMeasured as error:
                why[0] = str(error)
        if uses:
            try:
                self._gpu = Gpu(gpu)
                why[1] = ""
            except NotMeasured as error:
                why[1] = str(error)
        return why

    def note(self, at_end: bool = False) -> None:
        """Write what was taken so far, unless the last line is seconds old."""
        if not self.is_on:
            return
        of_ranks = self._world.gather_objects(self._joules())
        if of_ranks is not None and (at_end or time.monotonic() - self._written >= _EVERY):
            self._write(of_ranks)

    def _joules(self) -> list[float]:
        gpu = 0.0
        if self._gpu:
            try:
                gpu = self._gpu.joules()
            except NotMeasured as error:
                self._gpu = None
                self._warn(f"the energy of a GPU is not measured any more: {error}")
        return [self._rapl.joules() if self._rapl else 0.0, gpu]

    def _write(self, of_ranks: list[Any]) -> None:
        if self._run is None or not self._run.is_dir():
            return
        now = time.monotonic()
        sums = [sum(one[at] for one in of_ranks) for at in range(2)]
        seconds = now - self._start
        line = {"began": self._began, "seconds": round(seconds, 3), **self._facts}
        line |= dict(zip(("processors", "gpus"), (round(one, 3) for one in sums), strict=True))
        try:
            with safe_files.append_to(self._run / energy.FILE) as file:
                file.write(json.dumps(line) + "\n")
        except (OSError, InputError) as error:
            self._warn(f"the energy is not noted any more: {self._run / energy.FILE}: {error}")
            self._run = None
        self._written = now

    def close(self) -> None:
        if self._rapl:
            self._rapl.close()
        self._rapl = self._gpu = None
        self.is_on = False


def _facts(of_ranks: list[Any]) -> dict[str, Any]:
    """Return how many counters of each kind there are, of how many, and why others are not."""
    counts = []
    why: dict[str, None] = {}
    for at in range(2):
        known = [one[at] for one in of_ranks if one[at] is not None]
        counts += [known.count(""), len(known)]
        why |= dict.fromkeys(filter(None, known))
    return {
        "counters": counts[0] + counts[2],
        "nodes_read": counts[0],
        "nodes": counts[1],
        "gpus_read": counts[2],
        "gpus_used": counts[3],
        "why": "; ".join(list(why)[:3]),
    }
