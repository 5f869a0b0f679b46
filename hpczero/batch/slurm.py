"""Slurm as a scheduler: the words of sbatch, squeue, scontrol and scancel, and their answers."""

import re
from collections.abc import Sequence
from pathlib import Path

from hpczero.batch import command
from hpczero.batch.command import QueuedJob, Refused, State, Transient

PROGRAM = "sbatch"
GONE = re.compile(r"Invalid job id|already completing or completed")  # needs no cancelling any more
_TRANSIENT = re.compile(
    "timed out|Unable to contact|not responding|temporarily|Connection refused|Zero Bytes"
    "|receive failure"
)
_STATES: dict[str, State] = {
    "PENDING": "queued",
    "REQUEUED": "queued",
    "REQUEUE_FED": "queued",
    "REQUEUE_HOLD": "held",
    "SPECIAL_EXIT": "held",
    "RESV_DEL_HOLD": "held",
    "RUNNING": "running",
    "COMPLETING": "running",
    "CONFIGURING": "running",
    "SUSPENDED": "running",
    "STAGE_OUT": "running",
    "RESIZING": "running",
    "SIGNALING": "running",
    "STOPPED": "running",
}
_FORMAT = "%i|%T|%r|%S|%k"


def submission(script: Path, log: Path, tag: str, after: str, held: bool) -> list[str]:
    """Return the command that submits the script; `log` is a folder.

    Slurm replaces % signs in a file's name, so that those of the folder are doubled.
    """
    name = str(log / "log-").replace("%", "%%") + "%j"
    words = [PROGRAM, "--parsable", f"--comment={tag}", f"--output={name}", "--open-mode=append"]
    if after:
        words.append(f"--dependency=afterany:{after}")
    if held:
        words.append("--hold")
    return [*words, str(script)]


def submit(words: Sequence[str]) -> str:
    """Return the job's number."""
    answer = command.run(words)
    if answer.code:
        if _TRANSIENT.search(answer.err):
            raise Transient(f"sbatch did not reach the controller: {answer.complaint}")
        raise Refused(f"sbatch refused the job: {answer.complaint}")
    number = answer.out.strip().partition(";")[0]
    if not re.fullmatch(r"\d+", number):
        raise Transient(f"sbatch gave no job number but {answer.complaint}")
    return number


def jobs(user: str, numbers: Sequence[str]) -> list[QueuedJob]:
    """Return all jobs of the user that Slurm still knows, ended ones included."""
    answer = command.run(
        ["squeue", "--noheader", "--states=all", f"--user={user}", f"--format={_FORMAT}"]
    )
    if answer.code:
        raise Transient(f"squeue failed: {answer.complaint}")
    return parse(answer.out)


def parse(text: str) -> list[QueuedJob]:
    """Read squeue's lines in `_FORMAT`; others are left out."""
    queue = []
    for line in text.splitlines():
        if line.count("|") < 4:
            continue
        number, word, reason, start, tag = line.strip().split("|", 4)
        state: State = _STATES.get(word, "ended")
        if state == "queued" and "Held" in reason:
            state = "held"
        if state == "running":
            reason = ""
        elif state == "ended":
            reason = word
        queue.append(QueuedJob(number, state, reason, tag, "" if start == "N/A" else start))
    return queue


def release(number: str) -> list[str]:
    return ["scontrol", "release", number]


def cancel(numbers: Sequence[str]) -> list[str]:
    return ["scancel", *numbers]
