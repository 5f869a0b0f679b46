"""A mixture that a run goes on with: its record in a checkpoint, and what has changed in it."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hpczero.checkpoint.load import Checkpoint
from hpczero.checkpoint.shard_file import Damaged
from hpczero.data.mixture import Mixture, MixtureRecord
from hpczero.data.source_order import shares_of
from hpczero.data.token_source import TokenSource
from hpczero.errors import InputError
from hpczero.spec.schema import Spec
from hpczero.text import printable

DATA = "data.fingerprint"  # in a checkpoint's identity: of a single source
WINDOWS = "data.windows"  # in an epoch of it
MIXTURE = "data.mixture"  # of a mixture


def identity_of_data(source: TokenSource) -> dict[str, str]:
    """Return what a run's results depend on of its data, whatever path it was read from."""
    if isinstance(source, Mixture):
        return {MIXTURE: source.record.as_text()}
    return {
        DATA: str(source.describe()["fingerprint"]),
        WINDOWS: str(source.windows("train")),
    }


def as_recorded(source: TokenSource, identity: Mapping[str, str]) -> TokenSource:
    """Return the source as a run with this identity reads it."""
    if isinstance(source, Mixture) and MIXTURE in identity:
        return source.with_record(MixtureRecord.from_text(identity[MIXTURE]))
    return source


def refuse_early_end(source: TokenSource, spec: Spec) -> None:
    """Raise InputError if a mixture's sources end before the steps do."""
    samples = spec.train.steps * spec.train.global_batch
    if isinstance(source, Mixture) and source.end < samples:
        raise InputError(
            f"data.sources: their epochs allow {source.end} samples, and {spec.train.steps} steps "
            f"of {spec.train.global_batch} are {samples}: more epochs (0: without end), or "
            f"train.steps = {int(source.end) // spec.train.global_batch}"
        )


def continue_mixture(checkpoint: Checkpoint, spec: Spec, identity: dict[str, str]) -> list[str]:
    """Take the record of the checkpoint over into a run's identity; return what has changed."""
    step = checkpoint.content.state.step
    batch = spec.train.global_batch
    seen = step * (samples_in_step(checkpoint.content.spec) or batch)
    try:
        record, changes = continued(checkpoint.identity, identity, seen, step * batch)
    except (ValueError, TypeError) as error:
        raise Damaged(f"{checkpoint.folder}: {error}") from error
    identity.update(record)
    return changes


def continued_loop(
    there: Mapping[str, str], here: Mapping[str, str], steps: int, before: int, batch: int
) -> tuple[dict[str, str], list[str]]:
    """Do as `continued` for a loop of one's own, after steps of `before` samples (0: as now)."""
    try:
        return continued(there, here, steps * (before or batch), steps * batch)
    except (ValueError, TypeError) as error:
        raise InputError(f"the checkpoint that the loop goes on from: {error}") from error


def samples_in_step(spec: Mapping[str, Any]) -> int:
    """Return `train.global_batch` of a checkpoint's spec; 0 if it says no such number."""
    table = spec.get("train")
    found = table.get("global_batch") if isinstance(table, dict) else None
    return found if isinstance(found, int) and found > 0 else 0


def continued(
    there: Mapping[str, str], here: Mapping[str, str], seen: int, begins: int
) -> tuple[dict[str, str], list[str]]:
    """Return the record of a run that goes on from a checkpoint, and its changes in words.

    `there`, `here`: identities of the checkpoint and of the run as it would begin. `seen`: samples
    that have been read; `begins`: the first that is read now. ValueError if the checkpoint says
    nothing that a record could be made of.
    """
    if MIXTURE not in here:
        return {}, []
    new = MixtureRecord.from_text(here[MIXTURE])
    if MIXTURE in there:
        old = MixtureRecord.from_text(there[MIXTURE])
        if seen == begins and _rule(old) == _rule(new):
            return {MIXTURE: replace(old, names=new.names).as_text()}, []
        counts = _in_windows_of(new, old, old.counts_at(seen))
    elif DATA in there:
        single = there[DATA]
        of_epoch = int(there.get(WINDOWS, new.windows.get(single, 0)))
        old = MixtureRecord({single: "data.source"}, {single: 1.0}, {single: 0}, {single: of_epoch})
        counts = _in_windows_of(new, old, {single: seen})
    else:
        return {}, []
    windows = {**old.windows, **new.windows}
    record = replace(new, first=begins, counts=counts, windows=windows)
    return {MIXTURE: record.as_text()}, _changes(old, new)


def _in_windows_of(
    new: MixtureRecord, old: MixtureRecord, counts: Mapping[str, int]
) -> dict[str, int]:
    """Return counts in the windows that an epoch has now: as large a share of it as before."""
    found = dict(counts)
    for key, now in new.windows.items():
        before = old.windows.get(key, now)
        if key in found and before != now and before > 0:
            found[key] = round(found[key] * now / before)
    return found


def _rule(record: MixtureRecord) -> tuple[object, ...]:
    weights = dict(record.weights)
    shares = shares_of(list(weights.values()))
    windows = {key: record.windows[key] for key in weights}
    return list(weights), shares, dict(record.most), windows


def _changes(old: MixtureRecord, new: MixtureRecord) -> list[str]:
    """Return a line for each source that came, went or has another share."""
    lines = []
    for key in {**old.weights, **new.weights}:
        name = printable({**old.names, **new.names}[key], 200)
        if key not in old.weights:
            lines.append(f"data.sources: {name} is new, with weight {new.weights[key]:g}")
        elif key not in new.weights:
            lines.append(f"data.sources: {name} is not read any more")
        elif _share(old, key) != _share(new, key):
            was, now = (_share(record, key) for record in (old, new))
            lines.append(f"data.sources: {name} had {was}, and has {now}")
    return lines


def _share(record: MixtureRecord, key: str) -> str:
    most, windows = record.most[key], record.windows[key]
    epochs = f" and at most {most / windows:.4g} epochs" if most and windows else ""
    return f"weight {record.weights[key]:g}{epochs}"
