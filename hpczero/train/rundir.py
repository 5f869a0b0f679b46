"""The run directory `<output>/<name>` (design 5): who may write there, and what is written. Rank 0 only.

    spec.toml      the resolved spec
    metrics.jsonl  a line a step
    events.jsonl   start, resume, signal, skip, stop, ...
    summary.json   at the end
    lock           while somebody writes
"""

import json
import os
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

from hpczero import env
from hpczero.errors import InputError
from hpczero.spec.load import differences, load, to_toml
from hpczero.spec.schema import Spec
from hpczero.train.lock import RunLock


def path_of(spec: Spec) -> Path:
    return Path(env.expand(spec.output)).absolute() / spec.name


class RunDirectory:
    """`claim` takes the directory; the other methods write into it."""

    def __init__(self, path: Path, lock: RunLock) -> None:
        self.path, self._lock = path, lock
        self._metrics: TextIO = (path / "metrics.jsonl").open("a", encoding="utf-8")
        self._events: TextIO = (path / "events.jsonl").open("a", encoding="utf-8")

    @classmethod
    def claim(cls, spec: Spec, resume: bool, fresh: bool) -> "RunDirectory":
        """Checks first and writes last: with an InputError nothing has changed."""
        path = path_of(spec)
        exists = (path / "spec.toml").exists()
        if resume and not exists:
            raise InputError(f"--resume: there is no run in {path}; leave --resume out to start one")
        if path.exists() and not exists and not _only_leftovers(path):
            raise InputError(f"{path} exists and is no run directory: give the run another name or output, or move it away")
        if exists and not fresh:
            _same_run(path, spec)
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"cannot create the run directory {path}: {error.strerror}; set output to a folder that you may write in") from error
        lock = RunLock(path).take()
        if exists and fresh:
            lock = _move_aside(path, lock)
        try:
            write_whole(path / "spec.toml", to_toml(spec))
            for leftover in ("stop", "summary.json"):
                (path / leftover).unlink(missing_ok=True)
            return cls(path, lock)
        except OSError as error:
            lock.release()
            raise InputError(f"cannot write in the run directory {path}: {error.strerror}") from error

    def keep_metrics_before(self, step: int) -> None:
        """Drops the lines of steps that are going to be computed again."""
        self._metrics.close()
        path = self.path / "metrics.jsonl"
        kept = [line for line in path.read_text(encoding="utf-8").splitlines(keepends=True) if _step_of(line) < step]
        write_whole(path, "".join(kept))
        self._metrics = path.open("a", encoding="utf-8")

    def metrics(self, values: Mapping[str, Any]) -> None:
        self._metrics.write(json.dumps(values) + "\n")
        self._metrics.flush()
        self._lock.beat()

    def event(self, name: str, **values: Any) -> None:
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        self._events.write(json.dumps({"time": now, "event": name, **values}) + "\n")
        self._events.flush()

    def summary(self, values: Mapping[str, Any]) -> None:
        write_whole(self.path / "summary.json", json.dumps(values, indent=2) + "\n")

    def close(self) -> None:
        self._metrics.close()
        self._events.close()
        self._lock.release()


def finished(spec: Spec) -> dict[str, Any] | None:
    """The summary of this run if it has done all its steps; InputError if it is another run that is there."""
    path = path_of(spec)
    try:
        summary = json.loads((path / "summary.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    _same_run(path, spec)
    done = isinstance(summary, dict) and summary.get("state") == "finished" and summary.get("steps", 0) >= spec.train.steps
    return summary if done else None


def write_whole(path: Path, text: str) -> None:
    """The file has the old content or the new one, never a part."""
    temporary = path.with_name(path.name + ".new")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def _only_leftovers(path: Path) -> bool:
    """A start that ended between making the folder and writing the spec leaves these."""
    return path.is_dir() and {entry.name for entry in path.iterdir()} <= {"lock", "spec.toml.new"}


def _same_run(path: Path, spec: Spec) -> None:
    old = load(path / "spec.toml").spec
    other = [difference for difference in differences(old, spec) if difference.role == "identity"]
    if other:
        shown = "".join(f"\n  {d.key}: {d.old!r} there, {d.new!r} now" for d in other)
        raise InputError(f"{path} holds another run:{shown}\ngive this run another name, or use --fresh to move that one aside")


def _move_aside(path: Path, lock: RunLock) -> RunLock:
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%S")
    aside = _free_name(lambda number: path.with_name(f"{path.name}.{stamp}" + (f"-{number}" if number else "")))
    lock.release()
    path.rename(aside)
    path.mkdir()
    return RunLock(path).take()


def _free_name(candidate: Callable[[int], Path]) -> Path:
    number = 0
    while candidate(number).exists():
        number += 1
    return candidate(number)


def _step_of(line: str) -> float:
    """A line that was cut short by a kill counts as past the end."""
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return float("inf")
