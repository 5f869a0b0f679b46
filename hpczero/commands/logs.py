"""hpczero logs: what a run has printed."""

import codecs
import os
import sys
import time
from argparse import Namespace
from pathlib import Path

from hpczero.batch import run_status, submission
from hpczero.batch.submit import still_living
from hpczero.commands.jobs import _submitted, run_named
from hpczero.errors import InputError, log_for_terminal
from hpczero.safe_files import open_to_read
from hpczero.text import printable

_LOOK_EVERY = 1.0  # seconds between two looks at a log


_PIECE = 1 << 20  # bytes of a log that are printed at a time


def logs(options: Namespace) -> int:
    if options.rank is not None:
        print("\n".join(_of_rank(run_named(options.run), options.rank)))
        return 0
    run = _submitted(options.run)
    path = _newest_log(run)
    if path is None and not options.follow:
        raise InputError(f"{run}: no job has printed anything yet; logs -f waits for it")
    return _follow(run) if options.follow else _print(path)


def _newest_log(run: Path) -> Path | None:
    """Not of a job that found nothing left to do."""
    there = []
    for record in submission.of_run(run):
        passed = {number for _, number, event, _ in record.events() if event == "passed"}
        there += [
            path
            for number in record.jobs
            if number not in passed and (path := record.log(number)).is_file()
        ]
    return there[-1] if there else None


def _print(path: Path | None) -> int:
    """Also what PBS said at the job's end, where it ended it."""
    said = (path, path.with_name(path.name.removeprefix("log-") + ".OU")) if path else ()
    for one in said:
        if one.is_file():
            _show(one, 0, _decoder())
    return 0


def _decoder() -> codecs.IncrementalDecoder:
    """Return one that waits for the rest of a character that is only begun."""
    return codecs.getincrementaldecoder("utf-8")("replace")


def _show(path: Path, place: int, decoder: codecs.IncrementalDecoder) -> int:
    """Print what a log has from a byte on, without what a terminal would act on; return its end."""
    with os.fdopen(open_to_read(path), "rb") as file:
        file.seek(place)
        while piece := file.read(_PIECE):
            sys.stdout.write(log_for_terminal(decoder.decode(piece)))
            place += len(piece)
    sys.stdout.flush()
    return place


def _follow(run: Path) -> int:
    """The newest log, and the next job's when it begins, until no job is left."""
    path, place, decoder = None, 0, _decoder()
    while True:
        alive = still_living(run)
        newest = _newest_log(run)
        if newest != path and newest:
            path, place, decoder = newest, 0, _decoder()
        if path:
            place = _show(path, place, decoder)
        if not alive:
            return 0
        time.sleep(_LOOK_EVERY)


def _of_rank(run: Path, rank: int) -> list[str]:
    """What is known of one rank: where it ran, and the lines of the newest log that name it."""
    starts = [
        event
        for event in run_status.lines_of(run / "events.jsonl")
        if event.get("event") == "start"
    ]
    ranks = starts[-1].get("ranks") if starts else None
    dicts = [place for place in ranks if isinstance(place, dict)] if isinstance(ranks, list) else []
    places = [place for place in dicts if place.get("rank") == rank]
    if not places:
        raise InputError(f"{run}: the run has not started with a rank {rank} yet")
    where = (printable(str(places[0].get(name)), 100) for name in ("pid", "host"))
    lines = ["rank {}: process {} on {}".format(rank, *where)]
    path = _newest_log(run)
    text = path.read_text(encoding="utf-8", errors="replace").split("\n") if path else []
    return lines + [
        log_for_terminal(line)
        for line in text
        if f"rank {rank}:" in line or f"rank {rank} " in line or line.startswith(f"{rank}: ")
    ]
