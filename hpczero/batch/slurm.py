"""Slurm as a scheduler: the words of sbatch, squeue, scontrol and scancel, and their answers."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hpczero.batch import command
from hpczero.batch.command import QueuedJob, Refused, State, Transient, leading_number
from hpczero.text import scheduler_duration

PROGRAM = "sbatch"
LAUNCHER = "srun"
MARK = "#SBATCH"
ONLY_KEYS = ("qos", "constraint", "reservation", "exclude")
SAID_AT_SUBMISSION = ("--output", "--error", "--comment", "--open-mode")
SEVERAL_AT_ONCE = "--array"
LIST_QUEUES = ["sinfo", "--noheader", "--format=%R|%c|%m|%G|%l|%D"]
LISTS_ALL = True
DEPENDS_ON_ENDED = True
TAGS_EACH_JOB = True
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
_LONG = (
    "A account|a array|b begin|c cpus-per-task|C constraint|d dependency|D chdir|e error|G gpus"
    "|H hold|J job-name|L licenses|M clusters|n ntasks|N nodes|o output|p partition|q qos"
    "|s oversubscribe|S core-spec|t time|w nodelist|x exclude"
)
_LONG_OPTION = {f"-{entry[0]}": f"--{entry[2:]}" for entry in _LONG.split("|")}
_SYNONYMS = {"--gpus-per-node": "--gres", "--gpus": "--gres"}


def submission(
    script: Path, log: Path, tag: str, after: str, held: bool, array: bool = False
) -> list[str]:
    """Return the command that submits the script; `log` is a folder.

    Slurm replaces % signs in a file's name, so that those of the folder are doubled. The script of
    an array says itself where its output goes: what Slurm adds is kept under the job's number.
    """
    name = str(log).replace("%", "%%") + ("/%A_%a.OU" if array else "/log-%j")
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
        ["squeue", "--noheader", "--array", "--states=all", f"--user={user}", f"--format={_FORMAT}"]
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


def task_number(array: str, task: int) -> str:
    """Return the number of a task of an array of jobs."""
    return f"{array}_{task}"


def task_of(number: str) -> tuple[str, int | None]:
    """Return the number of the array that a job belongs to, and its task; else itself, None."""
    array, _, task = number.partition("_")
    return array, int(task) if task.isdecimal() else None


def release(number: str) -> list[str]:
    return ["scontrol", "release", number]


def cancel(numbers: Sequence[str]) -> list[str]:
    return ["scancel", *numbers]


def check_hand_over(handed: Mapping[str, str], inherits: bool) -> None:
    """Accept all variables: Slurm hands them over as they are."""


def subjects(word: str, following: str) -> list[str]:
    """Return the subject of an option of a directive."""
    option = word.partition("=")[0]
    if not word.startswith("--"):
        option = _LONG_OPTION.get(word[:2], word[:2])
    return [_SYNONYMS.get(option, option)]


def queues(text: str) -> dict[str, dict[str, Any]]:
    """Return partition -> facts; of nodes that differ (a line for each kind) the smallest."""
    partitions: dict[str, dict[str, Any]] = {}
    for line in text.splitlines():
        queue, cpus, memory, gres, limit, nodes = (part.strip() for part in line.split("|"))
        node = {
            "cpus": leading_number(cpus),
            "memory_gb": leading_number(memory) // 1024,
            "gpus": _gpus(gres),
        }
        count = leading_number(nodes)
        if before := partitions.get(queue):
            node = {key: min(value, before[key]) for key, value in node.items()}
            count += before["nodes"]
        partitions[queue] = node | {"nodes": count, "walltime": _walltime(limit)}
    return partitions


def queues_left_out(text: str) -> list[str]:
    return []


def _gpus(gres: str) -> int:
    """Count the GPUs of a node in a text such as "gpu:a100:4(S:0-1),craynetwork:1"."""
    return sum(int(count) for count in re.findall(r"(?:^|,)gpu(?::[^:,()]+)?:(\d+)", gres))


def _walltime(text: str) -> str:
    """Convert "1-12:00:00" or "30:00" (minutes first) to hh:mm:ss; "infinite" to ""."""
    match = re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)", text)
    if not match:
        return ""
    days, hours, minutes, seconds = (int(digits or 0) for digits in match.groups())
    return scheduler_duration(((days * 24 + hours) * 60 + minutes) * 60 + seconds)
