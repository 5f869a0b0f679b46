"""A job as a scheduler sees it, and how a scheduler says no."""

from dataclasses import dataclass
from typing import Literal

from hpczero.errors import HpczeroError, InputError

State = Literal["queued", "held", "running", "ended"]


@dataclass(frozen=True)
class Queued:
    number: str
    state: State
    reason: str  # why it waits, or how it ended
    tag: str
    start: str = ""  # when it is expected to start, or did

    @property
    def lives(self) -> bool:
        return self.state != "ended"


class Transient(HpczeroError):
    """The scheduler could not answer; asked again, it may."""


class Refused(InputError):
    """The scheduler does not want the job as it is."""
