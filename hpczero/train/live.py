"""The live display of a run: a panel at the bottom of the terminal, events as lines above it."""

import sys
import time
from collections import deque
from typing import IO, TextIO, cast

from rich.console import Console, ConsoleDimensions, Group
from rich.live import Live as Region
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from hpczero import env
from hpczero.text import duration, line, loss, number
from hpczero.train import terminal
from hpczero.train.summary import Metrics, Pace, shares, tokens_per_second
from hpczero.train.terminal import Tolerant

_SECONDS_BETWEEN_UPDATES = 0.2
_STEPS_IN_AVERAGES = 20


class Live:
    """An `Output` (see `hpczero.train.console`) for people at a terminal."""

    def __init__(self, steps: int, stream: TextIO) -> None:
        self._terminal = terminal.find(stream)
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
        stderr_too = self._terminal is not None and terminal.find(sys.stderr) == self._terminal
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
            self._evaluation = line(event, values).split(" ", 2)[-1]
        self._fit()
        style = {"WARN": "bold yellow", "stop": "bold"}.get(event, "")
        self._console.print(Text(line(event, values), style=style), soft_wrap=True)

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
        size = terminal.size(self._terminal) if self._terminal else None
        if size:
            self._console.size = ConsoleDimensions(*size)

    def _panel(self) -> Panel:
        steps = self._pace.steps
        progress = Table.grid(padding=(0, 2), expand=True)
        progress.add_column(ratio=1)
        progress.add_column(no_wrap=True)
        progress.add_column(no_wrap=True)
        left = f"{self._pace.left()} left"
        if (end := env.deadline()) is not None:
            left += f", {duration(max(0.0, end - time.time()))} in the job"
        progress.add_row(ProgressBar(steps, self._done), f"step {self._done}/{steps}", left)
        figures = Table.grid(padding=(0, 2))
        for name, text in self._figures().items():
            figures.add_row(Text(name, style="dim"), Text(text))
        return Panel(Group(progress, figures), padding=(0, 1))

    def _figures(self) -> dict[str, str]:
        last: Metrics = self._recent[-1] if self._recent else {}
        norm = f"gradient norm {number(last.get('grad_norm'))}"
        rate = f"learning rate {number(last.get('lr'))}"
        speed = f"{number(tokens_per_second(self._recent))} tokens/s"
        times = [f"{kind} {share:.0%}" for kind, share in shares(self._recent).items()]
        figures = {
            "loss": f"{loss(last.get('loss'))}   {norm}   {rate}",
            "speed": f"{speed}   {number(last.get('step_seconds'))} s a step",
            "time in": "   ".join(times) or "?",
        }
        return figures | ({"evaluation": self._evaluation} if self._evaluation else {})
