"""The batch system of a run, asked at most once in 30 s whatever is wanted of it."""

import contextlib
import getpass
import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from types import ModuleType

from hpczero import env
from hpczero.batch import command, pbs, slurm
from hpczero.batch.queued import Queued
from hpczero.errors import HpczeroError

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
    _carry_out(SCHEDULERS[name].release(number))


def cancel(name: str, numbers: Sequence[str]) -> None:
    forget(name)
    _carry_out(SCHEDULERS[name].cancel(numbers))


def forget(name: str) -> None:
    with contextlib.suppress(OSError):  # then nothing could be remembered either
        (env.state_folder() / f"{name}.json").unlink()


def _carry_out(words: list[str]) -> None:
    answer = command.run(words)
    if answer.code:
        raise HpczeroError(f"{words[0]} failed: {answer.complaint}")


def _remember(name: str, numbers: Sequence[str], known: Sequence[Queued]) -> None:
    path = env.state_folder() / f"{name}.json"
    with contextlib.suppress(OSError):  # it is asked again then
        path.parent.mkdir(parents=True, exist_ok=True)
        answer = {"asked": time.time(), "numbers": list(numbers), "jobs": [asdict(job) for job in known]}
        path.with_suffix(".new").write_text(json.dumps(answer), encoding="utf-8")
        path.with_suffix(".new").replace(path)


def _remembered(name: str, numbers: Sequence[str]) -> list[Queued] | None:
    """Slurm tells of all jobs of the user, PBS of those that it was asked for."""
    try:
        answer = json.loads((env.state_folder() / f"{name}.json").read_text(encoding="utf-8"))
        if 0 <= time.time() - answer["asked"] < ASK_EVERY and (name == "slurm" or set(numbers) <= set(answer["numbers"])):
            return [Queued(**job) for job in answer["jobs"]]
    except (OSError, ValueError, KeyError, TypeError):
        pass
    return None

