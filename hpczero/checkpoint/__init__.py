"""Checkpoints for readers: `hpczero.checkpoint.open(path)["/model/<name>"]` is a lazy tensor."""

from pathlib import Path
from typing import TYPE_CHECKING

from hpczero.checkpoint.shard_file import Damaged, Unreadable

if TYPE_CHECKING:
    from hpczero.checkpoint.load import Checkpoint

__all__ = ["Damaged", "Unreadable", "open"]


def open(path: str | Path, step: int | None = None) -> "Checkpoint":
    """Open a checkpoint's folder, or of a run's directory the newest complete one or `step`."""
    from hpczero.checkpoint.directory import checkpoint_at
    from hpczero.checkpoint.load import Checkpoint

    return Checkpoint.open(checkpoint_at(Path(path), step))
