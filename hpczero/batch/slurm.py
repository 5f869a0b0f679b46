"""Slurm: sbatch, squeue, scancel."""

import re
from collections.abc import Sequence
from pathlib import Path

from hpczero.batch import command
from hpczero.batch.command import Queued, Refused, State, Transient

PROGRAM = "sbatch"
# of a job that needs no cancelling any more
GONE = re.compile(r"Invalid job id|already completing or completed")
_TRANSIENT = (
    "timed out",
    "Unable to contact",
    "not responding",
    "temporarily",
    "Connection refused",
    "Zero Bytes",
    "receive failure",
)
_STATES: dict[str, State] = {"PENDING": "queued", "REQUEUED": "queued", "REQUEUE_FED": "queued"}
_STATES |= {"REQUEUE_HOLD": "held", "SPECIAL_EXIT": "held", "RESV_DEL_HOLD": "held"}
_RUNNING = (
    "RUNNING",
    "COMPLETING",
    "CONFIGURING",
    "SUSPENDED",
    "STAGE_OUT",
    "RESIZING",
    "SIGNALING",
    "STOPPED",
)
_FORMAT = "%i|%T|%r|%S|%k"


def submission(script: Path, log: Path, tag: str, after: str, held: bool) -> list[str]:
    """`log`: a folder. In a file's name % is Slurm's own sign."""
    name = str(log / "log-").replace("%", "%%") + "%j"
    words = [PROGRAM, "--parsable", f"--comment={tag}", f"--output={name}", "--open-mode=append"]
    return [
        *words,
        *([f"--dependency=afterany:{after}"] if after else []),
        *(["--hold"] if held else []),
        str(script),
    ]


def submit(words: Sequence[str]) -> str:
    answer = command.run(words)
    if answer.code:
        if any(sign in answer.err for sign in _TRANSIENT):
            raise Transient(f"sbatch did not reach the controller: {answer.complaint}")
        raise Refused(f"sbatch refused the job: {answer.complaint}")
    number = answer.out.strip().partition(";")[0]
    if not re.fullmatch(r"\d+", number):
        raise Transient(f"sbatch gave no job number but {answer.complaint}")
    return number


def jobs(user: str, numbers: Sequence[str]) -> list[Queued]:
    """All jobs of the user that Slurm still knows, ended ones included."""
    answer = command.run(
        ["squeue", "--noheader", "--states=all", f"--user={user}", f"--format={_FORMAT}"]
    )
    if answer.code:
        raise Transient(f"squeue failed: {answer.complaint}")
    return parse(answer.out)


def parse(text: str) -> list[Queued]:
    found = []
    for line in text.splitlines():
        if line.count("|") < 4:
            continue
        number, state, reason, start, tag = line.strip().split("|", 4)
        known: State = "running" if state in _RUNNING else _STATES.get(state, "ended")
        if known == "queued" and "Held" in reason:
            known = "held"
        why = {"queued": reason, "held": reason, "running": ""}.get(known, state)
        found.append(Queued(number, known, why, tag, "" if start == "N/A" else start))
    return found


def release(number: str) -> list[str]:
    return ["scontrol", "release", number]


def cancel(numbers: Sequence[str]) -> list[str]:
    return ["scancel", *numbers]
