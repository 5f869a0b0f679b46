"""The checkpoints of a run: <run>/checkpoints/step-00000100 and so on.

A folder with a manifest is a checkpoint; one without is what a save left that did not come to its
end, and one with a longer name was set aside. A folder whose name is not the one that its step gets
(a copy under another name) and a link to a folder are read where they are named, and never removed.
"""

import os
import re
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from hpczero.checkpoint import manifest
from hpczero.checkpoint.open_folder import Identity, OpenFolder, identity
from hpczero.checkpoint.shard_file import Damaged, Unreadable, not_read
from hpczero.errors import InputError
from hpczero.safe_files import exchange, make_folder, make_own_folder, rename, sync
from hpczero.text import printable

_NAME = re.compile(r"(step-(\d{8,18}))(\.\d{8}T\d{6}(-\d+)?)?")
_NEW = ".new"  # behind the name of a save that is to replace a checkpoint
_FILES = re.compile(r"(shard-\d{5,9}\.h5|index\.h5|MANIFEST\.json)(\.new)?")


# -- names ---------------------------------------------------------------------------------------


class _Name(NamedTuple):
    """The facts in the name of a checkpoint's folder."""

    step: int
    is_canonical: bool  # the step is written as a save writes it
    is_aside: bool


def name_of(step: int) -> str:
    return f"step-{step:08d}"


def _parsed(name: str) -> _Name | None:
    match = _NAME.fullmatch(name)
    if not match:
        return None
    begin, step, stamp, _ = match.groups()
    return _Name(int(step), begin == name_of(int(step)), stamp is not None)


def step_of(path: Path) -> int | None:
    """Return the step in a folder's name, also of one that was set aside; None: there is none."""
    name = _parsed(path.absolute().name)
    return name.step if name else None


def _saved_step(path: Path) -> int | None:
    """Return the step in a folder's manifest, a link's target included; None: it cannot be read."""
    try:
        return manifest.read(path).state.step
    except (OSError, Damaged, Unreadable):
        return None


def refuse_misnamed(path: Path, step: int) -> None:
    """Damaged if a save of this step gives its folder another name."""
    if path.name != name_of(step):
        named = f"it is of step {step}, and its name is not {name_of(step)}"
        raise Damaged(f"{path}: {named}: a copy under another name does not count")


# -- the folders of a run ------------------------------------------------------------------------


def _folders(checkpoints: Path) -> list[tuple[_Name, Path]]:
    """Return the folders, and links to folders, with a name of a checkpoint, by name."""
    if not checkpoints.is_dir():
        return []
    named = [(_parsed(path.name), path) for path in sorted(checkpoints.iterdir())]
    return [(name, path) for name, path in named if name and path.is_dir()]


def _saves(checkpoints: Path, complete: bool) -> list[tuple[int, Path]]:
    """Return step and path of the folders of saves with, or without, a manifest."""
    return [
        (name.step, path)
        for name, path in _folders(checkpoints)
        if name.is_canonical and not name.is_aside
        if (path / manifest.NAME).is_file() == complete
    ]


def steps(checkpoints: Path) -> dict[int, Path]:
    """Return the complete checkpoints by step, the newest first."""
    return dict(sorted(_saves(checkpoints, complete=True), reverse=True))


def incomplete(checkpoints: Path) -> list[Path]:
    return [path for _, path in _saves(checkpoints, complete=False)]


def aside(checkpoints: Path) -> list[Path]:
    """Return those that were set aside."""
    folders = _folders(checkpoints)
    return [path for name, path in folders if name.is_aside and name.is_canonical]


def oddly_named(checkpoints: Path) -> list[Path]:
    """Return those with a step in the name, written as no save writes it."""
    folders = _folders(checkpoints)
    return [path for name, path in folders if not name.is_aside and not name.is_canonical]


def holds_any(checkpoints: Path) -> bool:
    return any(name.is_canonical or not name.is_aside for name, _ in _folders(checkpoints))


def begin(checkpoints: Path, step: int) -> Path:
    """Make a new folder, on the disk.

    A checkpoint that has the step's name stays what it is until the new one is whole
    (`put_in_place`); anything else of that name is removed or set aside.
    """
    refuse_another_runs(checkpoints)
    if make_own_folder(checkpoints):
        sync(checkpoints.parent)
    path = checkpoints / name_of(step)
    if (path / manifest.NAME).is_file():
        path = path.with_name(f"{path.name}{_NEW}")
    _clear(path)
    make_folder(path)
    sync(checkpoints)
    return path


def in_place(path: Path) -> Path:
    """Return the name that the folder of a save has in the end."""
    return path.with_name(path.name.removesuffix(_NEW))


def put_in_place(path: Path) -> None:
    """Give the folder of a save that is whole its name; what has it is set aside.

    Where two names cannot be exchanged there is a moment in which nothing has the name.
    """
    if not path.name.endswith(_NEW):
        return
    final = in_place(path)
    if exchange(path, final):
        rename(path, _name_aside(final))
    else:
        rename(final, _name_aside(final))
        rename(path, final)
    sync(path.parent)


