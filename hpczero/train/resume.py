"""Resuming: which checkpoint a run begins from, what is refused, and what is read back.

A run begins with its own newest checkpoint, with the one that `checkpoint.resume` names, or anew.
A path, or "never", applies to the beginning only: once the run has checkpoints of its own that
began so (their spec says the same), it goes on from these, as with "auto". Otherwise a job that is
started again and again would never get further.

Only a Damaged checkpoint is passed over. If one cannot be read now, or not by this version, the run
does not go on from an older one.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from hpczero import env
from hpczero.checkpoint import directory, manifest
from hpczero.checkpoint.directory import checkpoint_at
from hpczero.checkpoint.load import Checkpoint
from hpczero.checkpoint.manifest import Content
from hpczero.checkpoint.shard_file import Damaged
from hpczero.errors import HpczeroError, InputError
from hpczero.parallel.zero.engine import Engine
from hpczero.spec.keys import entries, full_name, keys
from hpczero.spec.load import Difference
from hpczero.spec.schema import Spec
from hpczero.spec.table import Role
from hpczero.text import printable
from hpczero.train.loop_state import LoopState
from hpczero.train.mixed_data import DATA, MIXTURE
from hpczero.train.restored_states import restore_states
from hpczero.train.run_directory import path_of

Shapes = Mapping[str, tuple[int, ...]]

_BEGINNING = ("checkpoint.resume", "checkpoint.weights_only")  # the keys that say how a run begins
_LENGTHS = ("data.seq_len", "schedule.seq_len")  # the keys of sequences' lengths
_SHOWN = 5  # tensors in a message
_VALUES = "model.initial_values"

Result = TypeVar("Result")


@dataclass(frozen=True)
class Candidates:
    """Checkpoints, the newest first; damaged ones are passed over if they are of this run."""

    paths: tuple[str, ...]
    of_this_run: bool


@dataclass(frozen=True)
class Resumed:
    """The step from which a run begins, and what people should know about it."""

    step: int
    path: Path | None = None  # of the checkpoint; None: there is none
    changed: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    loaded: "Loaded | None" = None


@dataclass(frozen=True)
class Loaded:
    """The words of a checkpoint from which the engine has its states, or its weights alone."""

    content: Content
    loop: LoopState
    identity: Mapping[str, str]
    weights_only: bool
    notes: Sequence[str] = ()  # on what replicas could not go on with


# -- which checkpoint ------------------------------------------------------------------------------


def candidates(spec: Spec, checkpoints: Path) -> Candidates:
    paths = directory.steps(checkpoints).values()
    wanted = spec.checkpoint.resume
    if wanted == "auto" or _began_alike(paths, spec):
        return Candidates(tuple(map(str, paths)), True)
    if wanted == "never":
        return Candidates((), True)
    return Candidates((str(checkpoint_at(Path(env.expand(wanted)).absolute())),), False)


def _began_alike(checkpoints: Iterable[Path], spec: Spec) -> bool:
    """Return True if the newest of these belongs to a run that began as this one is to begin."""
    for path in checkpoints:
        try:
            there = flat(manifest.read(path).spec)
        except Damaged:
            continue
        here = flat(spec.model_dump(mode="json"))
        return all(there[key] == here[key] for key in _BEGINNING)
    return False


def look_ahead(spec: Spec, identity: Mapping[str, str] | None = None) -> None:
    """Raise InputError if the run cannot begin from the checkpoint that `checkpoint.resume` names.

    Nothing is written before this has been asked.
    """
    named = readable(lambda: candidates(spec, path_of(spec) / "checkpoints"))
    if named.of_this_run:
        return
    try:
        readable(lambda: _look_into(Path(named.paths[0]), spec, identity or {}))
    except Damaged as error:
        raise InputError(f"checkpoint.resume: {error}") from error


def _look_into(path: Path, spec: Spec, identity: Mapping[str, str]) -> None:
    with Checkpoint.open(path) as checkpoint:
        if not spec.checkpoint.weights_only:
            refuse_another_run(checkpoint, spec, identity)


def readable(action: Callable[[], Result]) -> Result:
    """Run an action that reads checkpoints; InputError if something cannot be read now.

    Damaged (what is there is not what was written) is left to the caller.
    """
    try:
        return action()
    except (Damaged, InputError):
        raise
    except HpczeroError as error:
        raise InputError(str(error)) from error
    except OSError as error:
        what = f"{error.filename or 'a checkpoint'}: {error.strerror or error}"
        why = "it cannot be read now, and the run does not go on from an older one for that"
        raise InputError(f"{what}: {why}") from error


# -- what is refused: another run, other data, another model ---------------------------------------


def flat(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return a spec given as JSON as {"train.steps": value}.

    A key that it lacks, as another version may have written it, has its default.
    """
    return _flat(Spec().model_dump(mode="json")) | _flat(tree)


