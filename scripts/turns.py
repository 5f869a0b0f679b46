"""Calls that take turns, and ratios of their times within a round, for the scripts that compare."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import quantiles


@dataclass(frozen=True)
class Ratio:
    """Quartiles of the times' ratios in the rounds."""

    low: float
    middle: float
    high: float

    def __str__(self) -> str:
        return f"{self.middle:5.2f} ({self.low:.2f}-{self.high:.2f})"


def take_turns(
    contenders: Mapping[str, Callable[[], object]], rounds: int, threads: int
) -> dict[str, list[float]]:
    """Return the seconds of each round; every other one goes backwards.

    One thread is timed by its processor time, several by the clock.
    """
    clock = time.thread_time if threads == 1 else time.perf_counter
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(-1, rounds):  # the first round is not counted
        for name in list(contenders)[:: -1 if number % 2 else 1]:
            begun = clock()
            contenders[name]()
            took = clock() - begun
            if number >= 0:
                seconds[name].append(took)
    return seconds


def ratio(ones: Sequence[float], others: Sequence[float]) -> Ratio:
    return Ratio(*quantiles(one / other for one, other in zip(ones, others, strict=True)))
