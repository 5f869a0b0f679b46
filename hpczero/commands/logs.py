"""`hpczero logs`: print, or follow, the output of a run's newest job, or of each of a sweep."""

import codecs
import os
import sys
import time
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from hpczero.batch import run_status, submission
from hpczero.batch.submit import still_living
from hpczero.commands.jobs import run_named, submitted_runs_named
from hpczero.errors import InputError, log_for_terminal
from hpczero.safe_files import open_to_read
from hpczero.text import printable

_LOOK_EVERY = 1.0  # seconds between two looks at a log
_PIECE = 1 << 20  # bytes of a log that are printed at a time


def logs(options: Namespace) -> int:
    if options.rank is not None:
        print("\n".join(_of_rank(run_named(options.run), options.rank)))
        return 0
    wanted = submitted_runs_named(options.run)
    readers = [_Reader(run, wanted.short(run) if wanted.folder else "") for run in wanted.runs]
    if options.follow:
        return _follow(readers)
    last = _print_new(readers, None, with_messages=True)
    if last is None:
        whose = wanted.folder or wanted.runs[0]
        raise InputError(
            f"{printable(str(whose))}: no job has printed anything yet; logs -f waits for it"
        )
    return 0


def _newest_log(run: Path) -> tuple[Path, Path] | None:
    """Return the newest log of a job that found something to do, and the scheduler's message."""
    logs = []
    for record in submission.of_run(run):
        passed = {number for _, number, event, _ in record.events() if event == "passed"}
        logs += [
            (path, record.message_file(number))
            for number in record.jobs
            if number not in passed and (path := record.log(number)).is_file()
        ]
    return logs[-1] if logs else None


def _decoder() -> codecs.IncrementalDecoder:
    """Return a decoder that keeps the first bytes of a character for the next piece."""
    return codecs.getincrementaldecoder("utf-8")("replace")


def _show(path: Path, offset: int, decoder: codecs.IncrementalDecoder) -> int:
    """Print a log from a byte on, without what a terminal would act on; return its end."""
    with os.fdopen(open_to_read(path), "rb") as file:
        file.seek(offset)
        while piece := file.read(_PIECE):
            sys.stdout.write(log_for_terminal(decoder.decode(piece)))
            offset += len(piece)
    sys.stdout.flush()
    return offset


class _Reader:
    """The newest log of a run, as far as it was printed."""

    def __init__(self, run: Path, name: str) -> None:
        self.run = run
        self.name = name  # printed above its lines; "": the run is the only one
        self.path: Path | None = None
        self.message: Path | None = None
        self.begun = False
        self.offset = 0
        self.decoder = _decoder()

    def has_more(self) -> bool:
        """Look for the newest log; return True if there is more of it than was printed."""
        if newest := _newest_log(self.run):
            if newest[0] != self.path:
                self.path, self.offset, self.decoder = newest[0], 0, _decoder()
            self.message = newest[1]
        return self.path is not None and (not self.begun or self.path.stat().st_size > self.offset)

    def show(self) -> None:
        if self.path:
            self.begun = True
            self.offset = _show(self.path, self.offset, self.decoder)

    def show_message(self) -> None:
        """Print what the scheduler left if it ended the job itself."""
        if self.message and self.message.is_file():
            _show(self.message, 0, _decoder())


def _print_new(
    readers: Sequence[_Reader], last: _Reader | None, with_messages: bool = False
) -> _Reader | None:
    """Print what is new, under the run's name where another was the last; return the last one."""
    for reader in readers:
        if reader.has_more():
            if reader.name and reader is not last:
                print(f"==> {printable(reader.name)} <==")
            reader.show()
            last = reader
            if with_messages:
                reader.show_message()
    return last


def _follow(readers: Sequence[_Reader]) -> int:
    """Print the newest logs, and the next jobs' when they begin, until no job is left."""
    runs = [reader.run for reader in readers]
    last = None
    while True:
        alive = still_living(runs)
        last = _print_new(readers, last)
        if not alive:
            return 0
        time.sleep(_LOOK_EVERY)


def _of_rank(run: Path, rank: int) -> list[str]:
    """Return where the rank ran, and the lines of the newest log that name it."""
    events = run_status.lines_of(run / "events.jsonl")
    starts = [event.get("ranks") for event in events if event.get("event") == "start"]
    ranks = starts[-1] if starts and isinstance(starts[-1], list) else []
    facts = [one for one in ranks if isinstance(one, dict) and one.get("rank") == rank]
    if not facts:
        raise InputError(f"{run}: the run has not started with a rank {rank} yet")
    process, host = (printable(str(facts[0].get(name)), 100) for name in ("pid", "host"))
    lines = [f"rank {rank}: process {process} on {host}"]
    newest = _newest_log(run)
    text = newest[0].read_text(encoding="utf-8", errors="replace").split("\n") if newest else []
    return lines + [
        log_for_terminal(line)
        for line in text
        if f"rank {rank}:" in line or f"rank {rank} " in line or line.startswith(f"{rank}: ")
    ]
