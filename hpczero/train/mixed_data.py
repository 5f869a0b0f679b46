"""A mixture that a run goes on with: its record in a checkpoint, and what has changed in it."""

from collections.abc import Mapping
from dataclasses import replace

from hpczero.checkpoint.load import Checkpoint
from hpczero.checkpoint.shard_file import Damaged
from hpczero.data.mixture import Mixture, MixtureRecord
from hpczero.data.source_order import shares_of
from hpczero.data.token_source import TokenSource
from hpczero.errors import InputError
from hpczero.spec.schema import Spec
from hpczero.text import printable

DATA = "data.fingerprint"  # in a checkpoint's identity: of a single source
MIXTURE = "data.mixture"  # of a mixture


def identity_of_data(source: TokenSource) -> dict[str, str]:
    """Return what a run's results depend on of its data, whatever path it was read from."""
    if isinstance(source, Mixture):
        return {MIXTURE: source.record.as_text()}
    return {DATA: str(source.describe()["fingerprint"])}


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
    before = checkpoint.content.spec.get("train", {}).get("global_batch", batch)
    try:
        record, changes = continued(checkpoint.identity, identity, step * int(before), step * batch)
    except (ValueError, TypeError) as error:
        raise Damaged(f"{checkpoint.folder}: {error}") from error
    identity.update(record)
    return changes


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
        if _rule(old) == _rule(new):
            return {MIXTURE: replace(old, names=new.names).as_text()}, []
        counts = old.counts_at(seen)
    elif DATA in there:
        single = there[DATA]
        old = MixtureRecord({single: "data.source"}, {single: 1.0}, {single: 0})
        counts = {single: seen}
    else:
        return {}, []
    return {MIXTURE: replace(new, first=begins, counts=counts).as_text()}, _changes(old, new)


def _rule(record: MixtureRecord) -> tuple[object, ...]:
    weights = dict(record.weights)
    return list(weights), shares_of(list(weights.values())), dict(record.most)


def _changes(old: MixtureRecord, new: MixtureRecord) -> list[str]:
    """Return a line for each source that came, went or has another share."""
    lines = []
    for key in {**old.weights, **new.weights}:
        name = printable({**old.names, **new.names}[key], 200)
        if key not in old.weights:
            lines.append(f"data.sources: {name} is new, with weight {new.weights[key]:g}")
        elif key not in new.weights:
            lines.append(f"data.sources: {name} is not read any more")
        elif old.weights[key] != new.weights[key] or old.most[key] != new.most[key]:
            was, now = (_share(record, key) for record in (old, new))
            lines.append(f"data.sources: {name} had {was}, and has {now}")
    return lines


def _share(record: MixtureRecord, key: str) -> str:
    most = record.most[key]
    return f"weight {record.weights[key]:g}" + (f" and at most {most:,} samples" if most else "")
