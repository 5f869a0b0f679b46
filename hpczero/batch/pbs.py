"""PBS as a scheduler: the words of qsub, qstat, qrls and qdel, and their answers.

The output of a real PBS lies in tests/unit/batch/pbs.
"""

import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hpczero.batch import command
from hpczero.batch.command import QueuedJob, Refused, State, Transient, leading_number
from hpczero.errors import InputError
from hpczero.text import join_words

PROGRAM = "qsub"
LAUNCHER = "mpirun"
MARK = "#PBS"
ONLY_KEYS = ("pbs_chunk", "pbs_place", "pbs_resources")
SAID_AT_SUBMISSION = ("-o", "-e", "-h")
SEVERAL_AT_ONCE = "-J"
LIST_QUEUES = ["qstat", "-Qf"]
LISTS_ALL = False
DEPENDS_ON_ENDED = False
TAGS_EACH_JOB = False
GONE = re.compile(r"[Uu]nknown [Jj]ob|has finished")  # needs no deleting any more
_TRANSIENT = re.compile(
    "timed out|cannot connect|Connection refused|No Permission to connect|temporarily"
    "|Server shutting down|End of File|errno=15010"
)
_STATES: dict[str, State] = {
    "Q": "queued",
    "W": "queued",
    "T": "queued",
    "M": "queued",
    "H": "held",
    "R": "running",
    "B": "running",  # an array of which a task has begun
    "E": "running",
    "S": "running",
    "U": "running",
}
_VARIABLE = re.compile(r"(?:^|,)HPCZERO_TAG=([^,]*)")
_ENDED = re.compile(r" and (?:(exceeded resource \S+)|terminated by (\S+))$")
_KILLED = 256  # an exit status above it is this plus a signal's number
_STATUS = {"-29": "exceeded resource walltime", "-4": "the daemon of its node was started again"}
_NEVER_RAN = {  # substate of an ended job without an exit status
    "91": "deleted before it began",
    "92": "removed by PBS, as the job that it depended on was",
}
_CHANGED = re.compile(r"[\"'\\]|\s$")


def submission(
    script: Path, log: Path, tag: str, after: str, held: bool, array: bool = False
) -> list[str]:
    """Return the command that submits the script; `log` is a folder.

    The script itself has the tag: `-v` on the command line would replace the script's own.
    """
    words = [PROGRAM, "-o", f"{log}/"]
    if after:
        words += ["-W", f"depend=afterany:{after}"]
    if held:
        words.append("-h")
    return [*words, str(script)]


def submit(words: Sequence[str]) -> str:
    """Return the job's number."""
    answer = command.run(words)
    if answer.code:
        if _TRANSIENT.search(answer.err):
            raise Transient(f"qsub did not reach the server: {answer.complaint}")
        raise Refused(f"qsub refused the job: {answer.complaint}")
    number = answer.out.strip().splitlines()[-1] if answer.out.strip() else ""
    if not re.fullmatch(r"\d+(\[\])?(\.[\w.-]+)?", number):
        raise Transient(f"qsub gave no job number but {answer.complaint}")
    return number


def jobs(user: str, numbers: Sequence[str]) -> list[QueuedJob]:
    """Return those of these jobs that PBS still knows; without numbers, the user's live jobs."""
    if not numbers:
        listing = command.run(["qstat", "-t", "-u", user])
        if listing.code:
            raise Transient(f"qstat failed: {listing.complaint}")
        # the name of the server behind a number may be cut short
        numbers = re.findall(r"^\d+(?:\[\d*\])?", listing.out, re.MULTILINE)
        if not numbers:
            return []
    answer = command.run(["qstat", "-x", "-f", *numbers])
    if "job history" in answer.err and not answer.out.strip():  # the site keeps none
        answer = command.run(["qstat", "-f", *numbers])
    if answer.code and not answer.out.strip() and not GONE.search(answer.err):
        raise Transient(f"qstat failed: {answer.complaint}")
    return parse(answer.out)


def parse(text: str) -> list[QueuedJob]:
    """Read `qstat -f`: a block for each job, `key = value`; after a tab a value goes on."""
    queue = []
    for block in re.split(r"^Job Id: ", text.replace("\n\t", ""), flags=re.MULTILINE)[1:]:
        number, _, lines = block.partition("\n")
        values = dict(re.findall(r"^    (\S+) = (.*)$", lines, re.MULTILINE))
        letter = values.get("job_state", "")
        state = _STATES.get(letter, "ended")
        tag = _VARIABLE.search(values.get("Variable_List", ""))
        start = values.get("stime") or values.get("estimated.start_time") or ""
        if letter == "W":
            start = values.get("Execution_Time", "")
        reason = _reason(state, values)
        queue.append(QueuedJob(number.strip(), state, reason, tag[1] if tag else "", start))
    return queue


