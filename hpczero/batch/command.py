"""A scheduler's command, run with a time limit and without a shell."""

import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from hpczero import env
from hpczero.errors import HpczeroError, InputError
from hpczero.text import first_few, printable

SECONDS = 60.0
_JOB = re.compile(r"\d+(\[\d*\])?(\.[\w.-]+)?")


@dataclass(frozen=True)
class Answer:
    code: int
    out: str
    err: str

    @property
    def complaint(self) -> str:
        said = merged((self.err or self.out).splitlines())
        return printable(" ".join(said)) or f"exit code {self.code}"


class NoAnswer(HpczeroError):
    """The command did not come back: what it did is not known."""


def merged(lines: Sequence[str]) -> list[str]:
    """Each thing once that is said of several jobs; a job's number is a word of its own."""
    said: dict[tuple[str, ...], list[str]] = {}
    for words in filter(None, map(str.split, lines)):
        number = next((word for word in words if _JOB.fullmatch(word)), "")
        numbers = said.setdefault(tuple("" if word == number else word for word in words), [])
        if number and number not in numbers:
            numbers.append(number)
    return [
        " ".join(word or first_few(numbers) for word in words) for words, numbers in said.items()
    ]


def missing(program: str) -> HpczeroError:
    return HpczeroError(
        f"the command {program} is not on this computer: go where jobs are submitted (hpczero render works anywhere)"
    )


def is_here(program: str) -> bool:
    return shutil.which(program) is not None


def run(words: Sequence[str], seconds: float = SECONDS) -> Answer:
    if not is_here(words[0]):
        raise missing(words[0])
    try:
        found = subprocess.run(
            words,
            stdin=subprocess.DEVNULL,
            env=env.for_scheduler(),
            capture_output=True,
            text=True,
            errors="replace",
            timeout=seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise NoAnswer(f"{words[0]} did not answer within {seconds:.0f} s") from None
    return Answer(found.returncode, found.stdout, found.stderr)


def output(words: Sequence[str]) -> str:
    """What it prints; HpczeroError if it fails."""
    answer = run(words)
    if answer.code:
        raise HpczeroError(f"{words[0]} failed: {answer.complaint}")
    return answer.out


# A job as a scheduler sees it, and how a scheduler says no.
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
