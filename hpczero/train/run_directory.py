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
import os
import sys
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

from hpczero import env, safe_files
from hpczero.errors import HpczeroError, InputError
from hpczero.lock import RunLock
from hpczero.safe_files import written_durably
from hpczero.spec.load import differences, load, to_toml
from hpczero.spec.schema import Spec
from hpczero.train.summary import Earlier


def path_of(spec: Spec) -> Path:
    return Path(env.expand(spec.output)).absolute() / spec.name


_LEFTOVERS = {"lock", "spec.toml.new", "batch"}  # of a start that ended before it wrote the spec
_OF_A_RUN = _LEFTOVERS | {
    *("spec.toml", "metrics.jsonl", "events.jsonl", "summary.json", "trace.json.gz"),
    *("checkpoints", "watch", "stop"),
}
_LOOKS_EVERY = 5.0  # seconds between two looks whether the folder is still there


class RunDirectory:
    """`claim` takes the directory; the other methods write into it.

    A folder that is removed under the run is made again, with the spec: what is saved from then on
    is a run's, and the command that started it goes on from there.
    """

    def __init__(self, path: Path, lock: RunLock, spec: str) -> None:
        self.path, self._lock, self._spec = path, lock, spec
        self._looked = time.monotonic()
        self._open()

    def _open(self) -> None:
        self._metrics: TextIO = safe_files.append_to(self.path / "metrics.jsonl")
        self._events: TextIO = safe_files.append_to(self.path / "events.jsonl")
        if _is_cut_short(self.path / "events.jsonl"):
            self._events.write("\n")

    @classmethod
    def claim(cls, spec: Spec, resume: bool, fresh: bool) -> "RunDirectory":
        """Checks first and writes last: with an InputError nothing has changed."""
        path = path_of(spec)
        exists = _exists(path / "spec.toml")
        if resume and not exists and not _exists(path / "checkpoints"):
            raise InputError(
                f"--resume: there is no run in {path}; leave --resume out to start one"
            )
        new = not _exists(path)
        if not new and not exists:
            _refuse_strangers(path, spec, fresh)
        if exists and not fresh:
            _same_run(path, spec)
        try:
            safe_files.own_folder(path)
        except OSError as error:
            raise InputError(
                f"cannot create the run directory {path}: {error.strerror}; set output to a folder that you may write in"
            ) from error
        lock = RunLock(path)
        try:
            lock.take_in_job()
            exists = _exists(path / "spec.toml")  # its holder may have written it meanwhile
            if exists and not fresh:
                _same_run(path, spec)
            if fresh and (exists or not _only_leftovers(path)):
                lock = _move_aside(path, lock)
            text = to_toml(spec)
            with written_durably(path / "spec.toml") as file:
                file.write(text.encode())
            for leftover in ("stop", "summary.json"):
                safe_files.remove(path / leftover)
            return cls(path, lock, text)
        except (OSError, InputError) as error:
            lock.release()
            if new:
                with contextlib.suppress(OSError):  # another writer's by now
                    safe_files.remove_empty(path)
            if isinstance(error, InputError):
                raise
            raise InputError(
                f"cannot write in the run directory {path}: {error.strerror}"
            ) from error

    def keep_metrics_before(self, step: int) -> Earlier:
        """Drops the lines of steps that are going to be computed again; what the others say."""
        self._metrics.close()
        path = self.path / "metrics.jsonl"
        kept = [
            line
            for line in path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
            if _step_of(line) < step
        ]
        with written_durably(path) as file:
            file.write("".join(kept).encode())
        self._metrics = safe_files.append_to(path)
        return Earlier.of(kept)

    def metrics(self, values: Mapping[str, Any]) -> None:
        """A line, with the time at which it is written."""
        if time.monotonic() - self._looked > _LOOKS_EVERY:
            self._stay()
        _append(self._metrics, {"time": _now(), **values})
        self._lock.beat()

    def event(self, name: str, **values: Any) -> None:
        self._stay()
        _append(self._events, {"time": _now(), "event": name, **values})

    def sync(self) -> None:
        """Bring the lines to the disk, so that a checkpoint is not all that a power cut leaves."""
        for file in (self._metrics, self._events):
            try:
                os.fsync(file.fileno())
            except OSError as error:
                raise HpczeroError(f"cannot write {file.name}: {error.strerror}") from error

    def missing_before(self, step: int) -> str:
        """Return which of the last steps before this one have no line; "" if none is missing."""
        text = (self.path / "metrics.jsonl").read_text(encoding="utf-8", errors="replace")
        known = (found for line in text.splitlines() if (found := _step_of(line)) < step)
        last = int(max(known, default=0))
        if last >= step - 1:
            return ""
        return (
            f"metrics.jsonl lacks steps {last + 1} to {step - 1}, which the checkpoint has: "
            "their lines were not yet on the disk when the computer went down, or were removed"
        )

    def _stay(self) -> None:
        """Make the folder again if it was removed."""
        self._looked = time.monotonic()
        files = (self._metrics, self._events)
        if all(_leads_to(Path(file.name), file) for file in files):
            return
        try:
            safe_files.own_folder(self.path)
            for file in files:
                file.close()
            with written_durably(self.path / "spec.toml") as written:
                written.write(self._spec.encode())
            self._open()
        except OSError as error:
            what = f"{self.path} was removed under this run, and cannot be made again"
            raise HpczeroError(f"{what}: {error.strerror}") from error
        what = f"{self.path} was removed under this run, or a part of it: it is made again"
        print(f"hpczero: WARN {what}", file=sys.stderr, flush=True)
        _append(self._events, {"time": _now(), "event": "WARN", "what": what})

    def summary(self, values: Mapping[str, Any]) -> None:
        path = self.path / "summary.json"
        try:
            with written_durably(path) as file:
                file.write((json.dumps(_finite(values), indent=2) + "\n").encode())
        except OSError as error:
            raise HpczeroError(f"cannot write {path}: {error.strerror}") from error

    def close(self) -> None:
        for file in (self._metrics, self._events):
            with contextlib.suppress(
                OSError
            ):  # every line was flushed: this one could not be written, and that has been said
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
        case {"state": "finished", "steps": int(steps), "final_loss": float() | None} if (
            steps >= spec.train.steps
        ):
            return summary
    return None


