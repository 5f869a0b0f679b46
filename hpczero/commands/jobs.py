"""The verbs about a run: status, cancel, logs."""

import json
import os
import shlex
import sys
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from hpczero.batch import run_status, scheduler, submission
from hpczero.batch.command import Queued
from hpczero.batch.run_status import Progress
from hpczero.batch.submit import living_under
from hpczero.errors import HpczeroError, InputError
from hpczero.spec.load import load
from hpczero.text import listed, printable, shown
from hpczero.train.run_directory import path_of

_LONGEST = 400  # characters of a reason
_LARGE = 1e6  # a loss from which on its digits say nothing


def status(options: Namespace) -> int:
    runs = [run_named(options.run)] if options.run else submission.remembered()
    found, silent = look_at(runs)
    if options.json:
        data = [asdict(one) | {"run": str(one.run)} for one in found]
        print(json.dumps(data[0] if options.run else data, indent=2))
    elif options.run:
        print("\n".join(_in_full(found[0])))
    else:
        print(
            "\n".join(_rows(found))
            or "no run was submitted from here yet: hpczero submit SPEC; "
            "hpczero runs FOLDER lists those below a folder"
        )
    say_silent(silent)
    return 0


def look_at(runs: Sequence[Path]) -> tuple[list[Progress], dict[str, str]]:
    """Return how they stand, and which schedulers say nothing, and why.

    Somebody else's jobs are not asked for: of those runs only the files speak.
    """
    mine = [run for run in runs if _is_mine(run)]
    known, silent = _known(mine) if mine else ([], {})
    found = [
        run_status.of(run, known, silent)
        if run in mine
        else run_status.of(run, [], silent=scheduler.SCHEDULERS)
        for run in runs
    ]
    return found, silent


def say_silent(silent: Mapping[str, str]) -> None:
    for words in silent.values():
        print(f"hpczero: {words}; what the runs themselves have written is shown", file=sys.stderr)


def _is_mine(run: Path) -> bool:
    try:
        return run.stat().st_uid == os.getuid()
    except OSError:
        return False


def cancel(options: Namespace) -> int:
    """The record is closed first, so that a job that begins meanwhile ends at once; but a full disk keeps no job in the queue."""
    run = _submitted(options.run)
    alive = {
        name: [job.number for job in jobs]
        for name, jobs in living_under(run, now=True).items()
        if jobs
    }
    for record in submission.of_run(run):
        if record.scheduler in alive and not record.over:
            try:
                record.close("cancelled")
            except HpczeroError as error:
                print(f"hpczero: {error}", file=sys.stderr)
    for name, numbers in alive.items():
        scheduler.cancel(name, numbers)
    cancelled = [number for numbers in alive.values() for number in numbers]
    print(
        f"cancelled: {listed(cancelled)}"
        if cancelled
        else f"{printable(str(run))} has no job in the queue"
    )
    return 0


def run_named(name: str) -> Path:
    """A run's directory by its path, its spec, or its name.

    A name is that of a run that was submitted, or that lies in `runs`.
    """
    if name.endswith(".toml"):
        run = path_of(load(name).spec)
    else:
        named = [path for path in submission.remembered() if path.name == name]
        if len(named) > 1 and not Path(name).is_dir():
            raise InputError(
                f"several runs are called {shown(name)}: {listed([str(path) for path in named])}; give the path of one"
            )
        in_runs = Path("runs") / name
        if Path(name).is_dir():
            run = Path(name).absolute()
        elif named:
            run = named[0]
        else:
            run = (in_runs if in_runs.is_dir() else Path(name)).absolute()
    if not run.is_dir():
        raise InputError(
            f"{printable(str(run))}: there is no such run; hpczero status lists those that were "
            "submitted, hpczero runs FOLDER all below it"
        )
    return run


def _submitted(name: str) -> Path:
    """The directory of a run that the batch system knows."""
    run = run_named(name)
    if not submission.of_run(run):
        stop = f"touch {shlex.quote(str(run / 'stop'))} stops it with a checkpoint"
        by_hand = "was started by hand, and never submitted: it printed where it was started"
        raise InputError(f"{printable(str(run))} {by_hand}, and {stop}")
    return run


def _known(runs: Sequence[Path]) -> tuple[list[Queued], dict[str, str]]:
    """What the schedulers say of these runs' jobs, and which of them say nothing, and why. (Of all runs: another is no new question.)"""
    records = [
        record
        for run in dict.fromkeys([*runs, *submission.remembered()])
        for record in submission.of_run(run)
    ]
    found: list[Queued] = []
    silent: dict[str, str] = {}
    for name in sorted({record.scheduler for record in records}):
        numbers = [
            number
            for record in records
            if record.scheduler == name
            for number in record.unsettled()
        ]
        if not numbers:
            continue
        try:
            found += scheduler.jobs(name, numbers)
        except HpczeroError as error:
            silent[name] = str(error)
    return found, silent


def _rows(found: Sequence[Progress]) -> Iterator[str]:
    if not found:
        return
    head = ["run", "state", "step", "loss", "tokens/s", "left", "saved", "node-hours", "jobs"]
    yield from table(
        [
            head,
            *(
                [
                    printable(one.run.name, 40),
                    one.state,
                    *figures(one),
                    f"{one.node_hours:.3g}",
                    _jobs(one),
                ]
                for one in found
            ),
        ]
    )


