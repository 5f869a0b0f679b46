"""How far apart the clocks of the job's computers are, so that what happened on several can be told in one time (`train.trace`).

Every computer's monotonic clock begins when it was started. Rank 0 asks one rank of each other computer for its time, several times: the answer was
given between question and arrival, so half of the shortest round trip bounds the error.
"""

import os
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from hpczero import machine
from hpczero.comm.progress import Steps

_QUESTIONS = 20


class Clock(NamedTuple):
    """Nanoseconds: what this host's clock shows more than rank 0's, give or take."""

    ahead: int
    uncertainty: int


def now() -> int:
    return time.perf_counter_ns()


def computer(host: str) -> str:
    """Equal where the same clock is read."""
    try:
        namespace = os.stat("/proc/self/ns/time").st_ino
    except OSError:
        namespace = 0
    return f"{machine.boot_identity() or host} {namespace}"


def compare(mpi: Any, communicator: Any, asked: Sequence[int], compared: dict[int, Clock]) -> Steps:
    """On rank 0 `compared` gets the clock of every rank asked."""
    question, answer = bytearray(1), bytearray(8)
    if communicator.rank in asked:
        for _ in range(_QUESTIONS):
            yield [communicator.Irecv([question, mpi.BYTE], 0)]
            yield [communicator.Isend([now().to_bytes(8, "little", signed=True), mpi.BYTE], 0)]
    for rank in asked if communicator.rank == 0 else ():
        found = []
        for _ in range(_QUESTIONS):
            begun = now()
            yield [
                communicator.Isend([question, mpi.BYTE], rank),
                communicator.Irecv([answer, mpi.BYTE], rank),
            ]
            found.append(_clock(begun, int.from_bytes(answer, "little", signed=True), now()))
        compared[rank] = min(found, key=lambda clock: clock.uncertainty)


def _clock(begun: int, answered: int, arrived: int) -> Clock:
    return Clock(answered - (begun + arrived) // 2, (arrived - begun + 1) // 2)
