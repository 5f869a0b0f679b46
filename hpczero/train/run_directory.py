"""The run directory `<output>/<name>`: who may write there, and what is written. Rank 0 only.

spec.toml      the resolved spec
metrics.jsonl  a line a step
memory.jsonl   a line of each step whose memory was measured (`memory_account`)
events.jsonl   start, resume, signal, skip, stop, ...
summary.json   at the end
rank_times/    seconds of each rank (`runs.rank_times`)
energy.jsonl   joules so far (`runs.energy`)
trace.json.gz  at the end, if asked for (`tracing`)
tensorboard, wandb, mlflow   of the trackers that get the same lines (`track`)
lock           while a run writes
"""

import contextlib
import json
import math
import os
import sys
import time
from collections import deque
from collections.abc import Mapping
from datetime import UTC, datetime
from itertools import chain, count
from pathlib import Path
from typing import Any, TextIO

from hpczero import env, safe_files
from hpczero.errors import HpczeroError, InputError
from hpczero.lock import RunLock
from hpczero.safe_files import written_durably
from hpczero.spec.load import differences, load, to_toml
from hpczero.spec.schema import Spec
from hpczero.track.tracking import Tracking
from hpczero.train.summary import Earlier

_LEFTOVERS = {"lock", "spec.toml.new", "batch"}  # of a start that ended before it wrote the spec
_OF_A_RUN = _LEFTOVERS | {
    *("spec.toml", "metrics.jsonl", "memory.jsonl", "events.jsonl", "summary.json"),
    *("trace.json.gz", "checkpoints", "watch", "stop", "rank_times", "energy.jsonl"),
    *("tensorboard", "wandb", "mlflow"),
}
_KEPT = 10_000
_LOOK_EVERY = 5.0  # seconds between two looks whether the folder is still there


def path_of(spec: Spec) -> Path:
    return Path(env.expand(spec.output)).absolute() / spec.name