def refuse_another(spec: Spec) -> None:
    """InputError if it is another run that is there, or something else; nothing is written."""
    path = path_of(spec)
    if _exists(path / "spec.toml"):
        _same_run(path, spec)
    elif _exists(path):
        _refuse_strangers(path, spec, fresh=False)


def _no_run_directory(path: Path) -> InputError:
    return InputError(
        f"{path} exists and is no run directory: give the run another name or output, or move it away"
    )


def _finite(value: Any) -> Any:
    """As JSON can say it: what is not a finite number becomes null."""
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


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
        raise InputError(
            f"cannot look into the run directory {path}: {error.strerror}; set output to a folder that you may write in"
        ) from error


def _only_leftovers(path: Path) -> bool:
    """A start that ended between making the folder and writing the spec leaves these; `batch` is there before a submitted run begins."""
    return path.is_dir() and {entry.name for entry in path.iterdir()} <= _LEFTOVERS


def _refuse_strangers(path: Path, spec: Spec, fresh: bool) -> None:
    """InputError unless the folder, which has no spec, was a run's, and this one may go on in it.

    An import that was killed before its last action leaves such a folder, and so does a run whose
    folder was removed while it saved. What their checkpoints say of the run counts.
    """
    if _only_leftovers(path):
        return
    if not path.is_dir() or not {entry.name for entry in path.iterdir()} <= _OF_A_RUN:
        raise _no_run_directory(path)
    if fresh:
        return
    from hpczero.checkpoint import directory, manifest
    from hpczero.checkpoint.shard_file import Damaged

    for found in directory.steps(path / "checkpoints").values():
        try:
            written = manifest.read(found).spec
        except Damaged:
            continue
        try:
            old = Spec.model_validate_json(json.dumps(written))
        except ValueError:
            raise _no_run_directory(path) from None
        _refuse_difference(path, old.model_copy(update={"name": spec.name}), spec)
        return
    raise InputError(
        f"{path} has no spec.toml and no checkpoint that is complete: an import or a run left it "
        "that did not come to its end; give the same import again, or start anew with --fresh"
    )


def _same_run(path: Path, spec: Spec) -> Spec:
    """What it was started with before."""
    old = load(path / "spec.toml").spec
    _refuse_difference(path, old, spec)
    return old


def _refuse_difference(path: Path, old: Spec, spec: Spec) -> None:
    other = [difference for difference in differences(old, spec) if difference.role == "identity"]
    if other:
        shown = "".join(f"\n  {difference}" for difference in other)
        raise InputError(
            f"{path} holds another run:{shown}\ngive this run another name, or use --fresh to move that one aside"
        )


def _move_aside(path: Path, lock: RunLock) -> RunLock:
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%S")
    aside = _free_name(
        lambda number: path.with_name(f"{path.name}.{stamp}" + (f"-{number}" if number else ""))
    )
    lock.release()
    safe_files.rename(path, aside)
    safe_files.make_folder(path)
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


def _leads_to(path: Path, file: TextIO) -> bool:
    try:
        return os.path.samestat(os.stat(path, follow_symlinks=False), os.fstat(file.fileno()))
    except OSError:
        return False


def _is_cut_short(path: Path) -> bool:
    """Return True if the last line has no end: the next one would become a part of it."""
    with path.open("rb") as file:
        end = file.seek(0, os.SEEK_END)
        file.seek(max(0, end - 1))
        return file.read(1) not in (b"", b"\n")
