"""The user's jobs in the queue of Slurm or PBS; the scheduler is asked at most once in 30 s.

A scheduler is a module of this room (slurm.py is an example), a row in SCHEDULERS and in the table
of contexts of render.py, and a template. The module has these constants:

    PROGRAM             the command that submits a job
    LAUNCHER            `batch.launcher` = "auto"
    MARK                the beginning of a directive
    ONLY_KEYS           keys of [batch] that other schedulers have no word for
    SAID_AT_SUBMISSION  options that are no directives here, as `submission` has them
    SEVERAL_AT_ONCE     the option that makes an array of jobs
    GONE                the complaint about a job that needs no cancelling any more
    LIST_QUEUES         the command that lists the queues
    LISTS_ALL           `jobs` has all jobs of the user, not those only that were asked for
    DEPENDS_ON_ENDED    a job may be submitted behind one that has ended
    TAGS_EACH_JOB       jobs of one script can have tags of their own

and these functions: `submission`, `submit`, `jobs`, `task_number`, `task_of`, `release`, `cancel`,
`check_hand_over`, `subjects`, `queues`, `queues_left_out`.
"""

import contextlib
import getpass
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from types import ModuleType

from hpczero import env, safe_files
from hpczero.batch import command, pbs, slurm
from hpczero.batch.command import QueuedJob
from hpczero.errors import HpczeroError, InputError

ASK_EVERY = 30.0  # seconds
SCHEDULERS: dict[str, ModuleType] = {"slurm": slurm, "pbs": pbs}


def jobs(name: str, numbers: Sequence[str], now: bool = False) -> list[QueuedJob]:
    """Return those of these jobs that the scheduler still knows; some add all of the user's.

    `now` asks again although the last answer is younger than 30 s.
    """
    known = None if now else _remembered(name, numbers)
    if known is None:
        known = SCHEDULERS[name].jobs(getpass.getuser(), numbers)
        _remember(name, numbers, known)
    return known


def release(name: str, number: str) -> None:
    command.output(SCHEDULERS[name].release(number))


def cancel(name: str, numbers: Sequence[str]) -> None:
    """Cancel these jobs; one that is gone already is no failure.

    A scheduler may cancel the jobs that depend on one of these along with it.
    """
    forget(name)
    scheduler = SCHEDULERS[name]
    words = scheduler.cancel(numbers)
    answer = command.run(words)
    complaints = [
        line for line in answer.err.splitlines() if line.strip() and not scheduler.GONE.search(line)
    ]
    if answer.code and (complaints or not answer.err.strip()):
        relevant = replace(answer, err="\n".join(complaints))
        raise HpczeroError(f"{words[0]} failed: {relevant.complaint}")


def forget(name: str) -> None:
    with contextlib.suppress(OSError):  # then nothing could be remembered either
        safe_files.remove(env.state_folder() / f"{name}.json")


def _remember(name: str, numbers: Sequence[str], known: Sequence[QueuedJob]) -> None:
    path = env.state_folder() / f"{name}.json"
    with contextlib.suppress(OSError, InputError):  # the scheduler is asked again then
        safe_files.make_own_folder(path.parent)
        answer = {
            "asked": time.time(),
            "numbers": list(numbers),
            "jobs": [asdict(job) for job in known],
        }
        safe_files.write_text(path, json.dumps(answer))


def _remembered(name: str, numbers: Sequence[str]) -> list[QueuedJob] | None:
    """Return the last answer if it is recent and covers these jobs."""
    try:
        answer = json.loads((env.state_folder() / f"{name}.json").read_text(encoding="utf-8"))
        if 0 <= time.time() - answer["asked"] < ASK_EVERY and (
            SCHEDULERS[name].LISTS_ALL or set(numbers) <= set(answer["numbers"])
        ):
            return [QueuedJob(**job) for job in answer["jobs"]]
    except (OSError, ValueError, KeyError, TypeError):
        pass
    return None
