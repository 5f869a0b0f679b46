"""What checkpoints there are, from their manifests and the sizes of their files: fast, and without a look at the data."""

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hpczero.checkpoint import directory, manifest
from hpczero.checkpoint.files import Damaged, Newer, Unreadable, not_read
from hpczero.checkpoint.manifest import INDEX, Content
from hpczero.safe_files import Identity, identity

COMPLETE, DAMAGED, INCOMPLETE, ASIDE, NEWER, UNREADABLE = "complete", "damaged", "incomplete", "set aside", "newer", "unreadable"
MISNAMED, LINKED = "misnamed", "linked"


@dataclass(frozen=True)
class Listed:
    """`state`: complete, damaged (`problem` says how), incomplete (a save that did not come to its end, or has not yet), set aside, newer (of a
    format that this version does not know), unreadable (it may be good), misnamed (its name is not
    the one that its step gets), linked (a link, and what it leads to may be another run's).
    `identity`: of the folder that was looked at.
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
    """Those in a folder of checkpoints, by step."""
    try:
        found = [*directory.steps(checkpoints).values(), *directory.incomplete(checkpoints), *directory.aside(checkpoints)]
        found += directory.oddly_named(checkpoints)
    except OSError as error:
        raise not_read(Path(error.filename or checkpoints), error) from error
    return (_look_at(path) for path in sorted(found, key=lambda path: (directory.step_of(path) or 0, path.name)))


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
    try:
        size = sum(entry.lstat().st_size for entry in path.iterdir())
        if not (path / manifest.NAME).exists():
            if directory.is_oddly_named(path):
                return Listed(path, step, MISNAMED, f"no save writes step {step} so", size)
            return Listed(path, step, INCOMPLETE, f"it has no {manifest.NAME}", size)
        content = manifest.read(path)
        problem = _missing(path, content)
    except OSError as error:  # or removed since it was listed
        return Listed(path, step, UNREADABLE, f"{error.filename or path}: {error.strerror}", size)
    except (Damaged, Unreadable) as error:
        state = DAMAGED if isinstance(error, Damaged) else NEWER if isinstance(error, Newer) else UNREADABLE
        return Listed(path, step, state, str(error), size)
    named = path.absolute().name
    if directory.name_of(content.state.step) not in (named, named.partition(".")[0]):
        problem = f"it is of step {content.state.step}, which is {directory.name_of(content.state.step)}"
        state = MISNAMED
    else:
        state = DAMAGED if problem else COMPLETE if named == directory.name_of(step) else ASIDE
    return Listed(path, content.state.step, state, problem, size, content.created, content.ranks, content.grid)


def _missing(path: Path, content: Content) -> str:
    """Which file is not there, or not as long as it was; empty if all are."""
    for name, size in [(INDEX, content.index.size), *((shard.file, shard.size) for shard in content.shards)]:
        try:
            found = (path / name).lstat()
        except FileNotFoundError as error:
            return f"{name}: {error.strerror}"
        if found.st_size != size:
            return f"{name} has {found.st_size:,} bytes, and {size:,} were written"
    return ""
