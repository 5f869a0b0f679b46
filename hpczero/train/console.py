"""The progress of a run on rank 0's stdout: `Lines` for files and logs, `Live` at a terminal.

Both take the same three calls: `event(name, **values)`, `step(step, metrics)` after every step, and
`close()`. The run directory has all that is said here (metrics.jsonl, events.jsonl): if stdout
cannot be written (a full disk, a terminal that is gone) the run goes on in silence. A closed pipe
ends the program, as it does for every command.
"""

import sys
from collections import deque
from typing import Protocol, TextIO

from hpczero.text import line, loss, number
from hpczero.train import terminal
from hpczero.train.summary import Metrics, Pace, shares, tokens_per_second
from hpczero.train.terminal import Tolerant


class Output(Protocol):
    def event(self, event: str, /, **values: object) -> None: ...

    def step(self, step: int, metrics: Metrics) -> None: ...

    def close(self) -> None: ...


def choose(mode: str, steps: int, log_every: int, stream: TextIO | None = None) -> Output:
    """Return the output of this mode; "auto" is "live" if a person is known to see the stream."""
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
        self.event(
            "step",
            step=f"{step}/{self._pace.steps}",
            loss=loss(metrics.get("loss")),
            grad_norm=number(metrics.get("grad_norm")),
            lr=number(metrics.get("lr")),
            **{"tokens/s": number(tokens_per_second(self._recent))},
            **{kind: f"{share:.0%}" for kind, share in shares(self._recent).items()},
            left=self._pace.left(),
        )
        self._recent.clear()

    def close(self) -> None:
        pass
