"""The verb `runs`: all runs below a folder, told from their files, whoever started them."""

import json
import os
import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from hpczero.batch import submission
from hpczero.batch.run_status import Progress
from hpczero.commands import jobs
from hpczero.errors import InputError
from hpczero.text import printable

_STARTED = ("events.jsonl", "metrics.jsonl", "checkpoints")  # beside spec.toml
_UNITS = (("d", 86400), ("h", 3600), ("min", 60), ("s", 1))


def runs(options: Namespace) -> int:
    folder = Path(options.folder)
    if not folder.is_dir():
        raise InputError(
            f"{printable(str(folder))} is no folder: "
            "hpczero runs FOLDER lists the runs below it (default: runs)"
        )
    unreadable: list[str] = []
    paths = sorted(below(folder.absolute(), unreadable))
    found, silent = jobs.look_at(paths)
    if options.json:
        print(json.dumps([asdict(one) | {"run": str(one.run)} for one in found], indent=2))
    else:
        print(
            "\n".join(_rows(found, folder.absolute()))
            or f"no run lies below {printable(str(folder))}"
        )
    jobs.say_silent(silent)
    for words in unreadable:
        print(f"hpczero: not looked into: {printable(words)}", file=sys.stderr)
    return 0


def below(folder: Path, unreadable: list[str]) -> Iterator[Path]:
    """Yield the folders of runs, the given one included; look neither into a run nor behind a link."""
    walk = os.walk(
        folder, onerror=lambda error: unreadable.append(f"{error.filename}: {error.strerror}")
    )
    for place, folders, files in walk:
        if is_run(Path(place), [*folders, *files]):
            folders.clear()
            yield Path(place)
        folders[:] = [name for name in folders if not name.startswith(".")]


def is_run(path: Path, names: Sequence[str]) -> bool:
    """A folder that a run has written into, or that a run was submitted in."""
    if "spec.toml" in names and any(name in names for name in _STARTED):
        return True
    return "batch" in names and bool(submission.of_run(path))


def _rows(found: Sequence[Progress], folder: Path) -> Iterator[str]:
    if not found:
        return
    head = ["run", "state", "step", "loss", "tokens/s", "left", "saved", "age"]
    rows = [head]
    for one in found:
        name = str(one.run.relative_to(folder)) if one.run != folder else one.run.name
        rows.append(
            [printable(name, 60), one.state, *jobs.figures(one), _age(one.age_seconds)]
        )
    yield from jobs.table(rows)


def _age(seconds: float | None) -> str:
    """Since it last wrote something."""
    if seconds is None:
        return "?"
    unit, length = next(((unit, length) for unit, length in _UNITS if seconds >= length), ("s", 1))
    return f"{seconds // length:.0f} {unit}"
