"""Seconds of every rank, a row for some steps at a time: the files `<run>/rank_times/*.bin`.

Each job of a run writes a file of its own, numbered. It begins with a head (`_HEAD`). A row is the
first and the last of its steps, and for each rank the sums of `FIELDS` over these steps (float32).
A row that is half written, or of steps that a later job computed again, does not count.
"""

import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hpczero import safe_files
from hpczero.runs.columns import Numbers

FOLDER = "rank_times"
# Seconds of all steps in a row:
#   wait         for other ranks
#   save         after the steps, for its own data to be written
#   processor    of the main thread, but for its waits
#   taken        the main thread could have run, and another one had its processor
#   paged        of steps in which pages came from a disk: those it did not compute, nor was `taken`
#   helpers      its other threads could have run, and another one had their processor
# and no sums: its pipeline stage, and the samples that it has in a step.
FIELDS = (
    "step",
    "compute",
    "wait",
    "data",
    "save",
    "processor",
    "taken",
    "paged",
    "helpers",
    "stage",
    "samples",
)
_MAGIC = b"HPCZRANK"
_HEAD = struct.Struct("<8sIIII40x")  # magic, version, ranks, fields, unused
_VERSION = 1
_STEPS = struct.Struct("<qq")
_MOST_RANKS = 1_000_000
_MOST_JOBS = 10_000
_MOST_BYTES = 1 << 30  # that are read of all files, the newest rows first

Rows = np.ndarray[Any, np.dtype[np.void]]


@dataclass(frozen=True)
class RankTimes:
    """Rows of one job. `of_field`: name -> seconds [rows, ranks]."""

    first: Numbers  # steps of each row
    last: Numbers
    ranks: int
    of_field: Mapping[str, Numbers]

    @property
    def steps(self) -> Numbers:
        """Return the number of steps in each row."""
        return self.last - self.first + 1

    def newest(self, rows: int) -> "RankTimes":
        """Return the last rows alone, at most so many."""
        return self.part(slice(-rows, None))

    def part(self, rows: Any) -> "RankTimes":
        fields = {name: values[rows] for name, values in self.of_field.items()}
        return RankTimes(self.first[rows], self.last[rows], self.ranks, fields)

    def a_step(self, field: str) -> Numbers:
        """Return the mean seconds of a step [rows, ranks]."""
        return self.of_field[field] / self.steps[:, None]


def head(ranks: int) -> bytes:
    return _HEAD.pack(_MAGIC, _VERSION, ranks, len(FIELDS), 0)


def row(first: int, last: int, of_ranks: Sequence[Sequence[float]]) -> bytes:
    """Return a row of sums, each rank's in the order of FIELDS."""
    return _STEPS.pack(first, last) + np.asarray(of_ranks, dtype="<f4").tobytes()


def next_file(run: Path) -> Path:
    """Return the path of a new job's file."""
    taken = [int(path.stem) for path in _files(run)]
    return run / FOLDER / f"{max(taken, default=0) + 1:04}.bin"


def read(run: Path, newest: int | None = None) -> list[RankTimes]:
    """Return the rows of each job that has any, without those of steps that came again later.

    Of all jobs' rows only so many are read (None: a gigabyte of them), the `newest` ones.
    """
    jobs: list[RankTimes] = []
    least = np.inf
    left = _MOST_BYTES
    for path in reversed(_files(run)):
        rows = _read(path, left, newest)
        if rows is None:
            continue
        left -= rows.nbytes
        newest = None if newest is None else newest - len(rows)
        job = _sound(rows)
        kept = job.last < least
        if kept.any():
            least = min(least, float(job.first[kept].min()))
            jobs.append(job.part(kept))
    return jobs[::-1]


def _files(run: Path) -> list[Path]:
    try:
        paths = [path for path in (run / FOLDER).iterdir() if path.suffix == ".bin"]
    except OSError:
        return []
    numbered = [path for path in paths if path.stem.isascii() and path.stem.isdigit()]
    return sorted(numbered, key=lambda path: int(path.stem))[-_MOST_JOBS:]


def _read(path: Path, most: int, newest: int | None) -> Rows | None:
    """Return the newest rows of a file, at most so many, and bytes; None if it has none."""
    try:
        with os.fdopen(safe_files.open_to_read(path), "rb") as file:
            begin = file.read(_HEAD.size)
            if len(begin) < _HEAD.size:
                return None
            magic, version, ranks, fields, _ = _HEAD.unpack(begin)
            if (magic, version, fields) != (_MAGIC, _VERSION, len(FIELDS)):
                return None
            if not 0 < ranks <= _MOST_RANKS:
                return None
            kind = np.dtype([("steps", "<i8", 2), ("seconds", "<f4", (ranks, fields))])
            rows = (os.fstat(file.fileno()).st_size - _HEAD.size) // kind.itemsize
            count = min(rows, most // kind.itemsize, rows if newest is None else newest)
            file.seek(_HEAD.size + (rows - count) * kind.itemsize)
            return np.fromfile(file, kind, count) if count > 0 else None
    except OSError:
        return None


def _sound(rows: Rows) -> RankTimes:
    """Return the rows that can be: a disk that was full, or lost its power, leaves other ones."""
    first, last = rows["steps"].T
    sound = (first >= 1) & (last >= first) & np.isfinite(rows["seconds"]).all(axis=(1, 2))
    seconds = np.maximum(rows["seconds"][sound].astype(np.float64), 0.0)
    of_field = {name: seconds[:, :, at] for at, name in enumerate(FIELDS)}
    return RankTimes(
        first[sound].astype(float), last[sound].astype(float), seconds.shape[1], of_field
    )
