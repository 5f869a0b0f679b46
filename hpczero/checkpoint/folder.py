"""The checkpoints of a run: <run>/checkpoints/step-00000100 and so on. A folder with a manifest is a checkpoint; one without is what a save left that
did not come to its end, and one with a longer name was set aside.
"""

import contextlib
import os
import re
import shutil
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from hpczero.checkpoint import manifest
from hpczero.checkpoint.files import sync

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


def aside(checkpoints: Path) -> list[Path]:
    """Those that were set aside."""
    return [path for _, path in _folders(checkpoints, _ASIDE)]


def step_of(path: Path) -> int | None:
    """The step that a folder's name says, also of one that was set aside; None: it is no name of a checkpoint."""
    match = _STEP.fullmatch(path.absolute().name) or _ASIDE.fullmatch(path.absolute().name)
    return int(match.group(1)) if match else None


def holds_any(checkpoints: Path) -> bool:
    return bool(_folders(checkpoints) or _folders(checkpoints, _ASIDE))


def begin(checkpoints: Path, step: int) -> Path:
    """A new folder, on the disk. What is there under this name is removed or set aside."""
    if not checkpoints.is_dir():
        checkpoints.mkdir(parents=True)
        sync(checkpoints.parent)
    path = checkpoints / name_of(step)
    _clear(path)
    path.mkdir()
    sync(checkpoints)
    return path


def make_way(checkpoints: Path, step: int, origin: Path | None) -> list[Path]:
    """For a run that has `step` steps behind it, and begins from `origin`: whatever else could be taken for what it is going to save is set
    aside, and what saves left that did not come to their end is removed. What was set aside.
    """
    newer = [path for at, path in steps(checkpoints).items() if at >= step and not (origin and path.samefile(origin))]
    moved = [aside for path in incomplete(checkpoints) + newer if (aside := _clear(path))]
    if moved:
        sync(checkpoints)
    return moved


def _clear(path: Path) -> Path | None:
    """The name becomes free: what is incomplete is removed; a checkpoint, or what no save makes, is set aside and gets the name returned."""
    if path.is_dir() and not (path / manifest.NAME).exists():
        remove(path)
    return _set_aside(path) if os.path.lexists(path) else None


def _set_aside(path: Path) -> Path:
    stamp, number = datetime.now(UTC).strftime("%Y%m%dT%H%M%S"), 0
    while os.path.lexists(aside := path.with_name(f"{path.name}.{stamp}" + (f"-{number}" if number else ""))):
        number += 1
    return path.rename(aside)


def remove(path: Path) -> None:
    """The manifest first: a checkpoint is whole or is none. Files that no save makes are left, with their folder."""
    with contextlib.suppress(FileNotFoundError):
        (path / manifest.NAME).unlink()
        sync(path)
    for entry in list(path.iterdir()):
        if _FILES.fullmatch(entry.name):
            entry.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        path.rmdir()


def to_prune(complete: Sequence[int], keep: int, keep_every: int) -> list[int]:
    """Steps that are not among the newest `keep` (0: all are kept), and that `keep_every` does not divide (0: it divides none)."""
    old = sorted(complete, reverse=True)[keep:] if keep else []
    return [step for step in old if not (keep_every and step % keep_every == 0)]


def free_bytes(folder: Path) -> int:
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


def _folders(checkpoints: Path, name: re.Pattern[str] = _STEP) -> list[tuple[int, Path]]:
    if not checkpoints.is_dir():
        return []
    found = sorted((path.name, path) for path in checkpoints.iterdir())
    return [(int(match.group(1)), path) for text, path in found if (match := name.fullmatch(text)) and path.is_dir()]
