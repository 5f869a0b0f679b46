"""A whole training in the terms that its user pays in: days, node-hours and jobs (pure)."""

from dataclasses import dataclass
from math import ceil

from hpczero.errors import InputError
from hpczero.text import format_duration

# Seconds of a job in which it does not train: start, reading the checkpoint, writing the last one.
OF_A_JOB = 600
_HOUR, _DAY = 3600, 86400


@dataclass(frozen=True)
class Bill:
    """What a whole training takes."""

    seconds: float
    nodes: int
    jobs: int

    @classmethod
    def of(cls, steps: int, step_seconds: float, nodes: int, walltime: int) -> "Bill":
        """Return what so many steps take, in jobs of so many seconds."""
        if walltime <= OF_A_JOB:
            raise InputError(
                f"batch.walltime is {format_duration(walltime)}, and a job needs about "
                f"{format_duration(OF_A_JOB)} to start, to read a checkpoint and to write one: "
                "more walltime"
            )
        training = steps * step_seconds
        jobs = ceil(training / (walltime - OF_A_JOB))
        return cls(training + jobs * OF_A_JOB, nodes, jobs)

    @property
    def days(self) -> float:
        return self.seconds / _DAY

    @property
    def node_hours(self) -> float:
        return self.nodes * self.seconds / _HOUR