class RunDirectory:
    """`claim` takes the directory; the other methods write into it.

    A folder that is removed under the run is made again, with the spec: the checkpoints saved from
    then on belong to a run, which the same command resumes.
    """

    def __init__(self, path: Path, lock: RunLock, spec: Spec) -> None:
        self.path = path
        self._lock = lock
        self._spec = to_toml(spec)
        self._looked = time.monotonic()
        self.fullest: dict[str, Any] | None = None  # the line of memory with the most held
        self.step_seconds = deque[float](maxlen=_KEPT)  # of this job's last steps
        self._open()
        self._tracking = Tracking(spec, path)

    def _open(self) -> None:
        self._metrics: TextIO = safe_files.append_to(self.path / "metrics.jsonl")
        self._memory: TextIO = safe_files.append_to(self.path / "memory.jsonl")
        self._events: TextIO = safe_files.append_to(self.path / "events.jsonl")
        if _is_cut_short(self.path / "events.jsonl"):
            self._events.write("\n")

    @property
    def _files(self) -> tuple[TextIO, ...]:
        return self._metrics, self._memory, self._events

    @classmethod
    def claim(cls, spec: Spec, resume: bool, fresh: bool) -> "RunDirectory":
        """Lock the directory and write the spec; an InputError leaves everything as it was."""
        path = path_of(spec)
        exists = _exists(path / "spec.toml")
        if resume and not exists and not _exists(path / "checkpoints"):
            advice = "leave --resume out to start one"
            raise InputError(f"--resume: there is no run in {path}; {advice}")
        new = not _exists(path)
        if not new and not exists:
            _refuse_strangers(path, spec, fresh)
        if exists and not fresh:
            _same_run(path, spec)
        try:
            safe_files.make_own_folder(path)
        except OSError as error:
            raise _no_access("create", path, error) from error
        lock = RunLock(path)
        try:
            lock.take_in_job()
            exists = _exists(path / "spec.toml")  # the lock's last holder may have written it
            if exists and not fresh:
                _same_run(path, spec)
            if fresh and (exists or not _only_leftovers(path)):
                lock = _move_aside(path, lock)
            with written_durably(path / "spec.toml") as file:
                file.write(to_toml(spec).encode())
            for leftover in ("stop", "summary.json"):
                safe_files.remove(path / leftover)
            return cls(path, lock, spec)
        except (OSError, InputError) as error:
            lock.release()
            if new:
                with contextlib.suppress(OSError):  # it may be another writer's by now
                    safe_files.remove_empty(path)
            if isinstance(error, InputError):
                raise
            what = f"cannot write in the run directory {path}: {error.strerror}"
            raise InputError(what) from error

    def keep_metrics_before(self, step: int) -> Earlier:
        """Drop the lines of steps that are computed again; return what the other lines say."""
        self._restore_if_removed()
        self._metrics.close()
        self._memory.close()
        kept, again = _keep_before(step, self.path / "metrics.jsonl")
        of_memory, _ = _keep_before(step, self.path / "memory.jsonl")
        self._metrics = safe_files.append_to(self.path / "metrics.jsonl")
        self._memory = safe_files.append_to(self.path / "memory.jsonl")
        lines = filter(is_of_memory, map(json.loads, of_memory))
        self.fullest = max(lines, key=_held, default=None)
        earlier = Earlier.of(kept, again)
        self._tracking.go_on_from(step, earlier.tokens)
        return earlier

    def metrics(self, values: Mapping[str, Any]) -> None:
        """Append a line; as every line, it has the time at which it is written."""
        if time.monotonic() - self._looked > _LOOK_EVERY:
            self._restore_if_removed()
        _append(self._metrics, values)
        if seconds := values.get("step_seconds"):
            self.step_seconds.append(seconds)
        self._tracking.add("metrics", values)
        for what in self._tracking.problems():
            self._warn(what)
        self._lock.beat()

    def memory(self, values: Mapping[str, Any]) -> None:
        """Append a line of a step's memory; its line of metrics comes next."""
        if time.monotonic() - self._looked > _LOOK_EVERY:
            self._restore_if_removed()
        _append(self._memory, values)
        self._tracking.add("memory", values)
        self.fullest = max(filter(None, (self.fullest, dict(values))), key=_held)

    def event(self, name: str, **values: Any) -> None:
        self._restore_if_removed()
        line = {"event": name, **values}
        _append(self._events, line)
        self._tracking.add("event", line)

    def _warn(self, what: str) -> None:
        print(f"hpczero: WARN {what}", file=sys.stderr, flush=True)
        self.event("WARN", what=what)

    def sync(self) -> None:
        """Bring the lines to the disk: a power cut must not leave the checkpoint alone."""
        for file in self._files:
            try:
                os.fsync(file.fileno())
            except OSError as error:
                raise HpczeroError(f"cannot write {file.name}: {error.strerror}") from error

    def missing_before(self, step: int) -> str:
        """Return which of the last steps before this one have no line; "" if none is missing."""
        text = (self.path / "metrics.jsonl").read_text(encoding="utf-8", errors="replace")
        steps = map(_step_of, text.splitlines())
        last = int(max((known for known in steps if known < step), default=0))
        if last >= step - 1:
            return ""
        return (
            f"metrics.jsonl lacks steps {last + 1} to {step - 1}, which the checkpoint has: "
            "their lines were not yet on the disk when the computer went down, or were removed"
        )

    def _restore_if_removed(self) -> None:
        self._looked = time.monotonic()
        if all(_is_open_as(Path(file.name), file) for file in self._files):
            return
        try:
            safe_files.make_own_folder(self.path)
            for file in self._files:
                file.close()
            with written_durably(self.path / "spec.toml") as written:
                written.write(self._spec.encode())
            self._open()
        except OSError as error:
            what = f"{self.path} was removed under this run, and cannot be made again"
            raise HpczeroError(f"{what}: {error.strerror}") from error
        what = f"{self.path} was removed under this run, or a part of it: it is made again"
        print(f"hpczero: WARN {what}", file=sys.stderr, flush=True)
        _append(self._events, {"event": "WARN", "what": what})

    def summary(self, values: Mapping[str, Any]) -> None:
        path = self.path / "summary.json"
        try:
            with written_durably(path) as file:
                file.write((json.dumps(_finite(values), indent=2) + "\n").encode())
        except OSError as error:
            raise HpczeroError(f"cannot write {path}: {error.strerror}") from error

    def close(self) -> None:
        for what in self._tracking.close():
            with contextlib.suppress(HpczeroError):  # the lock is given back all the same
                self._warn(what)
        for file in self._files:
            with contextlib.suppress(OSError):  # a line that could not be written was reported
                file.close()
        self._lock.release()


def finished(spec: Spec) -> dict[str, Any] | None:
    """Return the summary of this run if all its steps are done, and it is not to begin elsewhere.

    InputError if the directory holds another run.
    """
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
    """Raise InputError if the directory holds anything but this run; nothing is written."""
    path = path_of(spec)
    if _exists(path / "spec.toml"):
        _same_run(path, spec)
    elif _exists(path):
        _refuse_strangers(path, spec, fresh=False)


def _no_run_directory(path: Path) -> InputError:
    advice = "give the run another name or output, or move it away"
    return InputError(f"{path} exists and is no run directory: {advice}")


def _no_access(action: str, path: Path, error: OSError) -> InputError:
    what = f"cannot {action} the run directory {path}: {error.strerror}"
    return InputError(f"{what}; set output to a folder that you may write in")


