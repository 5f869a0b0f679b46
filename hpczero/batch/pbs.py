"""PBS: qsub, qstat, qrls, qdel. What a real one prints lies in tests/batch/pbs."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from hpczero.batch import command
from hpczero.batch.command import Queued, Refused, State, Transient

PROGRAM = "qsub"
GONE = re.compile(r"[Uu]nknown [Jj]ob|has finished")  # of a job that needs no deleting any more
_TRANSIENT = (
    *("timed out", "cannot connect", "Connection refused", "No Permission to connect"),
    *("temporarily", "Server shutting down", "End of File", "errno=15010"),
)
_STATES: dict[str, State] = {
    "Q": "queued",
    "W": "queued",
    "T": "queued",
    "M": "queued",
    "H": "held",
    "R": "running",
}
_STATES |= {"E": "running", "S": "running", "U": "running"}
_VARIABLE = re.compile(r"(?:^|,)HPCZERO_TAG=([^,]*)")
_ENDED = re.compile(r" and (?:(exceeded resource \S+)|terminated by (\S+))$")
_KILLED = 256  # above it an exit status is a signal's number
_STATUS = {"-29": "exceeded resource walltime", "-4": "the daemon of its node was started again"}
_DELETED, _REMOVED = "91", "92"  # substates of a job that never ran: by somebody, or by PBS itself
_CHANGED = re.compile(r"[\"'\\]|\s$")


def submission(script: Path, log: Path, tag: str, after: str, held: bool) -> list[str]:
    """The tag stands in the script (`-v` on the command line would replace what stands there)."""
    words = [PROGRAM, "-o", f"{log}/"]
    return [
        *words,
        *(["-W", f"depend=afterany:{after}"] if after else []),
        *(["-h"] if held else []),
        str(script),
    ]


def submit(words: Sequence[str]) -> str:
    answer = command.run(words)
    if answer.code:
        if any(sign in answer.err for sign in _TRANSIENT):
            raise Transient(f"qsub did not reach the server: {answer.complaint}")
        raise Refused(f"qsub refused the job: {answer.complaint}")
    number = answer.out.strip().splitlines()[-1] if answer.out.strip() else ""
    if not re.fullmatch(r"\d+(\[\])?(\.[\w.-]+)?", number):
        raise Transient(f"qsub gave no job number but {answer.complaint}")
    return number


def jobs(user: str, numbers: Sequence[str]) -> list[Queued]:
    """Those of these numbers that PBS still knows; without numbers all of the user's that are not ended."""
    if not numbers:
        listed = command.run(["qstat", "-u", user])
        if listed.code:
            raise Transient(f"qstat failed: {listed.complaint}")
        numbers = re.findall(
            r"^\d+", listed.out, re.MULTILINE
        )  # the server's name behind it may be cut short
        if not numbers:
            return []
    answer = command.run(["qstat", "-x", "-f", *numbers])
    if "job history" in answer.err and not answer.out.strip():  # the site keeps none
        answer = command.run(["qstat", "-f", *numbers])
    if answer.code and not answer.out.strip() and not GONE.search(answer.err):
        raise Transient(f"qstat failed: {answer.complaint}")
    return parse(answer.out)


def parse(text: str) -> list[Queued]:
    """Of `qstat -f`: a block for each job, `key = value`; what begins with a tab goes on with the line before."""
    found = []
    for block in re.split(r"^Job Id: ", text.replace("\n\t", ""), flags=re.MULTILINE)[1:]:
        number, _, rest = block.partition("\n")
        values = dict(re.findall(r"^    (\S+) = (.*)$", rest, re.MULTILINE))
        state = _STATES.get(values.get("job_state", ""), "ended")
        tag = _VARIABLE.search(values.get("Variable_List", ""))
        start = values.get("stime") or values.get("estimated.start_time") or ""
        if values.get("job_state") == "W":
            start = values.get("Execution_Time", "")
        reason = _reason(state, values)
        found.append(Queued(number.strip(), state, reason, tag[1] if tag else "", start))
    return found


def _reason(state: State, values: Mapping[str, str]) -> str:
    """Why it waits, or how it ended."""
    comment = values.get("comment", "")
    if state == "running":
        return "suspended" if values.get("job_state") in ("S", "U") else ""
    if state != "ended":
        before = re.search(r"\bafter\w*:([\w.-]+)", values.get("depend", ""))
        return comment or (f"waits for job {before[1]}" if before and state == "held" else "")
    if said := _ENDED.search(comment):
        return said[1] or f"deleted by {said[2]}"
    status, substate = values.get("Exit_status", ""), values.get("substate", "")
    if not status:
        never = {
            _DELETED: "deleted before it began",
            _REMOVED: "removed by PBS, as the job that it depended on was",
        }
        return never.get(substate, "ended")
    if status.isdigit() and int(status) > _KILLED:
        return f"killed by signal {int(status) - _KILLED}"
    return _STATUS.get(status, f"exit status {status}")


def release(number: str) -> list[str]:
    return ["qrls", number]


def cancel(numbers: Sequence[str]) -> list[str]:
    """Delete the last one first.

    With a job that is held for another PBS deletes those held for it; an end lets the next one go.
    """
    return ["qdel", *reversed(numbers)]


def changed_values(handed: Mapping[str, str]) -> list[str]:
    """Return the names of variables whose values `qsub -v` would change.

    Quotes, backslashes and blanks at the end do not arrive as they are.
    """
    return [name for name, value in handed.items() if _CHANGED.search(value)]
