"""Time of actions that ranks carry out at once, in turns, within a budget that all ranks agree on.

Every call is collective over the world. Protocol of a measurement: an action runs twice, first to
warm up; the slower rank's second time says how often it runs in a turn, so that a turn is long by
the clock, and how many turns there is time for. All ranks begin each turn together.

Other programs may use the machine. Where every rank computes in one thread and there are no more
ranks than cores, the system says how long a rank had no core
(`processors.waited_for_core`): of what ranks do alone that time does not count, and of what they do
together those turns do not in which one of them had none, if others remain.
"""

import statistics
import time
from collections.abc import Callable, Sequence

import torch

from hpczero import machine, processors
from hpczero.calibrate.findings import Timing
from hpczero.comm.world import World

Action = Callable[[], object]
Turn = Sequence[float]  # seconds of a rank, and those of them in which it had no core

_TURN = 0.004  # seconds that a turn takes at least
_TURN_TOGETHER = 0.0005  # it is short, so that some are not disturbed
_MOST_REPEATS = 2000
_FEWEST, _MOST, _MOST_TOGETHER = 3, 25, 300  # turns
_LEAST_OWN = 0.01  # of a turn
_QUIET = 0.03  # of a turn: so long a rank may wait for a core
_SPARE = 4  # times as much memory is free


class Turns:
    """`begin` gives the next measurements their seconds; `is_over` says when these are used up."""

    def __init__(self, world: World) -> None:
        """`.memory`: bytes that each rank may take for what it times. Collective."""
        self.world = world
        usable = min(world.all_gather_objects(machine.memory().usable)) // world.local_size
        self.memory = usable // _SPARE
        self.core_of_its_own = False  # one thread, and no more ranks than cores
        self._end = 0.0
        self._each = 0.0

    def begin(self, seconds: float, cases: int) -> None:
        """Give so many cases these seconds of rank 0 together, from now on. Collective."""
        seconds = float(self.world.broadcast_object(seconds))
        self._end = time.perf_counter() + seconds
        self._each = seconds / max(1, cases)

    def is_over(self) -> bool:
        """Return True if rank 0 has no time left for another case. Collective."""
        return bool(self.world.broadcast_object(time.perf_counter() >= self._end))

    def of(
        self,
        action: Action | None,
        ranks: Sequence[int] = (),
        together: bool = False,
        by_host: bool = False,
        own_threads: bool = False,
    ) -> Timing:
        """Return the time of an action on these ranks (none given: all). Collective.

        The others wait, and need no action. A turn counts as long as the median of its ranks
        takes; where they act `together`, as the slowest does. `by_host`: until a device has been
        asked, not until it is done. `own_threads`: a thread of the rank's own takes its core, which
        disturbs no turn.
        """
        mine = action if not ranks or self.world.rank in ranks else None
        on_host = by_host or not self.world.device.has_queues
        run = self._on_host if on_host else self._on_device
        run(mine, 1)
        once = self._largest(run(mine, 1))
        at_least, most = (_TURN_TOGETHER, _MOST_TOGETHER) if together else (_TURN, _MOST)
        repeats = max(1, min(_MOST_REPEATS, round(at_least / max(once, 1e-9))))
        turns = max(_FEWEST, min(most, int(self._each / (once * repeats + 1e-9)) - 1))
        found = []
        for _ in range(turns):
            before = self._waited()
            self.world.everyone.barrier()
            before = before if together else self._waited()
            seconds = run(mine, repeats)
            found.append((seconds, 0.0 if own_threads else self._waited() - before))
        everyones = self.world.all_gather_objects(found if mine else None)
        by_turn = list(zip(*(of_rank for of_rank in everyones if of_rank), strict=True))
        seconds_of_turns = of_turns(by_turn, together)
        low, median, high = statistics.quantiles(seconds_of_turns, n=4, method="inclusive")
        return Timing(low / repeats, median / repeats, high / repeats, len(seconds_of_turns))

    def _largest(self, seconds: float) -> float:
        largest = torch.tensor([seconds], dtype=torch.float64)
        self.world.everyone.all_reduce(largest, "max")
        return float(largest)

    def _waited(self) -> float:
        return processors.waited_for_core() if self.core_of_its_own else 0.0

    def _on_host(self, action: Action | None, repeats: int) -> float:
        began = time.perf_counter()
        if action:
            for _ in range(repeats):
                action()
        seconds = time.perf_counter() - began
        if self.world.device.has_queues:
            torch.cuda.synchronize(self.world.device.torch)
        return seconds

    def _on_device(self, action: Action | None, repeats: int) -> float:
        if action is None:
            return 0.0
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(repeats):
            action()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3


def of_turns(turns: Sequence[Sequence[Turn]], together: bool) -> list[float]:
    """Return the seconds of the turns that count, from those of each rank (pure)."""
    if not together:
        own = [
            [max(seconds - waited, seconds * _LEAST_OWN) for seconds, waited in turn]
            for turn in turns
        ]
        return [float(statistics.median(ranks)) for ranks in own]

    def disturbance(turn: Sequence[Turn]) -> float:
        return max(waited / seconds for seconds, waited in turn)

    in_order = sorted(turns, key=disturbance)
    quiet = [turn for turn in in_order if disturbance(turn) < _QUIET]
    kept = quiet if len(quiet) >= _FEWEST else in_order[:_FEWEST]
    return [max(seconds for seconds, _ in turn) for turn in kept]
