"""A list of the checkpoints of a run, from manifests and file sizes: fast, without the data."""

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hpczero.checkpoint import directory, manifest
from hpczero.checkpoint.manifest import INDEX, Content
from hpczero.checkpoint.open_folder import Identity, identity
from hpczero.checkpoint.shard_file import Damaged, Newer, Unreadable, not_read

COMPLETE, DAMAGED, INCOMPLETE, ASIDE = "complete", "damaged", "incomplete", "set aside"
NEWER, UNREADABLE, MISNAMED, LINKED = "newer", "unreadable", "misnamed", "linked"


@dataclass(frozen=True)
class Listed:
    """A checkpoint's folder in one of these states.

    complete; damaged: `problem` says how; incomplete: a save that did not come to its end, or has
    not yet; set aside; newer: of a format that this version does not know; unreadable: it may be
    good; misnamed: its name is not the one that its step gets; linked: a link, and what it leads to
    may be another run's. `identity`: of the folder that was looked at.
    """

    path: Path
    step: int
    state: str
    problem: str
    size: int  # bytes of the files that are there
    created: str | None = None
    ranks: int | None = None
    grid: dict[str, int] | None = None
    identity: Identity | None = None

    @property
    def run(self) -> Path:
        return self.path.absolute().parent.parent

    def as_data(self) -> dict[str, Any]:
        facts = vars(self) | {"path": str(self.path), "run": str(self.run)}
        return {key: value for key, value in facts.items() if key != "identity"}


def listed(checkpoints: Path) -> Iterator[Listed]:
    """Yield those in a folder of checkpoints, by step."""
    try:
        paths = [*directory.steps(checkpoints).values(), *directory.incomplete(checkpoints)]
        paths += [*directory.aside(checkpoints), *directory.oddly_named(checkpoints)]
    except OSError as error:
        raise not_read(Path(error.filename or checkpoints), error) from error
    return map(_look_at, sorted(paths, key=lambda path: (directory.step_of(path) or 0, path.name)))


def _look_at(path: Path) -> Listed:
    step = directory.step_of(path) or 0
    try:
        before = identity(path)
        if path.is_symlink():
            return Listed(path, step, LINKED, f"it is a link to {os.readlink(path)}", 0)
        return replace(_look_into(path, step), identity=before)
    except OSError as error:  # or removed since it was listed
        return Listed(path, step, UNREADABLE, f"{error.filename or path}: {error.strerror}", 0)


def _look_into(path: Path, step: int) -> Listed:
    size = 0
    name = path.absolute().name
    try:
        size = sum(entry.lstat().st_size for entry in path.iterdir())
        if not (path / manifest.NAME).exists():
            if name != directory.name_of(step) and "." not in name:
                return Listed(path, step, MISNAMED, f"no save writes step {step} so", size)
            return Listed(path, step, INCOMPLETE, f"it has no {manifest.NAME}", size)
        content = manifest.read(path)
        problem = _missing(path, content)
    except OSError as error:  # or removed since it was listed
        return Listed(path, step, UNREADABLE, f"{error.filename or path}: {error.strerror}", size)
    except Damaged as error:
        return Listed(path, step, DAMAGED, str(error), size)
    except Unreadable as error:
        state = NEWER if isinstance(error, Newer) else UNREADABLE
        return Listed(path, step, state, str(error), size)
    saved = content.state.step
    if name.partition(".")[0] != directory.name_of(saved):
        problem = f"it is of step {saved}, which is {directory.name_of(saved)}"
        state = MISNAMED
    elif problem:
        state = DAMAGED
    else:
        state = COMPLETE if name == directory.name_of(step) else ASIDE
    return Listed(path, saved, state, problem, size, content.created, content.ranks, content.grid)


def _missing(path: Path, content: Content) -> str:
    """Return which file is not there, or not as long as it was; empty if all are."""
    written = {INDEX: content.index.size} | {shard.file: shard.size for shard in content.shards}
    for name, size in written.items():
        try:
            size_now = (path / name).lstat().st_size
        except FileNotFoundError as error:
            return f"{name}: {error.strerror}"
        if size_now != size:
            return f"{name} has {size_now:,} bytes, and {size:,} were written"
    return ""
