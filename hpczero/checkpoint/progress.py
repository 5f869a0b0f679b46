"""How far long work is: a bar on a terminal, nothing elsewhere."""

import contextlib
import sys
from collections.abc import Callable, Iterator
from functools import partial

Advance = Callable[[int], None]  # so many more bytes are done


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
        yield partial(progress.advance, progress.add_task(doing, total=total))
