"""The checkpoints of a run: <run>/checkpoints/step-00000100 and so on.

A folder with a manifest is a checkpoint; one without is what a save left that did not come to its
end, and one with a longer name was set aside. A folder whose name is not the one that its step gets
(a copy under another name) and a link to a folder are read where they are named, and never removed.
"""

import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from hpczero.checkpoint import manifest
from hpczero.checkpoint.manifest import INDEX, Content
from hpczero.checkpoint.shard_file import Damaged, Newer, Unreadable, not_read
from hpczero.errors import InputError
from hpczero.safe_files import Identity, OpenFolder, identity, make_folder, own_folder, rename, sync
from hpczero.text import printable

_STEP = re.compile(r"step-(\d{8,18})")
_ASIDE = re.compile(r"step-(\d{8,18})\.\d{8}T\d{6}(-\d+)?")
_FILES = re.compile(r"(shard-\d{5,9}\.h5|index\.h5|MANIFEST\.json)(\.new)?")


def name_of(step: int) -> str:
    return f"step-{step:08d}"


def steps(checkpoints: Path) -> dict[int, Path]:
    """Of the complete ones, the newest first."""
    found = {step: path for step, path in _folders(checkpoints) if (path / manifest.NAME).is_file()}
    return dict(sorted(found.items(), reverse=True))


def incomplete(checkpoints: Path) -> list[Path]:
    return [path for _, path in _folders(checkpoints) if not (path / manifest.NAME).is_file()]


def oddly_named(checkpoints: Path) -> list[Path]:
    """Those with a step in the name, written as no save writes it."""
    return [path for _, path in _folders(checkpoints, canonical=False) if is_oddly_named(path)]


def is_oddly_named(path: Path) -> bool:
    match = _STEP.fullmatch(path.name)
    return match is not None and path.name != name_of(int(match.group(1)))


def aside(checkpoints: Path) -> list[Path]:
    """Those that were set aside."""
    return [path for _, path in _folders(checkpoints, _ASIDE)]


def step_of(path: Path) -> int | None:
    """The step that a folder's name says, also of one that was set aside; None: it is no name of a checkpoint."""
    match = _STEP.fullmatch(path.absolute().name) or _ASIDE.fullmatch(path.absolute().name)
    return int(match.group(1)) if match else None


def holds_any(checkpoints: Path) -> bool:
    return bool(_folders(checkpoints, canonical=False) or _folders(checkpoints, _ASIDE))


def begin(checkpoints: Path, step: int) -> Path:
    """A new folder, on the disk. What is there under this name is removed or set aside."""
    refuse_another_runs(checkpoints)
    if own_folder(checkpoints):
        sync(checkpoints.parent)
    path = checkpoints / name_of(step)
    _clear(path)
    make_folder(path)
    sync(checkpoints)
    return path


def make_way(checkpoints: Path, step: int, origin: Path | None) -> list[Path]:
    """For a run that has `step` steps behind it, and begins from `origin`: whatever else could be taken for what it is going to save is set
    aside, and what saves left that did not come to their end is removed. What was set aside.
    """
    refuse_another_runs(checkpoints)
    left = [path for path in incomplete(checkpoints) if not path.is_symlink()]
    newer = [
        path
        for at, path in steps(checkpoints).items()
        if at >= step and not (origin and path.samefile(origin))
    ]
    moved = [aside for path in left + newer if (aside := _clear(path))]
    if moved:
        sync(checkpoints)
    return moved


def _clear(path: Path) -> Path | None:
    """Free the name: what is incomplete is removed; a checkpoint, a link, or what no save makes, is
    set aside and gets the name returned.
    """
    if path.is_dir() and not path.is_symlink():
        with OpenFolder(path) as folder:
            if not folder.holds(manifest.NAME):
                folder.remove_files(manifest.NAME, _FILES.fullmatch)
    return _set_aside(path) if os.path.lexists(path) else None


def _set_aside(path: Path) -> Path:
    stamp, number = datetime.now(UTC).strftime("%Y%m%dT%H%M%S"), 0
    while os.path.lexists(
        aside := path.with_name(f"{path.name}.{stamp}" + (f"-{number}" if number else ""))
    ):
        number += 1
    rename(path, aside)
    return aside


