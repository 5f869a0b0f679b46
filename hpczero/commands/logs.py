"""`hpczero logs`: print, or follow, the output of a run's newest job."""

import codecs
import os
import sys
import time
from argparse import Namespace
from pathlib import Path

from hpczero.batch import run_status, submission
from hpczero.batch.submit import still_living
from hpczero.commands.jobs import run_named, submitted_run_named
from hpczero.errors import InputError, log_for_terminal
from hpczero.safe_files import open_to_read
from hpczero.text import printable

_LOOK_EVERY = 1.0  # seconds between two looks at a log
_PIECE = 1 << 20  # bytes of a log that are printed at a time


def logs(options: Namespace) -> int:
    if options.rank is not None:
        print("\n".join(_of_rank(run_named(options.run), options.rank)))
        return 0
    run = submitted_run_named(options.run)
    path = _newest_log(run)
    if path is None and not options.follow:
        raise InputError(f"{run}: no job has printed anything yet; logs -f waits for it")
    return _follow(run) if options.follow else _print(path)


def _newest_log(run: Path) -> Path | None:
    """Return the newest log of a job that found something to do."""
    logs = []
    for record in submission.of_run(run):
        passed = {number for _, number, event, _ in record.events() if event == "passed"}
        logs += [
            path
            for number in record.jobs
            if number not in passed and (path := record.log(number)).is_file()
        ]
    return logs[-1] if logs else None


def _print(path: Path | None) -> int:
    """Print a log, and what PBS left if it ended the job itself."""
    message = (path, path.with_name(path.name.removeprefix("log-") + ".OU")) if path else ()
    for file in message:
        if file.is_file():
            _show(file, 0, _decoder())
    return 0


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


def _follow(run: Path) -> int:
    """Print the newest log, and the next job's when it begins, until no job is left."""
    path = None
    offset = 0
    decoder = _decoder()
    while True:
        alive = still_living(run)
        newest = _newest_log(run)
        if newest != path and newest:
            path = newest
            offset = 0
            decoder = _decoder()
        if path:
            offset = _show(path, offset, decoder)
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
    path = _newest_log(run)
    text = path.read_text(encoding="utf-8", errors="replace").split("\n") if path else []
    return lines + [
        log_for_terminal(line)
        for line in text
        if f"rank {rank}:" in line or f"rank {rank} " in line or line.startswith(f"{rank}: ")
    ]
