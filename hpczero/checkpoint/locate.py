"""Which checkpoint a path means: a checkpoint's folder, a run's directory, or its folder of checkpoints."""

from pathlib import Path

from hpczero.checkpoint import directory, manifest
from hpczero.checkpoint.files import not_read
from hpczero.errors import InputError
from hpczero.text import printable

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
        raise InputError(f"{said} {'is no folder' if path.exists() else 'does not exist'}: name a checkpoint's folder or a run's directory")
    if (path / manifest.NAME).is_file():
        if step is not None and directory.step_of(path) != step:
            raise InputError(f"--step {step}: {said} is a checkpoint itself; name its run's directory to choose a step")
        return path
    if directory.step_of(path) is not None:
        raise InputError(f"{said} has no {manifest.NAME}: it is what a save left that did not come to its end")
    complete = directory.steps(checkpoints_of(path))
    if not complete:
        raise InputError(f"{said} has no complete checkpoint")
    if step is not None and step not in complete:
        there = ", ".join(map(str, list(complete)[:_SHOWN])) + (", …" if len(complete) > _SHOWN else "")
        raise InputError(f"--step {step}: {said} has no complete checkpoint of that step; there are {there}")
    if step is not None:
        if directory.misnamed(complete[step]):
            raise InputError(f"--step {step}: what has that name in {said} is of another step")
        return complete[step]
    named_well = (path for path in complete.values() if not directory.misnamed(path))
    return next(named_well, complete[next(iter(complete))])


def checkpoints_of(path: Path) -> Path:
    """Of a run's directory the folder of its checkpoints; any other folder is taken for one itself."""
    return path / "checkpoints" if (path / "checkpoints").is_dir() else path


def folders_of_checkpoints(path: Path) -> list[Path]:
    """Those that a path leads to: of a run, or of all runs in an output folder."""
    if not path.is_dir():
        raise InputError(f"{printable(str(path))} {'is no folder' if path.exists() else 'does not exist'}")
    try:
        own = checkpoints_of(path)
        if own != path or directory.holds_any(path):
            return [own]
        return sorted(run / "checkpoints" for run in path.iterdir() if (run / "checkpoints").is_dir())
    except OSError as error:
        raise InputError(f"{printable(str(error.filename or path))}: {error.strerror}") from error
