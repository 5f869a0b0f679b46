"""The checkpoints of a run: <run>/checkpoints/step-00000100 and so on. A folder with a manifest is a checkpoint; one without is what a save left that
did not come to its end, and one with a longer name was set aside.
"""

import contextlib
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
    """A new folder. What is there under this name is removed if it is incomplete, and set aside if it is a checkpoint."""
    path = checkpoints / name_of(step)
    if (path / manifest.NAME).exists():
        _set_aside(path)
    elif path.exists():
        remove(path)
    path.mkdir(parents=True)
    sync(checkpoints)
    return path


def _set_aside(path: Path) -> None:
    stamp, number = datetime.now(UTC).strftime("%Y%m%dT%H%M%S"), 0
    while (aside := path.with_name(f"{path.name}.{stamp}" + (f"-{number}" if number else ""))).exists():
        number += 1
    path.rename(aside)


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