def _flat(tree: Mapping[str, Any]) -> dict[str, Any]:
    return {full_name(table, leaf): value for table, leaf, value in entries(tree)}


def differences(content: Content, spec: Spec, role: Role) -> list[str]:
    """Return the keys of this role whose values are not those of the checkpoint.

    A key that this version does not know makes another run; another name does not.
    """
    there = flat(content.spec)
    here = flat(spec.model_dump(mode="json"))
    known = keys()
    ignored = {"name"}
    if there["data.sources"] or here["data.sources"]:
        ignored |= {"data.source"}  # what mixtures have in common is told by their tokens
    lines = [
        str(Difference(key, there[key], value, role))
        for key, value in here.items()
        if known[key].role == role and key not in ignored and there[key] != value
    ]
    if role == "identity":
        lines += [
            f"{key}: {value!r} there, and this version of hpczero does not know it"
            for key, value in there.items()
            if key not in here
        ]
    return [printable(line) for line in lines]


def refuse_another_run(checkpoint: Checkpoint, spec: Spec, identity: Mapping[str, str]) -> None:
    """Raise InputError if a key of role "identity" differs, or the tokens are others.

    A checkpoint of an older version does not say which tokens its run has read.
    """
    path = checkpoint.folder
    there = checkpoint.identity
    if lines := differences(checkpoint.content, spec, "identity"):
        shown = "".join(f"\n  {line}" for line in lines)
        raise InputError(f"{path} is a checkpoint of another run:{shown}")
    if problem := other_tokens(there, identity):
        raise InputError(f"{path} {problem}")


def other_tokens(there: Mapping[str, str], here: Mapping[str, str]) -> str:
    """Return what is wrong where a run goes on with other tokens; "" if it does not."""
    if MIXTURE in there and DATA in here:
        return (
            "is a checkpoint of a run on a mixture, and data.source names a single source: name it "
            "as the only one of [[data.sources]], which goes on where it was"
        )
    if DATA not in there or DATA not in here or there[DATA] == here[DATA]:
        return ""
    was, now = printable(there[DATA], 80), printable(here[DATA], 80)
    return (
        f"is a checkpoint of a run on other data: {DATA} was {was} and is {now} "
        "(`hpczero data show` prints it): put the token file back that was there, or begin "
        "another run with these weights: another name, checkpoint.resume and "
        "checkpoint.weights_only = true"
    )


def identity_of(data: Mapping[str, str], rule: int = 0) -> dict[str, str]:
    """Return what a run's results depend on besides its spec.

    That is its data (`mixed_data`), and the rule by which hpczero made the initial values (0: the
    model made them itself).
    """
    return dict(data) | ({_VALUES: str(rule)} if rule else {})


def resumed_identity(there: Mapping[str, str], here: Mapping[str, str]) -> dict[str, str]:
    """Return the identity of a run that goes on from a checkpoint with the identity `there`.

    Its initial values were made by the checkpoint's rule: 1, if the checkpoint does not name one.
    """
    return {**here, _VALUES: there.get(_VALUES, "1")} if _VALUES in here else dict(here)


