"""The run directory `<output>/<name>` (design 5): who may write there, and what is written. Rank 0 only.

    spec.toml      the resolved spec
    metrics.jsonl  a line a step
    events.jsonl   start, resume, signal, skip, stop, ...
    summary.json   at the end
    trace.json.gz  at the end, if asked for (`tracing`)
    lock           while somebody writes
"""

import contextlib
import json
import math
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

from hpczero import env
from hpczero.checkpoint.files import written_durably
from hpczero.errors import HpczeroError, InputError
from hpczero.lock import RunLock
from hpczero.spec.load import differences, load, to_toml
from hpczero.spec.schema import Spec


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
        exists = _exists(path / "spec.toml")
        if resume and not exists:
            raise InputError(f"--resume: there is no run in {path}; leave --resume out to start one")
        new = not _exists(path)
        if not new and not exists and not _only_leftovers(path):
            raise _no_run_directory(path)
        if exists and not fresh:
            _same_run(path, spec)
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"cannot create the run directory {path}: {error.strerror}; set output to a folder that you may write in") from error
        lock = RunLock(path)
        try:
            lock.take()
            if exists and fresh:
                lock = _move_aside(path, lock)
            with written_durably(path / "spec.toml") as file:
                file.write(to_toml(spec).encode())
            for leftover in ("stop", "summary.json"):
                (path / leftover).unlink(missing_ok=True)
            return cls(path, lock)
        except (OSError, InputError) as error:
            lock.release()
            if new:
                with contextlib.suppress(OSError):  # another writer's by now
                    path.rmdir()
            if isinstance(error, InputError):
                raise
            raise InputError(f"cannot write in the run directory {path}: {error.strerror}") from error

    def keep_metrics_before(self, step: int) -> None:
        """Drops the lines of steps that are going to be computed again."""
        self._metrics.close()
        path = self.path / "metrics.jsonl"
        kept = [line for line in path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True) if _step_of(line) < step]
        with written_durably(path) as file:
            file.write("".join(kept).encode())
        self._metrics = path.open("a", encoding="utf-8")

    def metrics(self, values: Mapping[str, Any]) -> None:
        _append(self._metrics, values)
        self._lock.beat()

    def event(self, name: str, **values: Any) -> None:
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        _append(self._events, {"time": now, "event": name, **values})

    def summary(self, values: Mapping[str, Any]) -> None:
        path = self.path / "summary.json"
        try:
            with written_durably(path) as file:
                file.write((json.dumps(_finite(values), indent=2) + "\n").encode())
        except OSError as error:
            raise HpczeroError(f"cannot write {path}: {error.strerror}") from error

    def close(self) -> None:
        for file in (self._metrics, self._events):
            with contextlib.suppress(OSError):  # every line was flushed: this one could not be written, and that has been said
                file.close()
        self._lock.release()


def finished(spec: Spec) -> dict[str, Any] | None:
    """The summary of this run if it has done all its steps, and is not to begin elsewhere now; InputError if it is another run that is there."""
    path = path_of(spec)
    if not _exists(path / "spec.toml"):
        return None
    try:
        summary = json.loads((path / "summary.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    before = _same_run(path, spec).checkpoint
    if spec.checkpoint.resume not in ("auto", before.resume):
        return None
    match summary:
        case {"state": "finished", "steps": int(steps), "final_loss": float() | None} if steps >= spec.train.steps:
            return summary
    return None


def refuse_another(spec: Spec) -> None:
    """InputError if it is another run that is there, or something else; nothing is written."""
    path = path_of(spec)
    if _exists(path / "spec.toml"):
        _same_run(path, spec)
    elif _exists(path) and not _only_leftovers(path):
        raise _no_run_directory(path)


def _no_run_directory(path: Path) -> InputError:
    return InputError(f"{path} exists and is no run directory: give the run another name or output, or move it away")


def _finite(value: Any) -> Any:
    """As JSON can say it: what is not a finite number becomes null."""
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _append(file: TextIO, values: Mapping[str, Any]) -> None:
    try:
        file.write(json.dumps(_finite(values)) + "\n")
        file.flush()
    except OSError as error:
        raise HpczeroError(f"cannot write {file.name}: {error.strerror}") from error


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError as error:
        raise InputError(f"cannot look into the run directory {path}: {error.strerror}; set output to a folder that you may write in") from error


def _only_leftovers(path: Path) -> bool:
    """A start that ended between making the folder and writing the spec leaves these; `batch` is there before a submitted run begins."""
    return path.is_dir() and {entry.name for entry in path.iterdir()} <= {"lock", "spec.toml.new", "batch"}


def _same_run(path: Path, spec: Spec) -> Spec:
    """What it was started with before."""
    old = load(path / "spec.toml").spec
    other = [difference for difference in differences(old, spec) if difference.role == "identity"]
    if other:
        shown = "".join(f"\n  {difference}" for difference in other)
        raise InputError(f"{path} holds another run:{shown}\ngive this run another name, or use --fresh to move that one aside")
    return old


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
