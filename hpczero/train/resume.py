"""Where a run begins: with checkpoints of its own, with the one that `checkpoint.resume` names, or anew.

A path, or "never", says how a run begins: once it has checkpoints of its own that began so (their spec says the same), it goes on from these, as
with "auto". Otherwise a job that is started again and again would never get further.

Only a checkpoint that is Damaged is passed over. What cannot be read now, or not by this version, is no reason to go on from an older one.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from hpczero import env
from hpczero.checkpoint import directory, manifest
from hpczero.checkpoint.directory import checkpoint_at
from hpczero.checkpoint.load import Checkpoint
from hpczero.checkpoint.manifest import Content
from hpczero.checkpoint.shard_file import Damaged
from hpczero.errors import HpczeroError, InputError
from hpczero.spec.keys import keys
from hpczero.spec.load import Difference
from hpczero.spec.schema import Role, Spec
from hpczero.text import printable
from hpczero.train.run_directory import path_of

_HOW = ("checkpoint.resume", "checkpoint.weights_only")

Result = TypeVar("Result")


@dataclass(frozen=True)
class Candidates:
    """The newest first. `own`: those of the run, of which damaged ones are passed over."""

    paths: tuple[str, ...]
    own: bool


def candidates(spec: Spec, checkpoints: Path) -> Candidates:
    own, wanted = directory.steps(checkpoints), spec.checkpoint.resume
    if wanted == "auto" or _began_so(own.values(), spec):
        return Candidates(tuple(map(str, own.values())), True)
    if wanted == "never":
        return Candidates((), True)
    return Candidates((str(checkpoint_at(Path(env.expand(wanted)).absolute())),), False)


def _began_so(own: Any, spec: Spec) -> bool:
    """Whether the run's newest checkpoint is of a run that began as this one is to begin."""
    for path in own:
        try:
            there = flat(manifest.read(path).spec)
        except Damaged:
            continue
        here = flat(spec.model_dump(mode="json"))
        return all(there[key] == here[key] for key in _HOW)
    return False


def look_ahead(spec: Spec, identity: Mapping[str, str] | None = None) -> None:
    """Before anything is written: InputError if the run cannot begin from the checkpoint that `checkpoint.resume` names."""
    found = readable(lambda: candidates(spec, path_of(spec) / "checkpoints"))
    if found.own:
        return
    try:
        readable(lambda: _look_into(Path(found.paths[0]), spec, identity or {}))
    except Damaged as error:
        raise InputError(f"checkpoint.resume: {error}") from error


def _look_into(path: Path, spec: Spec, identity: Mapping[str, str]) -> None:
    with Checkpoint.open(path) as checkpoint:
        if not spec.checkpoint.weights_only:
            refuse_another_run(path, checkpoint.content, spec)
            refuse_other_data(path, checkpoint.identity, identity)


def readable(action: Callable[[], Result]) -> Result:
    """InputError if what the action reads cannot be read now; Damaged, if it is not what was written, is left to the caller."""
    try:
        return action()
    except (Damaged, InputError):
        raise
    except HpczeroError as error:
        raise InputError(str(error)) from error
    except OSError as error:
        what = f"{error.filename or 'a checkpoint'}: {error.strerror or error}"
        raise InputError(
            f"{what}: it cannot be read now, and the run does not go on from an older one for that"
        ) from error


def flat(tree: Mapping[str, Any]) -> dict[str, Any]:
    """ "train.steps" -> value, of a spec as JSON, perhaps another version's: a key that it lacks has its default."""
    return _flat(Spec().model_dump(mode="json")) | _flat(tree)


def _flat(tree: Mapping[str, Any]) -> dict[str, Any]:
    tables = {name: table for name, table in tree.items() if isinstance(table, dict)}
    return {key: value for key, value in tree.items() if key not in tables} | {
        f"{name}.{leaf}": value for name, table in tables.items() for leaf, value in table.items()
    }


def differences(content: Content, spec: Spec, role: Role) -> list[str]:
    """Keys of this role that are not those of the checkpoint; one that this version does not know makes another run. A run may have another name."""
    there, here, known = flat(content.spec), flat(spec.model_dump(mode="json")), keys()
    of_role = [
        key for key in here if known[key].role == role and key != "name" and there[key] != here[key]
    ]
    lines = [str(Difference(key, there[key], here[key], role)) for key in of_role]
    if role == "identity":
        lines += [
            f"{key}: {there[key]!r} there, and this version of hpczero does not know it"
            for key in there
            if key not in here
        ]
    return [printable(line) for line in lines]


def refuse_another_run(path: Path, content: Content, spec: Spec) -> None:
    if other := differences(content, spec, "identity"):
        raise InputError(
            f"{path} is a checkpoint of another run:" + "".join(f"\n  {line}" for line in other)
        )


_DATA, _VALUES = "data.fingerprint", "model.initial_values"


def identity_of(fingerprint: str, rule: int = 0) -> dict[str, str]:
    """Return what makes a run what it is besides its spec.

    That is the tokens, whatever the path says, and the rule by which hpczero made its initial values
    (0: the model made them itself).
    """
    return {_DATA: fingerprint} | ({_VALUES: str(rule)} if rule else {})


def gone_on_with(there: Mapping[str, str], here: Mapping[str, str]) -> dict[str, str]:
    """Return the identity of a run that goes on from a checkpoint with this one.

    Its values were made by the rule of its beginning, which was 1 before checkpoints said so.
    """
    return {**here, _VALUES: there.get(_VALUES, "1")} if _VALUES in here else dict(here)


def refuse_other_data(path: Path, there: Mapping[str, str], here: Mapping[str, str]) -> None:
    """InputError: the tokens are not those that the checkpoint's run has read.

    A checkpoint of an older version does not say which these were.
    """
    if _DATA in there and _DATA in here and there[_DATA] != here[_DATA]:
        raise InputError(
            f"{path} is a checkpoint of a run on other data: {_DATA} was {printable(there[_DATA], 80)} "
            f"and is {printable(here[_DATA], 80)} (`hpczero data show` prints it): put the token file "
            "back that was there, or begin another run with these weights: another name, "
            "checkpoint.resume and checkpoint.weights_only = true"
        )


def other_data(content: Content, spec: Spec, step: int) -> list[str]:
    """What is said where the steps that are done had batches of another size: the data goes on at this step's batch of the new size."""
    before, now = flat(content.spec)["train.global_batch"], spec.train.global_batch
    if not isinstance(before, int) or before == now or step == 0:
        return []
    seen, begins = step * before, step * now
    what = (
        f"samples {begins} to {seen - 1} come once more"
        if begins < seen
        else f"samples {seen} to {begins - 1} are left out"
    )
    return [
        f"train.global_batch was {before} and is {now}: {what} (if it was {before} in all {step} steps)"
    ]