def refuse_another_runs(checkpoints: Path) -> None:
    """InputError if the folder is a link into another run, which may be saving there meanwhile."""
    there = checkpoints.resolve().parent
    if there != checkpoints.parent.resolve() and (there / "spec.toml").exists():
        ways = "remove the link (checkpoint.resume names a run to begin from)"
        raise InputError(f"{checkpoints} leads to the checkpoints of another run, {there}: {ways}")


def refuse_misnamed(path: Path, step: int) -> None:
    """Damaged if a save of this step gives its folder another name."""
    if path.name != name_of(step):
        named = f"it is of step {step}, and its name is not {name_of(step)}"
        raise Damaged(f"{path}: {named}: a copy under another name does not count")


def remove(path: Path, known_as: Identity | None = None) -> None:
    """Remove the manifest first: a checkpoint is whole or is none.

    Files that no save makes are left, with their folder. OSError, and nothing is removed: it is a
    link, or not the folder that was `known_as`.
    """
    with OpenFolder(path, known_as) as folder:
        folder.remove_files(manifest.NAME, _FILES.fullmatch)


def outdated(
    checkpoints: Path, newest: int, keep: int, keep_every: int
) -> list[tuple[Path, Identity]]:
    """Return the checkpoints that a run which has just saved step `newest` keeps no longer.

    What is newer is none of the run's; what does not fit its name neither counts nor is removed.
    """
    own = {step: path for step, path in steps(checkpoints).items() if step <= newest}
    known = {step: identity(path) for step, path in own.items()}
    old = to_prune(list(own), keep, keep_every, lambda step: step == newest or fits_name(own[step]))
    return [(own[step], known[step]) for step in old]


def misnamed(path: Path) -> bool:
    """Return True if its manifest says another step than its name; of a link, what it leads to."""
    try:
        return manifest.read(path).state.step != step_of(path)
    except (OSError, Damaged, Unreadable):
        return False


def fits_name(path: Path) -> bool:
    """Return True for a folder, and no link, whose manifest says the step of its name."""
    try:
        return not path.is_symlink() and path.name == name_of(manifest.read(path).state.step)
    except (OSError, Damaged, Unreadable):
        return False


def to_prune(
    complete: Sequence[int],
    keep: int,
    keep_every: int,
    counts: Callable[[int], bool] = lambda step: True,
) -> list[int]:
    """Return the steps that are not among the newest `keep` (0: all are kept) and that `keep_every`
    does not divide (0: it divides none). What does not count is in neither.
    """
    kept, old = 0, []
    for step in sorted(complete, reverse=True) if keep else ():
        spared = kept == keep and keep_every and step % keep_every == 0
        if spared or not counts(step):
            continue
        if kept < keep:
            kept += 1
        else:
            old.append(step)
    return old


def free_bytes(folder: Path) -> int:
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


def _folders(
    checkpoints: Path, name: re.Pattern[str] = _STEP, canonical: bool = True
) -> list[tuple[int, Path]]:
    """Return step and path of what has such a name; `canonical`: as a save writes the step."""
    if not checkpoints.is_dir():
        return []
    found = sorted((path.name, path) for path in checkpoints.iterdir())
    matches = [(name.fullmatch(text), path) for text, path in found]
    dated = [(int(match.group(1)), path) for match, path in matches if match and path.is_dir()]
    return [
        (step, path) for step, path in dated if not canonical or path.name.startswith(name_of(step))
    ]


# What checkpoints there are, from their manifests and the sizes of their files: fast, and without a look at the data.
COMPLETE, DAMAGED, INCOMPLETE, ASIDE, NEWER, UNREADABLE = (
    "complete",
    "damaged",
    "incomplete",
    "set aside",
    "newer",
    "unreadable",
)
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
        found = [*steps(checkpoints).values(), *incomplete(checkpoints), *aside(checkpoints)]
        found += oddly_named(checkpoints)
    except OSError as error:
        raise not_read(Path(error.filename or checkpoints), error) from error
    return (
        _look_at(path) for path in sorted(found, key=lambda path: (step_of(path) or 0, path.name))
    )


