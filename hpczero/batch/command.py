"""Run a scheduler's programs with a time limit and no shell; its jobs and its refusals as types."""

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
_JOB = re.compile(r"\d+(_\d+|\[\d*\])?(\.[\w.-]+)?")


@dataclass(frozen=True)
class Answer:
    code: int
    out: str
    err: str

    @property
    def complaint(self) -> str:
        """The program's own words on one line, else its exit code."""
        words = merge_job_numbers((self.err or self.out).splitlines())
        return printable(" ".join(words)) or f"exit code {self.code}"


class NoAnswer(HpczeroError):
    """The command did not return in time: its effect is unknown."""


class Transient(HpczeroError):
    """The scheduler could not answer now; a retry may succeed."""


class Refused(InputError):
    """The scheduler does not accept the job as it is."""


def merge_job_numbers(lines: Sequence[str]) -> list[str]:
    """Merge the lines that differ only in a job's number (a word of its own) into one line."""
    numbers_of: dict[tuple[str, ...], list[str]] = {}
    for words in filter(None, map(str.split, lines)):
        number = next((word for word in words if _JOB.fullmatch(word)), "")
        without = tuple("" if word == number else word for word in words)
        numbers = numbers_of.setdefault(without, [])
        if number and number not in numbers:
            numbers.append(number)
    return [
        " ".join(word or first_few(numbers) for word in words)
        for words, numbers in numbers_of.items()
    ]


def missing(program: str) -> HpczeroError:
    return HpczeroError(
        f"the command {program} is not on this computer: go where jobs are submitted "
        "(hpczero render works anywhere)"
    )


def is_here(program: str) -> bool:
    return shutil.which(program) is not None


def run(words: Sequence[str], seconds: float = SECONDS) -> Answer:
    if not is_here(words[0]):
        raise missing(words[0])
    try:
        process = subprocess.run(
            words,
            stdin=subprocess.DEVNULL,
            env=env.scheduler_environment(),
            capture_output=True,
            text=True,
            errors="replace",
            timeout=seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise NoAnswer(f"{words[0]} did not answer within {seconds:.0f} s") from None
    return Answer(process.returncode, process.stdout, process.stderr)


def output(words: Sequence[str]) -> str:
    """Return what the command prints; raise HpczeroError if it fails."""
    answer = run(words)
    if answer.code:
        raise HpczeroError(f"{words[0]} failed: {answer.complaint}")
    return answer.out


State = Literal["queued", "held", "running", "ended"]


@dataclass(frozen=True)
class QueuedJob:
    """A job as a scheduler describes it."""

    number: str
    state: State
    reason: str  # why it waits, or how it ended
    tag: str
    start: str = ""  # the time of its start, expected or past

    @property
    def is_alive(self) -> bool:
        return self.state != "ended"


def leading_number(text: str) -> int:
    """Return the whole number that the text begins with; 0 if it begins with none."""
    digits = re.match(r"\d+", text)
    return int(digits[0]) if digits else 0
