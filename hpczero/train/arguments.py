"""The arguments of collective calls of a loop of one's own: every rank gives the same."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hpczero import env
from hpczero.comm.world import World
from hpczero.errors import InputError

_MOST_STEPS = 1 << 62


def refuse_what_differs(world: World, call: str, given: Mapping[str, str]) -> None:
    """Raise InputError on all ranks unless all give the same. Collective.

    `given`: argument -> words that are equal where the same is meant.
    """
    of_ranks = world.all_gather_objects(dict(given))
    for rank, theirs in enumerate(of_ranks):
        for argument, value in theirs.items():
            first = of_ranks[0][argument]
            if value != first:
                raise InputError(
                    f"{call}: {argument} is {first} on rank 0 and {value} on rank {rank}"
                )


def table(name: str, given: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Return a table of names, empty for None; InputError: it is none."""
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        kind = type(given).__name__
        raise InputError(f"{name} is a {kind}: give a table of names, as {name}={{'name': ...}}")
    if wrong := [key for key in given if not isinstance(key, str)]:
        raise InputError(f"{name} has the key {wrong[0]!r}: names are text")
    return given


def folder_path(name: str, given: str | Path) -> Path:
    """Return an absolute path; InputError: it is none."""
    if not isinstance(given, str | Path) or not str(given) or "\0" in str(given):
        raise InputError(f"{name} = {given!r}: give the path of a folder")
    return Path(env.expand(str(given))).absolute()


def checkpoints_outside_runs(given: str | Path) -> Path:
    """Return the folder for checkpoints in a folder that is no run's; InputError if it is."""
    path = folder_path("folder", given)
    if (path / "spec.toml").exists():
        raise InputError(
            f"folder = {str(given)!r} is the directory of a run, which saves there itself:"
            " give one of its own, or leave it out"
        )
    return path / "checkpoints"


def refuse_step(step: object) -> None:
    if type(step) is not int or not 0 <= step < _MOST_STEPS:
        raise InputError(f"save: step = {step!r} must be a whole number from 0 to 2**62 - 1")


def rate_of(given: Any) -> float:
    """Return a learning rate as the number that it is; InputError: it is none."""
    try:
        rate = float(given)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(f"step(lr={given!r}): a learning rate is a number") from error
    if not 0 <= rate < float("inf"):
        raise InputError(f"step(lr={rate!r}): a learning rate is a finite number, 0 or more")
    return rate
