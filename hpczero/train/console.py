"""What a run says while it goes on (rank 0 only): `Lines` for files and logs, `Live` for people at a terminal.

Both take the same three calls: `event(name, **values)`, `step(step, metrics)` after every step, `close()`.
Everything said here is in the run directory too (metrics.jsonl, events.jsonl): where the reader cannot take it (a full disk, a terminal
that is gone) the run goes on unheard. A closed pipe ends the program, as it does for every command.
"""

import sys
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from datetime import UTC, datetime
from typing import Any, Protocol, TextIO

from hpczero.train import terminal

# step, loss, grad_norm, lr, tokens, step_seconds, tokens_per_second, data_seconds, comm_seconds, compute_seconds
Metrics = Mapping[str, Any]


class Output(Protocol):
    def event(self, event: str, /, **values: object) -> None: ...

    def step(self, step: int, metrics: Metrics) -> None: ...

    def close(self) -> None: ...


def choose(mode: str, steps: int, log_every: int, stream: TextIO | None = None) -> Output:
    """`mode`: "live", "lines", or "auto": live where a person can see it, lines wherever that cannot be found out."""
    stream = stream or sys.stdout
    if mode == "auto":
        mode = "live" if terminal.find(stream) else "lines"
    if mode == "live" and terminal.is_file(stream):
        lines = Lines(steps, log_every, stream)
        lines.event("WARN", what="--progress live cannot be shown in a file: lines instead")
        return lines
    if mode == "live":
        from hpczero.train.live import Live  # rich takes a moment to import

        return Live(steps, stream)
    return Lines(steps, log_every, stream)


class Lines:
    """`<UTC time> <event> key=value ...`: flushed, no control codes, greppable."""

    def __init__(self, steps: int, log_every: int, stream: TextIO) -> None:
        self._log_every = log_every
        self._stream = Tolerant(stream)
        self._pace = Pace(steps)
        self._recent: deque[Metrics] = deque(maxlen=1000)  # the steps since the last line

    def event(self, event: str, /, **values: object) -> None:
        self._stream.write(line(event, values) + "\n")
        self._stream.flush()

    def step(self, step: int, metrics: Metrics) -> None:
        self._pace.step(step)
        self._recent.append(metrics)
        if step % self._log_every and step < self._pace.steps:
            return
        figures = {"loss": loss(metrics.get("loss")), "grad_norm": number(metrics.get("grad_norm")), "lr": number(metrics.get("lr"))}
        speed = {"tokens/s": number(tokens_per_second(self._recent))}
        times = {kind: f"{share:.0%}" for kind, share in shares(self._recent).items()}
        values = {"step": f"{step}/{self._pace.steps}", **figures, **speed, **times, "left": self._pace.left()}
        self._stream.write(line("step", values) + "\n")
        self._stream.flush()
        self._recent.clear()

    def close(self) -> None:
        pass


def tokens_per_second(steps: Collection[Metrics]) -> float | None:
    seconds = _sum(steps, "step_seconds")
    return _sum(steps, "tokens") / seconds if seconds > 0 else None


def shares(steps: Collection[Metrics]) -> dict[str, float]:
    """Where the steps' time went: shares of compute, communication, data, and the rest."""
    seconds = _sum(steps, "step_seconds")
    if seconds <= 0:
        return {}
    parts = {"compute": "compute_seconds", "communication": "comm_seconds", "data": "data_seconds"}
    known = {kind: _sum(steps, key) / seconds for kind, key in parts.items()}
    return known | {"other": max(0.0, 1.0 - sum(known.values()))}


def _sum(steps: Collection[Metrics], key: str) -> float:
    return sum(float(metrics.get(key) or 0.0) for metrics in steps)


class Pace:
    """Time left, from the pace of the last steps: by the clock, so that evaluations and checkpoints count."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self._seen: deque[tuple[float, int]] = deque(maxlen=200)

    def step(self, step: int, now: float | None = None) -> None:
        self._seen.append((time.monotonic() if now is None else now, step))

    def left(self) -> str:
        """h:mm:ss, or "?" as long as nothing can be said."""
        if len(self._seen) < 2:
            return "?"
        (first, begin), (last, end) = self._seen[0], self._seen[-1]
        return duration((last - first) / (end - begin) * max(0, self.steps - end)) if end > begin else "?"


def line(event: str, values: Mapping[str, object]) -> str:
    stamp = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return " ".join([stamp, event, *(f"{key}={value(item)}" for key, item in values.items())])


def value(item: object) -> str:
    """A value on one line: quoted where it holds spaces or quotes, everything unprintable escaped."""
    if isinstance(item, bool) or item is None:
        return str(item).lower()
    if isinstance(item, float):
        return f"{item:.5g}"
    if isinstance(item, Mapping):
        item = ",".join(f"{key}:{entry}" for key, entry in item.items())
    elif isinstance(item, (list, tuple)):
        item = ",".join(map(str, item))
    text = "".join(_printable(character) for character in str(item))
    if text and not any(character in text for character in ' "='):
        return text
    return '"' + text.replace('"', '\\"') + '"'


def _printable(character: str) -> str:
    if character == "\\":
        return "\\\\"
    if character.isprintable():
        return character
    return character.encode("unicode_escape", "surrogatepass").decode("ascii")


def loss(figure: float | None) -> str:
    return "?" if figure is None else f"{figure:.4f}"


def number(figure: float | None) -> str:
    """Three significant digits, as people read them: 0.0123, 4.57, 18.2k, 1.20M; small ones as 3.00e-04."""
    if figure is None:
        return "?"
    size = abs(figure)
    if size != size or size == float("inf"):
        return str(figure)
    if 0 < size < 1e-2:
        return f"{figure:.2e}"
    for limit, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if size >= limit * 0.9995:
            return _three_digits(figure / limit) + unit
    return _three_digits(figure)


def _three_digits(figure: float) -> str:
    size = abs(figure)
    digits = 0 if size >= 99.95 else 1 if size >= 9.995 else 2 if size >= 0.9995 else 3 if size >= 0.09995 or not size else 4
    return f"{figure:.{digits}f}"


def duration(seconds: float) -> str:
    """h:mm:ss"""
    whole = round(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"


class Tolerant:
    """A text stream that escapes what its encoding lacks, and that goes silent, instead of failing, when it cannot be written."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.encoding = stream.encoding or "utf-8"

    def write(self, text: str) -> int:
        self._attempt(lambda: self._stream.write(text.encode(self.encoding, "backslashreplace").decode(self.encoding)))
        return len(text)

    def flush(self) -> None:
        self._attempt(self._stream.flush)

    def isatty(self) -> bool:
        return self._stream.isatty()

    def fileno(self) -> int:
        return self._stream.fileno()

    def _attempt(self, action: Callable[[], object]) -> None:
        try:
            action()
        except BrokenPipeError:
            raise
        except OSError:
            pass
