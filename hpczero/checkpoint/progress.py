"""How far long work is: a bar on a terminal, nothing elsewhere."""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

Advance = Callable[[int], None]  # so many more bytes are done
_BETWEEN = 0.1  # seconds


@contextlib.contextmanager
def bar(doing: str, total: int, shown: bool = True) -> Iterator[Advance]:
    """On standard error, so that what a verb prints can be piped on."""
    if not shown or not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        yield _Bar(progress, progress.add_task(doing, total=total)).advance


class _Bar:
    def __init__(self, progress: Any, task: Any) -> None:
        self._progress, self._task, self._done, self._shown = progress, task, 0, 0.0

    def advance(self, count: int) -> None:
        self._done += count
        now = time.monotonic()
        if now - self._shown > _BETWEEN:
            self._progress.update(self._task, completed=self._done)
            self._shown = now
