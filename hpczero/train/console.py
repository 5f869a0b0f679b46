"""Output of a run on rank 0's stdout while it goes on: lines for files, a live panel for people.

`Lines` and `Live` take the same three calls: `event(name, **values)`, `step(step, metrics)` after
every step, and `close()`. The run directory has all that is said here (metrics.jsonl,
events.jsonl): if stdout cannot be written (a full disk, a terminal that is gone) the run goes on in
silence. A closed pipe ends the program, as it does for every command.

Whether a person sees the output is found out so: a rank's own stdout says little, for under MPICH
it is a pipe, under Open MPI a pseudo-terminal even if mpirun's output goes to a file. So the stream
is followed through the launchers that started this process: whichever holds the other end of the
pipe or pseudo-terminal passes it on to its own stdout, and so on, until no launcher takes it any
further. If it ends at a terminal, it is seen. Anything that cannot be found out counts as not seen.
"""

import fcntl
import os
import stat
import struct
import sys
import termios
import time
from collections import deque
from collections.abc import Callable
from typing import IO, TYPE_CHECKING, Protocol, TextIO, cast

import psutil

from hpczero import env
from hpczero.text import format_duration, format_loss, format_number, log_line
from hpczero.train.summary import Metrics, Pace, shares, tokens_per_second

if TYPE_CHECKING:
    from rich.panel import Panel

_LAUNCHERS = (
    "mpirun",
    "mpiexec",
    "hydra_",
    "pmi_proxy",
    "prterun",
    "prted",
    "orterun",
    "orted",
    "oshrun",
)
# Options that make a launcher write somewhere else, or put words before each line.
_REDIRECTING = (
    "-outfile",
    "-errfile",
    "-output",
    "-tag-output",
    "-timestamp-output",
    "-xterm",
    "-prepend",
)
_LABELLING = "-l"
_SECONDS_BETWEEN_UPDATES = 0.2
_STEPS_IN_AVERAGES = 20


class Output(Protocol):
    def event(self, event: str, /, **values: object) -> None: ...

    def step(self, step: int, metrics: Metrics) -> None: ...

    def close(self) -> None: ...


def choose_output(mode: str, steps: int, log_every: int, stream: TextIO | None = None) -> Output:
    """Return the output of this mode; "auto" is "live" if a person is known to see the stream."""
    stream = stream or sys.stdout
    if mode == "auto":
        mode = "live" if terminal_of(stream) else "lines"
    if mode == "live" and is_file(stream):
        lines = Lines(steps, log_every, stream)
        lines.event("WARN", what="--progress live cannot be shown in a file: lines instead")
        return lines
    if mode == "live":
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
        self._stream.write(log_line(event, values) + "\n")
        self._stream.flush()

    def step(self, step: int, metrics: Metrics) -> None:
        self._pace.step(step)
        self._recent.append(metrics)
        if step % self._log_every and step < self._pace.steps:
            return
        self.event(
            "step",
            step=f"{step}/{self._pace.steps}",
            loss=format_loss(metrics.get("loss")),
            grad_norm=format_number(metrics.get("grad_norm")),
            lr=format_number(metrics.get("lr")),
            **{"tokens/s": format_number(tokens_per_second(self._recent))},
            **{kind: f"{share:.0%}" for kind, share in shares(self._recent).items()},
            left=self._pace.left(),
        )
        self._recent.clear()

    def close(self) -> None:
        pass


