"""PBS: qsub, qstat, qrls, qdel."""

import re
from collections.abc import Sequence
from pathlib import Path

from hpczero.batch import command
from hpczero.batch.queued import Queued, Refused, State, Transient

PROGRAM = "qsub"
_TRANSIENT = ("timed out", "cannot connect", "Connection refused", "No Permission to connect", "temporarily", "Server shutting down", "End of File")
_STATES: dict[str, State] = {"Q": "queued", "W": "queued", "T": "queued", "M": "queued", "H": "held", "R": "running"}
_STATES |= {"E": "running", "S": "running", "U": "running"}
_VARIABLE = re.compile(r"(?:^|,)HPCZERO_TAG=([^,]*)")


def submission(script: Path, log: Path, tag: str, after: str, held: bool) -> list[str]:
    """The tag stands in the script (`-v` on the command line would replace what stands there)."""
    words = [PROGRAM, "-o", f"{log}/"]
    return [*words, *(["-W", f"depend=afterany:{after}"] if after else []), *(["-h"] if held else []), str(script)]


def submit(words: Sequence[str]) -> str:
    answer = command.run(words)
    if answer.code:
        kind = Transient if any(sign in answer.err for sign in _TRANSIENT) else Refused
        raise kind(f"qsub refused the job: {answer.complaint}")
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
        numbers = re.findall(r"^\d+", listed.out, re.MULTILINE)  # the server's name behind it may be cut short
        if not numbers:
            return []
    answer = command.run(["qstat", "-x", "-f", *numbers])
    if "job history" in answer.err and not answer.out.strip():  # the site keeps none
        answer = command.run(["qstat", "-f", *numbers])
    if answer.code and not answer.out.strip() and not re.search(r"[Uu]nknown [Jj]ob|has finished", answer.err):
        raise Transient(f"qstat failed: {answer.complaint}")
    return parse(answer.out)


def parse(text: str) -> list[Queued]:
    """Of `qstat -f`: a block for each job, `key = value`; what begins with a tab goes on with the line before."""
    found = []
    for block in re.split(r"^Job Id: ", text.replace("\n\t", ""), flags=re.MULTILINE)[1:]:
        number, _, rest = block.partition("\n")
        entries = (line.strip().partition(" = ") for line in rest.splitlines() if " = " in line)
        values = {key: value for key, _, value in entries}
        state = _STATES.get(values.get("job_state", ""), "ended")
        exit_status = values.get("Exit_status", "")
        why: str = {"running": "", "ended": f"exit status {exit_status}" if exit_status else "ended"}.get(state, values.get("comment", ""))
        tag = _VARIABLE.search(values.get("Variable_List", ""))
        start = values.get("stime") or values.get("estimated.start_time") or ""
        found.append(Queued(number.strip(), state, why, str(tag[1]) if tag else "", start))
    return found


def release(number: str) -> list[str]:
    return ["qrls", number]


def cancel(numbers: Sequence[str]) -> list[str]:
    return ["qdel", *numbers]