def make_way(checkpoints: Path, step: int, origin: Path | None) -> list[Path]:
    """Free the names that a run needs which has `step` steps behind it and begins from `origin`.

    Other checkpoints that could be taken for its own are set aside; incomplete ones are removed.
    Return what was set aside.
    """
    refuse_another_runs(checkpoints)
    left = [path for path in incomplete(checkpoints) if not path.is_symlink()]
    left += sorted(checkpoints.glob(f"step-*{_NEW}"))
    newer = [path for at, path in steps(checkpoints).items() if at >= step]
    others = [path for path in newer if not (origin and path.samefile(origin))]
    moved = [aside for path in left + others if (aside := _clear(path))]
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
    aside = _name_aside(in_place(path))
    rename(path, aside)
    return aside


def _name_aside(path: Path) -> Path:
    """Return a free name for what is to be set aside."""
    stamped = f"{path.name}.{datetime.now(UTC).strftime('%Y%m%dT%H%M%S')}"
    aside, number = path.with_name(stamped), 0
    while os.path.lexists(aside):
        number += 1
        aside = path.with_name(f"{stamped}-{number}")
    return aside


def refuse_another_runs(checkpoints: Path) -> None:
    """InputError if the folder is a link into another run, which may be saving there meanwhile."""
    run = checkpoints.resolve().parent
    if run != checkpoints.parent.resolve() and (run / "spec.toml").exists():
        ways = "remove the link (checkpoint.resume names a run to begin from)"
        raise InputError(f"{checkpoints} leads to the checkpoints of another run, {run}: {ways}")


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

    What is newer is none of the run's. A link, and what does not fit its name, neither counts nor
    is removed.
    """
    paths = {step: path for step, path in steps(checkpoints).items() if step <= newest}
    known = {step: identity(path) for step, path in paths.items()}

    def counts(step: int) -> bool:
        path = paths[step]
        return step == newest or (not path.is_symlink() and _saved_step(path) == step)

    return [(paths[step], known[step]) for step in to_prune(list(paths), keep, keep_every, counts)]


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


# -- which checkpoint a path means: a checkpoint's folder, a run's directory, or its checkpoints -

_SHOWN = 8


def checkpoint_at(path: Path, step: int | None = None) -> Path:
    """Return the folder of a checkpoint: of a run the newest complete one, or that of `step`.

    InputError: there is none.
    """
    try:
        return _checkpoint_at(path, step)
    except OSError as error:
        raise not_read(Path(error.filename or path), error) from error


def _checkpoint_at(path: Path, step: int | None) -> Path:
    said, option = printable(str(path)), f"--step {step}"
    if not path.is_dir():
        raise InputError(f"{_no_folder(path)}: name a checkpoint's folder or a run's directory")
    if (path / manifest.NAME).is_file():
        if step is not None and step_of(path) != step:
            choose = "name its run's directory to choose a step"
            raise InputError(f"{option}: {said} is a checkpoint itself; {choose}")
        return path
    if step_of(path) is not None:
        left = "it is what a save left that did not come to its end"
        raise InputError(f"{said} has no {manifest.NAME}: {left}")
    complete = steps(checkpoints_of(path))
    if not complete:
        raise InputError(f"{said} has no complete checkpoint")
    if step is None:
        named_well = (path for at, path in complete.items() if _is_well_named(path, at))
        return next(named_well, complete[next(iter(complete))])
    if step not in complete:
        there = ", ".join(map(str, list(complete)[:_SHOWN]))
        there += ", …" if len(complete) > _SHOWN else ""
        missing = "has no complete checkpoint of that step; there are"
        raise InputError(f"{option}: {said} {missing} {there}")
    if not _is_well_named(complete[step], step):
        raise InputError(f"{option}: what has that name in {said} is of another step")
    return complete[step]


def _is_well_named(path: Path, step: int) -> bool:
    """Return False if a manifest that can be read says another step."""
    return _saved_step(path) in (None, step)


def checkpoints_of(path: Path) -> Path:
    """Return the folder of a run's checkpoints; any other folder is taken for one itself."""
    return path / "checkpoints" if (path / "checkpoints").is_dir() else path


def folders_of_checkpoints(path: Path) -> list[Path]:
    """Return the folders of checkpoints of a run, or of all runs in an output folder."""
    if not path.is_dir():
        raise InputError(_no_folder(path))
    try:
        checkpoints = checkpoints_of(path)
        if checkpoints != path or holds_any(path):
            return [checkpoints]
        return sorted(
            run / "checkpoints" for run in path.iterdir() if (run / "checkpoints").is_dir()
        )
    except OSError as error:
        raise InputError(f"{printable(str(error.filename or path))}: {error.strerror}") from error


def _no_folder(path: Path) -> str:
    return f"{printable(str(path))} {'is no folder' if path.exists() else 'does not exist'}"