def table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        yield "  ".join(
            f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)
        ).rstrip()


def figures(one: Progress) -> list[str]:
    return [
        f"{one.step:,}/{one.steps:,}",
        "?" if one.loss is None else format(one.loss, ".4f" if abs(one.loss) < _LARGE else ".4g"),
        "?" if one.tokens_per_second is None else f"{one.tokens_per_second:,.4g}",
        ""
        if one.state == "finished"
        else "?"
        if one.seconds_left is None
        else _duration(one.seconds_left),
        "" if one.last_save is None else f"{one.last_save:,}",
    ]


def _jobs(one: Progress) -> str:
    alive = [link for link in one.links if link.state in ("queued", "held", "running")]
    words = (link.state + (f" ({printable(link.reason)})" if link.reason else "") for link in alive)
    return ", ".join(f"{link.number} {said}" for link, said in zip(alive, words, strict=True))


def _in_full(one: Progress) -> list[str]:
    step, loss, speed, left, saved = figures(one)
    node_hours = f"{one.node_hours:.3g} node-hours, " if one.links else ""
    lines = [
        f"{printable(str(one.run))}: {one.state}"
        + (f" ({printable(one.reason, _LONGEST)})" if one.reason else ""),
        f"  step        {step}, loss {loss}",
        f"  speed       {speed} tokens/s"
        + (f", {one.seconds_per_step:.3g} s a step" if one.seconds_per_step is not None else ""),
        f"  time left   {left}"
        + (
            f"; of its job {_duration(one.job_seconds_left)}"
            if one.job_seconds_left is not None
            else ""
        )
        if left
        else "",
        f"  last save   step {saved}" if saved else "  last save   none yet",
        f"  used        {node_hours}{_size(one.run) / 1e6:,.1f} MB on disk",
    ]
    width = max((len(link.number) for link in one.links), default=0)
    for link in one.links:
        more = "; ".join(
            printable(words)
            for words in (
                link.reason,
                f"start {link.start}" if link.start and link.state == "queued" else "",
            )
            if words
        )
        lines.append(f"  job {link.number:<{width}}  {link.state}" + (f": {more}" if more else ""))
    if one.last_lines:
        lines += ["  its last words:", *(f"    {printable(line, 300)}" for line in one.last_lines)]
    return [line for line in lines if line]


def _size(run: Path) -> int:
    total = 0
    for path in run.rglob("*"):
        try:
            total += path.lstat().st_size if path.is_file() else 0
        except OSError:  # a file that is being replaced
            continue
    return total


def _duration(seconds: float) -> str:
    whole = round(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"


# The verb `runs`: all runs below a folder, told from their files, whoever started them.
_STARTED = ("events.jsonl", "metrics.jsonl", "checkpoints")  # beside spec.toml
_UNITS = (("d", 86400), ("h", 3600), ("min", 60), ("s", 1))


def runs(options: Namespace) -> int:
    folder = Path(options.folder)
    if not folder.is_dir():
        raise InputError(
            f"{printable(str(folder))} is no folder: "
            "hpczero runs FOLDER lists the runs below it (default: runs)"
        )
    unreadable: list[str] = []
    paths = sorted(below(folder.absolute(), unreadable))
    found, silent = look_at(paths)
    if options.json:
        print(json.dumps([asdict(one) | {"run": str(one.run)} for one in found], indent=2))
    else:
        print(
            "\n".join(_rows_of_runs(found, folder.absolute()))
            or f"no run lies below {printable(str(folder))}"
        )
    say_silent(silent)
    for words in unreadable:
        print(f"hpczero: not looked into: {printable(words)}", file=sys.stderr)
    return 0


def below(folder: Path, unreadable: list[str]) -> Iterator[Path]:
    """Yield the folders of runs, the given one included; look neither into a run nor behind a link."""
    walk = os.walk(
        folder, onerror=lambda error: unreadable.append(f"{error.filename}: {error.strerror}")
    )
    for place, folders, files in walk:
        if is_run(Path(place), [*folders, *files]):
            folders.clear()
            yield Path(place)
        folders[:] = [name for name in folders if not name.startswith(".")]


def is_run(path: Path, names: Sequence[str]) -> bool:
    """A folder that a run has written into, or that a run was submitted in."""
    if "spec.toml" in names and any(name in names for name in _STARTED):
        return True
    return "batch" in names and bool(submission.of_run(path))


def _rows_of_runs(found: Sequence[Progress], folder: Path) -> Iterator[str]:
    if not found:
        return
    head = ["run", "state", "step", "loss", "tokens/s", "left", "saved", "age"]
    rows = [head]
    for one in found:
        name = str(one.run.relative_to(folder)) if one.run != folder else one.run.name
        rows.append([printable(name, 60), one.state, *figures(one), _age(one.age_seconds)])
    yield from table(rows)


def _age(seconds: float | None) -> str:
    """Since it last wrote something."""
    if seconds is None:
        return "?"
    unit, length = next(((unit, length) for unit, length in _UNITS if seconds >= length), ("s", 1))
    return f"{seconds // length:.0f} {unit}"