def _look_at(path: Path) -> Listed:
    step = step_of(path) or 0
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
            if is_oddly_named(path):
                return Listed(path, step, MISNAMED, f"no save writes step {step} so", size)
            return Listed(path, step, INCOMPLETE, f"it has no {manifest.NAME}", size)
        content = manifest.read(path)
        problem = _missing(path, content)
    except OSError as error:  # or removed since it was listed
        return Listed(path, step, UNREADABLE, f"{error.filename or path}: {error.strerror}", size)
    except (Damaged, Unreadable) as error:
        state = (
            DAMAGED
            if isinstance(error, Damaged)
            else NEWER
            if isinstance(error, Newer)
            else UNREADABLE
        )
        return Listed(path, step, state, str(error), size)
    named = path.absolute().name
    if name_of(content.state.step) not in (named, named.partition(".")[0]):
        problem = f"it is of step {content.state.step}, which is {name_of(content.state.step)}"
        state = MISNAMED
    else:
        state = DAMAGED if problem else COMPLETE if named == name_of(step) else ASIDE
    return Listed(
        path, content.state.step, state, problem, size, content.created, content.ranks, content.grid
    )


def _missing(path: Path, content: Content) -> str:
    """Which file is not there, or not as long as it was; empty if all are."""
    for name, size in [
        (INDEX, content.index.size),
        *((shard.file, shard.size) for shard in content.shards),
    ]:
        try:
            found = (path / name).lstat()
        except FileNotFoundError as error:
            return f"{name}: {error.strerror}"
        if found.st_size != size:
            return f"{name} has {found.st_size:,} bytes, and {size:,} were written"
    return ""


# Which checkpoint a path means: a checkpoint's folder, a run's directory, or its folder of checkpoints.
_SHOWN = 8


def checkpoint_at(path: Path, step: int | None = None) -> Path:
    """The folder of a checkpoint: of a run the newest complete one, or that of `step`. InputError: there is none."""
    try:
        return _checkpoint_at(path, step)
    except OSError as error:
        raise not_read(Path(error.filename or path), error) from error


def _checkpoint_at(path: Path, step: int | None) -> Path:
    said = printable(str(path))
    if not path.is_dir():
        raise InputError(
            f"{said} {'is no folder' if path.exists() else 'does not exist'}: name a checkpoint's folder or a run's directory"
        )
    if (path / manifest.NAME).is_file():
        if step is not None and step_of(path) != step:
            raise InputError(
                f"--step {step}: {said} is a checkpoint itself; name its run's directory to choose a step"
            )
        return path
    if step_of(path) is not None:
        raise InputError(
            f"{said} has no {manifest.NAME}: it is what a save left that did not come to its end"
        )
    complete = steps(checkpoints_of(path))
    if not complete:
        raise InputError(f"{said} has no complete checkpoint")
    if step is not None and step not in complete:
        there = ", ".join(map(str, list(complete)[:_SHOWN])) + (
            ", …" if len(complete) > _SHOWN else ""
        )
        raise InputError(
            f"--step {step}: {said} has no complete checkpoint of that step; there are {there}"
        )
    if step is not None:
        if misnamed(complete[step]):
            raise InputError(f"--step {step}: what has that name in {said} is of another step")
        return complete[step]
    named_well = (path for path in complete.values() if not misnamed(path))
    return next(named_well, complete[next(iter(complete))])


def checkpoints_of(path: Path) -> Path:
    """Of a run's directory the folder of its checkpoints; any other folder is taken for one itself."""
    return path / "checkpoints" if (path / "checkpoints").is_dir() else path


def folders_of_checkpoints(path: Path) -> list[Path]:
    """Those that a path leads to: of a run, or of all runs in an output folder."""
    if not path.is_dir():
        raise InputError(
            f"{printable(str(path))} {'is no folder' if path.exists() else 'does not exist'}"
        )
    try:
        own = checkpoints_of(path)
        if own != path or holds_any(path):
            return [own]
        return sorted(
            run / "checkpoints" for run in path.iterdir() if (run / "checkpoints").is_dir()
        )
    except OSError as error:
        raise InputError(f"{printable(str(error.filename or path))}: {error.strerror}") from error
