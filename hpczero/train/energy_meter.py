"""The energy that a job takes, noted by rank 0 in `<run>/energy.jsonl`: a killed job keeps it.

One rank of each computer reads RAPL, and the first rank of each GPU NVML. RAPL knows computers
alone: other jobs on the same one count, too. A line has the sums since the job's start.
"""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from hpczero import env, safe_files
from hpczero.comm.world import World
from hpczero.errors import InputError
from hpczero.runs import energy
from hpczero.train import setup
from hpczero.train.energy_counters import Gpu, NotMeasured, Rapl

_SECONDS = 5.0  # between two lines, at least


class EnergyMeter:
    """On every rank; collective but for `close`. Without any counter nothing is done any more."""

    def __init__(
        self, world: World, every: int, run: Path | None, warn: Callable[[str], None]
    ) -> None:
        """`every`: steps between two notes. `run`: its directory on rank 0, None elsewhere.

        Where a line cannot be written the run is warned, once, and goes on without.
        """
        self._world = world
        self._every = every
        self._run = run
        self._warn = warn
        self._began = datetime.now(UTC).isoformat(timespec="milliseconds")
        self._start = time.monotonic()
        self._written = -_SECONDS
        self._counters: dict[str, Rapl | Gpu] = {}  # of this rank, by kind
        self._joules: dict[str, float] = {}
        self._facts: dict[str, Any] = {}
        of_ranks = world.gather_objects(self._open())
        if of_ranks is not None:
            self._facts = _facts(of_ranks)
        reads = self._facts.get("nodes_read", 0) + self._facts.get("gpus_read", 0)
        self.is_on: bool = world.broadcast_object(reads > 0)
        if not self.is_on:
            self._write([])

    def _open(self) -> dict[str, str]:
        """Open the counters that are this rank's; return for each kind why it is not read, or "".

        Of all ranks on a computer, or a GPU, the first one reads.
        """
        mine = setup.computer_of(self._world), self._world.device.identity
        places = [tuple(one) for one in self._world.all_gather_objects(list(mine))]
        makers: dict[str, Callable[[], Rapl | Gpu]] = {}
        if [computer for computer, _ in places].index(mine[0]) == self._world.rank:
            makers["processors"] = lambda: Rapl(env.powercap())
        if mine[1] and places.index(mine) == self._world.rank:
            makers["gpus"] = lambda: Gpu(mine[1])
        why = dict.fromkeys(makers, "")
        for kind, make in makers.items():
            try:
                self._counters[kind] = make()
            except NotMeasured as error:
                why[kind] = str(error)
        return why

    def step(self, step: int) -> None:
        """Note the energy every few steps, unless the last line is but seconds old."""
        if step % self._every == 0:
            self.note(_SECONDS)

    def note(self, after: float = 0.0) -> None:
        """Write what was taken so far, unless the last line is younger than so many seconds."""
        if not self.is_on:
            return
        self._read()
        of_ranks = self._world.gather_objects(self._joules)
        if of_ranks is not None and time.monotonic() - self._written >= after:
            self._write(of_ranks)

    def _read(self) -> None:
        for kind, counter in list(self._counters.items()):
            try:
                self._joules[kind] = counter.joules()
            except NotMeasured as error:  # what was read until now counts
                del self._counters[kind]
                self._warn(f"the energy of a GPU is not measured any more: {error}")

    def _write(self, of_ranks: Sequence[Mapping[str, float]]) -> None:
        if self._run is None or not self._run.is_dir():
            return
        now = time.monotonic()
        line = {"began": self._began, "seconds": round(now - self._start, 3), **self._facts}
        for kind in energy.KINDS:
            line[kind] = round(sum(one.get(kind, 0.0) for one in of_ranks), 3)
        try:
            with safe_files.append_to(self._run / energy.FILE) as file:
                file.write(json.dumps(line) + "\n")
        except (OSError, InputError) as error:
            self._warn(f"the energy is not noted any more: {self._run / energy.FILE}: {error}")
            self._run = None
        self._written = now

    def close(self) -> None:
        for counter in self._counters.values():
            if isinstance(counter, Rapl):
                counter.close()
        self._counters = {}
        self.is_on = False


def _facts(of_ranks: Sequence[Mapping[str, str]]) -> dict[str, Any]:
    """Return how many counters of each kind are read, of how many, and why others are not."""
    nodes, gpus = ([one[kind] for one in of_ranks if kind in one] for kind in energy.KINDS)
    why = dict.fromkeys(filter(None, [*nodes, *gpus]))
    return {
        "nodes_read": nodes.count(""),
        "nodes": len(nodes),
        "gpus_read": gpus.count(""),
        "gpus_used": len(gpus),
        "why": "; ".join(list(why)[:3]),
    }