class Live:
    """A panel at the bottom of the terminal, with events as lines above it.

    rich takes a moment to import, so it is imported here.
    """

    def __init__(self, steps: int, stream: TextIO) -> None:
        from rich.console import Console
        from rich.live import Live as Region

        self._terminal = terminal_of(stream)
        self._console = Console(
            file=cast(IO[str], Tolerant(stream)),
            force_terminal=True,
            no_color=env.variable("NO_COLOR") is not None,
            highlight=False,
        )
        self._pace = Pace(steps)
        self._recent: deque[Metrics] = deque(maxlen=_STEPS_IN_AVERAGES)
        self._done = 0
        self._evaluation = ""
        self._drawn = 0.0
        self._fit()
        stderr_too = self._terminal is not None and terminal_of(sys.stderr) == self._terminal
        self._region = Region(
            console=self._console,
            auto_refresh=False,
            redirect_stderr=stderr_too,
            get_renderable=self._panel,
        )
        self._region.start()
        # A job that is killed must not leave a terminal without its cursor.
        self._console.show_cursor(True)

    def event(self, event: str, /, **values: object) -> None:
        if event == "eval":
            self._evaluation = log_line(event, values).split(" ", 2)[-1]
        self._fit()
        from rich.text import Text

        style = {"WARN": "bold yellow", "stop": "bold"}.get(event, "")
        self._console.print(Text(log_line(event, values), style=style), soft_wrap=True)

    def step(self, step: int, metrics: Metrics) -> None:
        self._pace.step(step)
        self._recent.append(metrics)
        self._done = step
        now = time.monotonic()
        if now - self._drawn >= _SECONDS_BETWEEN_UPDATES or step >= self._pace.steps:
            self._drawn = now
            self._fit()
            self._region.refresh()

    def close(self) -> None:
        self._region.stop()

    def _fit(self) -> None:
        from rich.console import ConsoleDimensions

        if shape := terminal_size(self._terminal) if self._terminal else None:
            self._console.size = ConsoleDimensions(*shape)

    def _panel(self) -> "Panel":
        from rich.console import Group
        from rich.panel import Panel
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        steps = self._pace.steps
        progress = Table.grid(padding=(0, 2), expand=True)
        progress.add_column(ratio=1)
        progress.add_column(no_wrap=True)
        progress.add_column(no_wrap=True)
        left = f"{self._pace.left()} left"
        if (end := env.deadline()) is not None:
            left += f", {format_duration(max(0.0, end - time.time()))} in the job"
        progress.add_row(ProgressBar(steps, self._done), f"step {self._done}/{steps}", left)
        figures = Table.grid(padding=(0, 2))
        for name, text in self._figures().items():
            figures.add_row(Text(name, style="dim"), Text(text))
        return Panel(Group(progress, figures), padding=(0, 1))

    def _figures(self) -> dict[str, str]:
        last: Metrics = self._recent[-1] if self._recent else {}
        norm = f"gradient norm {format_number(last.get('grad_norm'))}"
        rate = f"learning rate {format_number(last.get('lr'))}"
        speed = f"{format_number(tokens_per_second(self._recent))} tokens/s"
        times = [f"{kind} {share:.0%}" for kind, share in shares(self._recent).items()]
        figures = {
            "loss": f"{format_loss(last.get('loss'))}   {norm}   {rate}",
            "speed": f"{speed}   {format_number(last.get('step_seconds'))} s a step",
            "time in": "   ".join(times) or "?",
        }
        return figures | ({"evaluation": self._evaluation} if self._evaluation else {})


class Tolerant:
    """A text stream that escapes characters its encoding lacks, and drops what it cannot write.

    Only a closed pipe is an error.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.encoding = stream.encoding or "utf-8"

    def write(self, text: str) -> int:
        encoded = text.encode(self.encoding, "backslashreplace").decode(self.encoding)
        self._attempt(lambda: self._stream.write(encoded))
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


# -- who sees the output


def terminal_of(stream: TextIO) -> str | None:
    """Return the path of the terminal that shows `stream` (stdout or stderr), or None."""
    if env.variable("TERM") in (None, "dumb"):
        return None
    try:
        channel = stream.fileno()
        passed_on = 2 if channel == 2 else 1
        process, end = psutil.Process(), os.readlink(f"/proc/self/fd/{channel}")
        while (reader := _reader(process, end)) is not None:
            if _redirects(reader.cmdline()):
                return None
            process, end = reader, os.readlink(f"/proc/{reader.pid}/fd/{passed_on}")
        return end if _is_terminal(end) else None
    except (OSError, ValueError, psutil.Error):
        return None


def is_file(stream: TextIO) -> bool:
    try:
        return stat.S_ISREG(os.fstat(stream.fileno()).st_mode)
    except (OSError, ValueError):
        return False


def terminal_size(path: str) -> tuple[int, int] | None:
    """Return the columns and rows of the terminal `path`, or None."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOCTTY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            answer = fcntl.ioctl(descriptor, termios.TIOCGWINSZ, bytes(8))
            rows, columns, _, _ = struct.unpack("4H", answer)
        finally:
            os.close(descriptor)
    except OSError:
        return None
    return (columns, rows) if columns and rows else None


def _reader(process: psutil.Process, end: str) -> psutil.Process | None:
    """Return the launcher among the ancestors of `process` that reads what `end` is given."""
    for ancestor in process.parents():
        if ancestor.name().startswith(_LAUNCHERS) and _holds_other_side(ancestor.pid, end):
            return ancestor
    return None


def _holds_other_side(pid: int, end: str) -> bool:
    for descriptor in os.listdir(f"/proc/{pid}/fd"):
        try:
            link = os.readlink(f"/proc/{pid}/fd/{descriptor}")
            if end.startswith("/dev/pts/"):
                index = end.removeprefix("/dev/pts/")
                if link.endswith("ptmx") and _terminal_index(pid, descriptor) == index:
                    return True
            elif link == end and not end.startswith("/"):  # a pipe; a socket's sides have two names
                return True
        except FileNotFoundError:  # closed since
            continue
    return False


def _terminal_index(pid: int, descriptor: str) -> str | None:
    """Return the index in /dev/pts that a pseudo-terminal's master side belongs to (Linux 4.14)."""
    with open(f"/proc/{pid}/fdinfo/{descriptor}", encoding="ascii") as lines:
        return next((line.split()[1] for line in lines if line.startswith("tty-index:")), None)


def _redirects(command: list[str]) -> bool:
    return any(
        word == _LABELLING or word.replace("--", "-", 1).startswith(_REDIRECTING)
        for word in command
    )


def _is_terminal(path: str) -> bool:
    if not path.startswith("/dev/"):
        return False
    descriptor = os.open(path, os.O_WRONLY | os.O_NOCTTY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        return os.isatty(descriptor)
    finally:
        os.close(descriptor)
