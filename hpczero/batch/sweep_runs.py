"""The runs of a sweep by their folders, what differs in them, and how they are in sum.

A sweep's folder `<output>/<name>` is no run: it holds the runs' folders `<name>-...`.
"""

import re
import shlex
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from hpczero.batch import submission
from hpczero.batch.run_status import Progress
from hpczero.errors import InputError
from hpczero.spec.load import load
from hpczero.spec.schema import Spec
from hpczero.text import printable

_STARTED = ("events.jsonl", "metrics.jsonl", "checkpoints")  # beside spec.toml
_PROBE = re.compile(r"\.probe-[0-9]{8}T[0-9]{6}$")
_LONGEST = 300  # characters of a line


def is_run(path: Path, names: Sequence[str]) -> bool:
    """Return True for a folder with files of a run, or of a submission; `names`: what it holds."""
    if "spec.toml" in names and any(name in names for name in _STARTED):
        return True
    return "batch" in names and bool(submission.of_run(path))


def runs_in(folder: Path) -> list[Path]:
    """Return the runs of the sweep that has this folder; none if it is something else.

    Probes are no runs of it. No link is followed.
    """
    try:
        if is_run(folder, [path.name for path in folder.iterdir()]):
            return []
        inside = sorted(path for path in folder.glob(f"{_literal(folder.absolute().name)}-*"))
        return [
            path
            for path in inside
            if not path.is_symlink()
            and path.is_dir()
            and not _PROBE.search(path.name)
            and is_run(path, [inner.name for inner in path.iterdir()])
        ]
    except OSError:
        return []


def _literal(name: str) -> str:
    return re.sub(r"([*?[])", r"[\1]", name)


def specs_of(runs: Sequence[Path]) -> dict[str, Spec]:
    """Return name -> spec of the runs that have one that can be read (`spec.sweep.differing`)."""
    specs = {}
    for run in runs:
        for path in [run / "spec.toml", *(one.path / "spec.toml" for one in _newest_first(run))]:
            try:
                specs[run.name] = load(path).spec
                break
            except InputError:
                continue
    return specs


def _newest_first(run: Path) -> list[submission.Submission]:
    return submission.of_run(run)[::-1]


def in_sum(states: Sequence[Progress], folder: Path, spec: str) -> list[str]:
    """Return how many runs are in each state, and why some failed and how they are submitted again.

    `spec`: the sweep's file, if it was named.
    """
    counts = Counter(progress.state for progress in states)
    words = ", ".join(f"{count} {state}" for state, count in counts.most_common())
    lines = [f"{len(states)} runs in {printable(str(folder))}: {words}"]
    for progress in states:
        if progress.state == "failed":
            lines += _failed(progress, folder, spec)
    return lines


def _failed(progress: Progress, folder: Path, spec: str) -> Iterator[str]:
    name = progress.run.name
    yield f"{printable(name)} failed: {printable(progress.reason, _LONGEST)}"
    if progress.last_lines:
        yield f"  the last line of its log: {printable(progress.last_lines[-1].strip(), _LONGEST)}"
    words = ["hpczero", "submit", spec, "--set", f"sweep.run={name[len(folder.name) + 1 :]}"]
    if not spec:
        records = _newest_first(progress.run)
        verb = "submit" if records else "run"
        words = ["hpczero", verb, str((records[0].path if records else progress.run) / "spec.toml")]
    yield f"  again: {printable(shlex.join(words), 2000)}"