def _reason(state: State, values: Mapping[str, str]) -> str:
    """Return why the job waits, or how it ended."""
    comment = values.get("comment", "")
    if state == "running":
        return "suspended" if values.get("job_state") in ("S", "U") else ""
    if state != "ended":
        before = re.search(r"\bafter\w*:([\w.-]+)", values.get("depend", ""))
        return comment or (f"waits for job {before[1]}" if before and state == "held" else "")
    if match := _ENDED.search(comment):
        return match[1] or f"deleted by {match[2]}"
    status = values.get("Exit_status", "")
    if not status:
        return _NEVER_RAN.get(values.get("substate", ""), "ended")
    if status.isdigit() and int(status) > _KILLED:
        return f"killed by signal {int(status) - _KILLED}"
    return _STATUS.get(status, f"exit status {status}")


def task_number(array: str, task: int) -> str:
    """Return the number of a task of an array of jobs."""
    return array.replace("[]", f"[{task}]")


def task_of(number: str) -> tuple[str, int | None]:
    """Return the number of the array that a job belongs to, and its task; else itself, None."""
    found = re.search(r"\[(\d+)\]", number)
    return re.sub(r"\[\d+\]", "[]", number), int(found[1]) if found else None


def release(number: str) -> list[str]:
    return ["qrls", number]


def cancel(numbers: Sequence[str]) -> list[str]:
    """Delete the last job first.

    PBS deletes along with a held job those that are held for it; when a running one ends, the next
    is released.
    """
    return ["qdel", *reversed(numbers)]


def changed_values(handed: Mapping[str, str]) -> list[str]:
    """Return the names of variables whose values `qsub -v` would change.

    Quotes, backslashes and blanks at the end do not arrive as they are.
    """
    return [name for name, value in handed.items() if _CHANGED.search(value)]


def check_hand_over(handed: Mapping[str, str], inherits: bool) -> None:
    """Refuse values that would arrive changed; warn that other users can read the rest."""
    if changed := changed_values(handed):
        raise InputError(
            f"batch.env_pass: qsub would change the value of {join_words(changed)}: quotes, "
            "backslashes and blanks at its end do not arrive as they are; "
            "set it by batch.env or a line of batch.setup"
        )
    if handed or inherits:
        inherited = "the whole environment (batch.env_inherit)"
        visible = inherited if inherits else join_words(list(handed))
        print(
            f"hpczero: PBS shows {visible} to every user (qstat -xf): a secret belongs in a file "
            'of yours, as in batch.setup = ["export TOKEN=$(cat ~/.token)"]',
            file=sys.stderr,
        )


def subjects(word: str, following: str) -> list[str]:
    """Return the subjects of an option of a directive.

    `following` is the next word, which may hold the option's values.
    """
    option = word[:2]
    if option not in ("-l", "-W"):
        return [option]
    values = (word[2:] or following).split(",")
    return [f"{option} {value.partition('=')[0]}" for value in values]


def queues(text: str) -> dict[str, dict[str, Any]]:
    """Return queue -> its longest walltime and most nodes, of queues that run a user's jobs."""
    open_queues = {}
    for queue, values in _queues(text).items():
        if not _closed(values):
            walltime = values.get("resources_max.walltime", "")
            open_queues[queue] = {
                "nodes": leading_number(values.get("resources_max.nodect", "")),
                "walltime": walltime if re.fullmatch(r"\d{1,5}:\d\d:\d\d", walltime) else "",
            }
    return open_queues


def queues_left_out(text: str) -> list[str]:
    """Return the queues of `qstat -Qf` that do not belong in a profile, and why."""
    return [
        f"{queue} ({why})" for queue, values in _queues(text).items() if (why := _closed(values))
    ]


def _queues(text: str) -> dict[str, dict[str, str]]:
    values_of = {}
    for block in re.split(r"^Queue: ", text, flags=re.MULTILINE)[1:]:
        queue, *lines = block.splitlines()
        pairs = (line.strip().partition(" = ")[::2] for line in lines if " = " in line)
        values_of[queue.strip()] = dict(pairs)
    return values_of


def _closed(values: Mapping[str, str]) -> str:
    """Return why no job of a user runs in this queue; "" if jobs do."""
    if values.get("queue_type") != "Execution":
        return "hands jobs on to others"
    if values.get("enabled") != "True":
        return "takes no jobs"
    if values.get("started") != "True":
        return "stopped"
    return "takes jobs from another queue only" if values.get("from_route_only") == "True" else ""