def _finite(value: Any) -> Any:
    """Return the value as JSON can say it: NaN and infinities become null."""
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _append(file: TextIO, values: Mapping[str, Any]) -> None:
    now = datetime.now(UTC).isoformat(timespec="milliseconds")
    try:
        file.write(json.dumps(_finite({"time": now, **values})) + "\n")
        file.flush()
    except OSError as error:
        raise HpczeroError(f"cannot write {file.name}: {error.strerror}") from error


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError as error:
        raise _no_access("look into", path, error) from error


def _only_leftovers(path: Path) -> bool:
    """Return True for a run that never began.

    A start that ended before it wrote the spec leaves these; `hpczero submit` makes `batch`.
    """
    return path.is_dir() and {entry.name for entry in path.iterdir()} <= _LEFTOVERS


def _refuse_strangers(path: Path, spec: Spec, fresh: bool) -> None:
    """Raise InputError unless this run may go on in a folder that has no spec.

    An import that was killed before its last action leaves such a folder, and so does a run whose
    folder was removed while it saved. Their checkpoints have the spec.
    """
    if _only_leftovers(path):
        return
    if not path.is_dir() or not {entry.name for entry in path.iterdir()} <= _OF_A_RUN:
        raise _no_run_directory(path)
    if fresh:
        return
    from hpczero.checkpoint import directory, manifest
    from hpczero.checkpoint.shard_file import Damaged

    for checkpoint in directory.steps(path / "checkpoints").values():
        try:
            written = manifest.read(checkpoint).spec
        except Damaged:
            continue
        try:
            old = Spec.model_validate_json(json.dumps(written))
        except ValueError:
            raise _no_run_directory(path) from None
        _refuse_difference(path, old.model_copy(update={"name": spec.name}), spec)
        return
    raise InputError(
        f"{path} has no spec.toml and no complete checkpoint: an import or a run that did not come "
        "to its end left it; give the same import again, or start anew with --fresh"
    )


def _same_run(path: Path, spec: Spec) -> Spec:
    """Return the spec that the run was started with; InputError if it is another run's."""
    old = load(path / "spec.toml").spec
    _refuse_difference(path, old, spec)
    return old


def _refuse_difference(path: Path, old: Spec, spec: Spec) -> None:
    mixed = {"data.source"} if old.data.sources or spec.data.sources else set()
    other = [
        difference
        for difference in differences(old, spec)
        if difference.role == "identity" and difference.key not in mixed
    ]
    if other:
        shown = "".join(f"\n  {difference}" for difference in other)
        advice = "give this run another name, or use --fresh to move that one aside"
        raise InputError(f"{path} holds another run:{shown}\n{advice}")


def _move_aside(path: Path, lock: RunLock) -> RunLock:
    name = f"{path.name}.{datetime.now(UTC).strftime('%Y%m%dT%H%M%S')}"
    names = chain([name], (f"{name}-{number}" for number in count(1)))
    aside = next(free for free in map(path.with_name, names) if not free.exists())
    lock.release()
    safe_files.rename(path, aside)
    safe_files.make_folder(path)
    return RunLock(path).take()


def _step_of(line: str) -> float:
    """Return the step of a line of metrics; infinity if a kill has cut the line short."""
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return math.inf


def _keep_before(step: int, path: Path) -> tuple[list[str], list[str]]:
    """Keep the lines of the steps before this one; return them, and those of the other steps."""
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
    steps = list(map(_step_of, lines))
    kept = [line for line, at in zip(lines, steps, strict=True) if at < step]
    with written_durably(path) as file:
        file.write("".join(kept).encode())
    return kept, [line for line, at in zip(lines, steps, strict=True) if step <= at < math.inf]


def is_of_memory(line: Mapping[str, Any]) -> bool:
    """Return True for a line such as `RunDirectory.memory` writes: the file may have others."""
    kinds = line.get("predicted")
    sizes = [line.get("held"), *(kinds.values() if isinstance(kinds, dict) else [None])]
    return {"step", "rank", "host"} <= line.keys() and all(type(size) is int for size in sizes)


def _held(line: Mapping[str, Any]) -> int:
    held: int = line["held"]
    return held


def _is_open_as(path: Path, file: TextIO) -> bool:
    try:
        return os.path.samestat(os.stat(path, follow_symlinks=False), os.fstat(file.fileno()))
    except OSError:
        return False


def _is_cut_short(path: Path) -> bool:
    """Return True if the last line has no end: the next one would be joined to it."""
    with path.open("rb") as file:
        end = file.seek(0, os.SEEK_END)
        file.seek(max(0, end - 1))
        return file.read(1) not in (b"", b"\n")
