"""The batch system of a run, asked at most once in 30 s whatever is wanted of it."""

import contextlib
import getpass
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from types import ModuleType

from hpczero import env, safe_files
from hpczero.batch import command, pbs, slurm
from hpczero.batch.command import Queued
from hpczero.errors import HpczeroError, InputError

ASK_EVERY = 30.0  # seconds
SCHEDULERS: dict[str, ModuleType] = {"slurm": slurm, "pbs": pbs}


def jobs(name: str, numbers: Sequence[str], now: bool = False) -> list[Queued]:
    """Of these jobs (and of the user's others, where the scheduler tells) what it still knows. `now`: though it was asked a moment ago."""
    known = None if now else _remembered(name, numbers)
    if known is None:
        known = SCHEDULERS[name].jobs(getpass.getuser(), numbers)
        _remember(name, numbers, known)
    return known


def release(name: str, number: str) -> None:
    answer = command.run(words := SCHEDULERS[name].release(number))
    if answer.code:
        raise HpczeroError(f"{words[0]} failed: {answer.complaint}")


def cancel(name: str, numbers: Sequence[str]) -> None:
    """Cancel these jobs; one that is gone already is no failure.

    A scheduler may take those that depend on a job along with it.
    """
    forget(name)
    answer = command.run(words := SCHEDULERS[name].cancel(numbers))
    complaints = [
        line
        for line in answer.err.splitlines()
        if line.strip() and not SCHEDULERS[name].GONE.search(line)
    ]
    if answer.code and (complaints or not answer.err.strip()):
        left = replace(answer, err="\n".join(complaints))
        raise HpczeroError(f"{words[0]} failed: {left.complaint}")


def forget(name: str) -> None:
    with contextlib.suppress(OSError):  # then nothing could be remembered either
        safe_files.remove(env.state_folder() / f"{name}.json")


def _remember(name: str, numbers: Sequence[str], known: Sequence[Queued]) -> None:
    path = env.state_folder() / f"{name}.json"
    with contextlib.suppress(OSError, InputError):  # it is asked again then
        safe_files.own_folder(path.parent)
        answer = {
            "asked": time.time(),
            "numbers": list(numbers),
            "jobs": [asdict(job) for job in known],
        }
        safe_files.write_text(path, json.dumps(answer))


def _remembered(name: str, numbers: Sequence[str]) -> list[Queued] | None:
    """Slurm tells of all jobs of the user, PBS of those that it was asked for."""
    try:
        answer = json.loads((env.state_folder() / f"{name}.json").read_text(encoding="utf-8"))
        if 0 <= time.time() - answer["asked"] < ASK_EVERY and (
            name == "slurm" or set(numbers) <= set(answer["numbers"])
        ):
            return [Queued(**job) for job in answer["jobs"]]
    except (OSError, ValueError, KeyError, TypeError):
        pass
    return None
