"""The process of a rank: requests to stop it, and the memory that it really takes.

Requests to stop are SIGTERM, SIGINT, SIGUSR2, a `stop` file in the run directory, and the end of
the job's time. A handler only sets a flag; the trainer asks at every step boundary, and all ranks
agree there. A second SIGINT ends the process at once.

Memory is counted beside what was predicted and what the engine counts. Pages that several
processes share count in equal parts (the proportional set size), so that the sum over a node's
ranks is what they take from the node: each shared window once. Pages of files, which the kernel
gives back when asked, are left out.
"""

import os
import re
import resource
import signal
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch

from hpczero import safe_files
from hpczero.comm.node_file import STOP
from hpczero.comm.status import Status
from hpczero.comm.world import World
from hpczero.train import malloc

_WRITTEN = 200e6  # bytes a second that a node writes, as long as no save has been measured
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
        self.at = at
        self._clock = clock
        self._estimate = save_seconds
        self._longest_save = 0.0
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


_LISTENING: "list[StopRequests]" = []
_BEFORE: dict[signal.Signals, Any] = {}  # handlers that were there before the first one listened


class StopRequests:
    """Collects requests inside `with StopRequests(run_directory, deadline) as requests:`.

    Directory and deadline are None on the ranks that do not watch them. Several may listen, to the
    same signals.
    """

    def __init__(
        self,
        run_directory: Path | None,
        deadline: Deadline | None = None,
        status: Status | None = None,
    ) -> None:
        """`status`: this rank's, in which a request is noted at once."""
        self._status = status
        self._deadline = deadline
        self._file = run_directory / STOP if run_directory else None
        self._seen = [False] * len(REASONS)
        self._looked = 0.0

    def __enter__(self) -> "StopRequests":
        if not _LISTENING:
            for name in REASONS[:3]:
                number = signal.Signals[name]
                _BEFORE[number] = signal.signal(number, _note)
        _LISTENING.append(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        _LISTENING.remove(self)
        if not _LISTENING:
            for number, handler in _BEFORE.items():
                signal.signal(number, handler)

    def pending(self) -> list[bool]:
        """Return for each of REASONS whether it has been seen so far."""
        if self._file and time.monotonic() - self._looked > _LOOK_EVERY:
            self._looked = time.monotonic()
            self._seen[3] = self._file.exists()
        if self._deadline and self._deadline.is_near():
            self._seen[4] = True
        return list(self._seen)

    def note(self, number: int) -> None:
        """Note a signal; KeyboardInterrupt: it is the second SIGINT."""
        index = REASONS.index(signal.Signals(number).name)
        if number == signal.SIGINT and self._seen[index]:
            raise KeyboardInterrupt
        self._seen[index] = True
        if self._status:
            self._status.is_to_end = True


def _note(number: int, frame: FrameType | None) -> None:
    for requests in _LISTENING:
        requests.note(number)


def agreed_reason(world: World, requests: StopRequests) -> str:
    """Return the first of REASONS that any rank has seen; "" if none has. Collective."""
    seen = torch.tensor([float(one) for one in requests.pending()], dtype=torch.float64)
    world.everyone.all_reduce(seen)
    return first_reason(seen.tolist())


def first_reason(counts: Sequence[float]) -> str:
    """Return the first of REASONS that some ranks have seen, by how many have seen each."""
    return next((reason for reason, count in zip(REASONS, counts, strict=True) if count), "")


def seconds_of_save(world: World, saved: int) -> float:
    """Return an estimate: this rank's node writes so many fp32 numbers for each of its ranks."""
    return 4 * saved * world.local_size / _WRITTEN


# -- memory that the process takes

_ROLLUP = Path("/proc/self/smaps_rollup")
_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")
_PEAK = b"5"  # what to clear


def held(rollup: Path = _ROLLUP) -> int:
    """Return the bytes that this process holds now; 0 if unknown. A call takes 7 to 14 ms."""
    try:
        text = rollup.read_text()
    except OSError:
        return 0
    lines = re.findall(r"^(\w+): +(\d+) kB$", text, re.MULTILINE)
    sizes = {name: int(size) * 1024 for name, size in lines}
    if "Pss_Anon" in sizes:
        return sizes["Pss_Anon"] + sizes["Pss_Shmem"] + sizes.get("SwapPss", 0)
    return sizes.get("Pss", 0) + sizes.get("SwapPss", 0)  # before Linux 5.4: including files


def peak_resident() -> int:
    """Return the most bytes that were resident at a time, those of files too."""
    try:
        known = re.search(r"^VmHWM:\s+(\d+) kB$", _STATUS.read_text(), re.MULTILINE)
    except OSError:
        known = None
    # the latter is also that of the process which started this one
    return 1024 * int(known[1] if known else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)


def forget_peak() -> bool:
    """Let `peak_resident` begin anew; False where the kernel cannot do that."""
    try:
        file = safe_files.open_for_writing(_CLEAR)
        try:
            os.write(file, _PEAK)
        finally:
            os.close(file)
    except OSError:
        return False
    return True


def held_on_nodes(world: World) -> list[int] | None:
    """Return the bytes that the ranks of each node hold, on rank 0. Collective.

    For tensors on a GPU it is what they hold there. All ranks read at the same time, as pages are
    divided among their users.
    """
    malloc.give_back_free_memory()
    world.all_gather_objects(0)  # a barrier: no rank is allocating now
    on_device = world.device.memory()
    of_ranks = world.gather_objects(on_device.held if on_device else held())
    if of_ranks is None:
        return None
    sums = [0] * (max(world.node_of_rank) + 1)
    for node, size in zip(world.node_of_rank, of_ranks, strict=True):
        sums[node] += size
    return sums


def summary(
    world: World,
    predicted: Mapping[str, int],
    allocated: Mapping[str, int],
    growth: list[int] | None,
    most: Mapping[str, int],
) -> dict[str, Any] | None:
    """Return the memory figures for summary.json, on rank 0. Collective.

    For every rank they are the bytes predicted and allocated, by kind (its part of what it shares),
    and the `most` that it held.
    For every node it is how much more its ranks held after some steps than before the engine.
    """
    figures: dict[str, Any] = {"predicted": predicted, "allocated": allocated, **most}
    if on_device := world.device.memory():
        figures["device"] = {"peak": on_device.peak, "total": on_device.total}
    ranks = world.gather_objects(figures)
    if ranks is None or growth is None:
        return None
    nodes = [{"ranks": 0, "allocated": 0, "measured": measured} for measured in growth]
    for node, of_rank in zip(world.node_of_rank, ranks, strict=True):
        nodes[node]["ranks"] += 1
        nodes[node]["allocated"] += sum(of_rank["allocated"].values())
    return {"ranks": ranks, "nodes": nodes}


def growth(before: list[int] | None, after: list[int] | None) -> list[int] | None:
    """Return the bytes that each node's ranks took between two readings, on rank 0."""
    if before is None or after is None:
        return None
    return [late - early for early, late in zip(before, after, strict=True)]