def other_data(content: Content, spec: Spec, step: int) -> list[str]:
    """Return warnings if batches or sequences have changed since the steps that are done.

    The data goes on at this step's batch of the new size.
    """
    there, here = flat(content.spec), flat(spec.model_dump(mode="json"))
    lengthened = _length(there, step) != _length(here, step)
    cuts = ("data.documents", *(_LENGTHS if lengthened else ()))
    cut = [name for name in cuts if step and name in there and there[name] != here[name]]
    again = "sequences are cut anew, and some text comes once more before all has come"
    warnings = [f"{name} was {there[name]} and is {here[name]}: {again}" for name in cut]
    before, now = there["train.global_batch"], spec.train.global_batch
    if not isinstance(before, int) or before == now or step == 0 or spec.data.sources:
        return warnings
    seen, begins = step * before, step * now
    what = f"samples {seen} to {begins - 1} are left out"
    if begins < seen:
        what = f"samples {begins} to {seen - 1} come once more"
    condition = f"if it was {before} in all {step} steps"
    return [*warnings, f"train.global_batch was {before} and is {now}: {what} ({condition})"]


def _length(values: Mapping[str, Any], step: int) -> object:
    """Return the tokens of a sequence at a step, by the keys of a spec."""
    try:
        lengths = [length for first, length in values["schedule.seq_len"] if first <= step]
    except (TypeError, ValueError):  # as another version, or a stranger, wrote it
        return None
    return lengths[-1] if lengths else values["data.seq_len"] or values["model.seq_len"]


def refuse_another_model(checkpoint: Checkpoint, tensors: Shapes, buffers: Shapes | None) -> None:
    """Raise InputError if the checkpoint lacks these tensors, or has them with other shapes.

    With `buffers` it must hold exactly these tensors and buffers, and no others.
    """
    there = {tensor.name: tensor.shape for tensor in checkpoint.table.tensors}
    wrong = _lacking(there, tensors)
    if buffers is not None:
        buffers_there = {name: values.shape for name, values in checkpoint.buffers.items()}
        wrong += _unknown(there, tensors)
        lines = _lacking(buffers_there, buffers) + _unknown(buffers_there, buffers)
        wrong += [f"buffer {line}" for line in lines]
    if wrong:
        more = f"\n  and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
        shown = "".join(f"\n  {printable(line)}" for line in wrong[:_SHOWN]) + more
        raise InputError(f"{checkpoint.folder} does not have this model's tensors:{shown}")


def _lacking(there: Shapes, here: Shapes) -> list[str]:
    return [
        f"{name}: {there.get(name, 'nothing')} there, {shape} now"
        for name, shape in here.items()
        if there.get(name) != shape
    ]


def _unknown(there: Shapes, here: Shapes) -> list[str]:
    return [
        f"{name}: {shape} there, nothing now" for name, shape in there.items() if name not in here
    ]


# -- what is read back -----------------------------------------------------------------------------


def restore(engine: Engine, checkpoint: Checkpoint, only_weights: bool) -> list[str]:
    """Read this rank's elements into the engine's states, all buffers, and the counters.

    Slot after slot, as a rank's data lies: with the same layout, it is read from front to back.
    Return notes on what replicas could not go on with.
    """
    engine.wait_for_weights()  # and so for steps that are still written
    notes = restore_states(engine, checkpoint, only_weights)
    buffers = dict(engine.module.named_buffers())
    for name, saved in checkpoint.buffers.items():
        if name in buffers and tuple(buffers[name].shape) == saved.shape:  # rank 0 refuses others
            buffers[name].copy_(torch.from_numpy(saved))
    if only_weights:
        return notes
    state = checkpoint.content.state
    engine.updates = state.updates
    engine.absent.missed = {
        name: state.missed[name] for name in engine.names if name in state.missed
    }
    if engine.loss_scale.dynamic and flat(checkpoint.content.spec)["train.precision"] == "fp16":
        engine.loss_scale = replace(
            engine.loss_scale, value=state.loss_scale, good_steps=state.good_steps
        )
    return notes
