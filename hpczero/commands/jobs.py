"""`hpczero status`, `runs` and `cancel`: the state of runs, and the end of their jobs."""

import json
import math
import os
import shlex
import sys
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from hpczero.batch import run_status, scheduler, submission, sweep_runs
from hpczero.batch.command import QueuedJob
from hpczero.batch.run_status import Progress
from hpczero.batch.submit import living_by_scheduler
from hpczero.batch.submit_sweep import folder_of
from hpczero.errors import HpczeroError, InputError
from hpczero.runs import energy
from hpczero.runs.goodput import Goodput, goodput_in
from hpczero.spec.load import load, load_sweep
from hpczero.text import (
    format_age,
    format_bytes,
    format_duration,
    format_loss,
    format_table,
    join_words,
    printable,
    toml_repr,
)
from hpczero.train.run_directory import path_of

_COLUMNS = ["run", "state", "step", "loss", "tokens/s", "left", "saved"]
_LONGEST = 400  # characters of a reason


def status(options: Namespace) -> int:
    wanted = named(options.run) if options.run else Named(tuple(submission.remembered()))
    states, silent = states_of(wanted.runs)
    if options.json:
        print(json.dumps(_status_as_data(wanted, states, bool(options.run)), indent=2))
    elif options.run and not wanted.folder:
        print("\n".join(_in_full(states[0])))
    elif states:
        rows = [
            [
                *_row(progress, wanted.short(progress.run), 60 if wanted.folder else 40),
                f"{progress.node_hours:.3g}",
                _jobs(progress),
            ]
            for progress in states
        ]
        print(format_table([*_COLUMNS, "node-hours", "jobs"], rows))
        if wanted.folder:
            print("\n".join(["", *sweep_runs.in_sum(states, wanted.folder, wanted.spec)]))
    else:
        print("no run was submitted from here yet: hpczero submit SPEC; ", end="")
        print("hpczero runs FOLDER lists those below a folder")
    print_silent(silent)
    return 0


@dataclass(frozen=True)
class Named:
    """The run, or the runs of a sweep, that a word of the command line means."""

    runs: tuple[Path, ...]
    folder: Path | None = None  # of the sweep
    spec: str = ""  # of the sweep, if the word was its file

    def short(self, run: Path) -> str:
        """Return the run's name, without that of its sweep."""
        return run.name[len(self.folder.name) + 1 :] if self.folder else run.name


def named(name: str) -> Named:
    """Find a run, or the runs of a sweep: by a path, a spec, or a name of either."""
    if name.endswith(".toml") and (sweep := load_sweep(name)):
        folder = folder_of(sweep)
        return Named(tuple(folder / run.name for run, _ in sweep.runs), folder, name)
    parents = [run.parent for run in submission.remembered() if run.parent.name == name]
    for candidate in [Path(name), *dict.fromkeys(parents), Path("runs") / name]:
        if runs_of_it := sweep_runs.runs_in(candidate.absolute()):
            return Named(tuple(runs_of_it), candidate.absolute())
        if candidate.is_dir():
            break
    return Named((run_named(name),))


def _status_as_data(wanted: Named, states: Sequence[Progress], one: bool) -> object:
    data = _as_data(states)
    if wanted.folder:
        counts = Counter(progress.state for progress in states)
        return {"sweep": str(wanted.folder), "states": counts, "runs": data}
    return data[0] | _spent(states[0].run) if one else data


def _spent(run: Path) -> dict[str, object]:
    """Return what the run's time and energy went into."""
    booked = _booked(run)
    tokens = booked.tokens if booked else 0.0
    return {
        "goodput": booked.as_data() if booked else None,
        "energy": energy.read(run, tokens).as_data(),
    }


def states_of(runs: Sequence[Path]) -> tuple[list[Progress], dict[str, str]]:
    """Return the states of the runs, and scheduler -> error for those that do not answer.

    Jobs of another user are not asked for: the state of those runs is that of their files.
    """
    mine = [run for run in runs if _is_mine(run)]
    known, silent = _known(mine) if mine else ([], {})
    states = []
    for run in runs:
        if run in mine:
            states.append(run_status.status_of(run, known, silent))
        else:
            states.append(run_status.status_of(run, [], silent=scheduler.SCHEDULERS))
    return states, silent


def print_silent(silent: Mapping[str, str]) -> None:
    for words in silent.values():
        print(f"hpczero: {words}; what the runs themselves have written is shown", file=sys.stderr)


def _is_mine(run: Path) -> bool:
    try:
        return run.stat().st_uid == os.getuid()
    except OSError:
        return False


def cancel(options: Namespace) -> int:
    """Close the record, so that a job that begins meanwhile ends at once; then cancel all jobs.

    They are cancelled also if the record cannot be written, as on a full disk.
    """
    wanted = submitted_runs_named(options.run)
    living = living_by_scheduler(wanted.runs, now=True).items()
    alive = {name: [job.number for job in jobs] for name, jobs in living if jobs}
    for record in (record for run in wanted.runs for record in submission.of_run(run)):
        if record.scheduler in alive and not record.closed_reason:
            try:
                record.close("cancelled")
            except HpczeroError as error:
                print(f"hpczero: {error}", file=sys.stderr)
    for name, numbers in alive.items():
        scheduler.cancel(name, numbers)
    cancelled = [number for numbers in alive.values() for number in numbers]
    if cancelled:
        print(f"cancelled: {join_words(cancelled)}")
    else:
        print(f"{printable(str(wanted.folder or wanted.runs[0]))} has no job in the queue")
    return 0


def run_named(name: str) -> Path:
    """Find a run's directory by its path, its spec, or its name.

    A name is that of a run that was submitted, or that lies in `runs`.
    """
    if name.endswith(".toml"):
        run = path_of(load(name).spec)
    else:
        named = [path for path in submission.remembered() if path.name == name]
        if len(named) > 1 and not Path(name).is_dir():
            raise InputError(
                f"several runs are called {toml_repr(name)}: {join_words(list(map(str, named)))}; "
                "give the path of one"
            )
        candidates = [Path(name), *named, Path("runs") / name]
        run = next(filter(Path.is_dir, candidates), Path(name)).absolute()
    if not run.is_dir():
        raise InputError(
            f"{printable(str(run))}: there is no such run; hpczero status lists those that were "
            "submitted, hpczero runs FOLDER all below it"
        )
    return run


def submitted_runs_named(name: str) -> Named:
    """Find the run, or those runs of a sweep, that were submitted to the batch system."""
    wanted = named(name)
    submitted = tuple(run for run in wanted.runs if submission.of_run(run))
    if not submitted and wanted.folder:
        folder = printable(str(wanted.folder))
        raise InputError(f"no run of the sweep in {folder} was submitted: hpczero submit SPEC")
    if not submitted:
        run = wanted.runs[0]
        stop = f"touch {shlex.quote(str(run / 'stop'))} stops it with a checkpoint"
        by_hand = "was started by hand, and never submitted: it printed where it was started"
        raise InputError(f"{printable(str(run))} {by_hand}, and {stop}")
    return replace(wanted, runs=submitted)


def _known(runs: Sequence[Path]) -> tuple[list[QueuedJob], dict[str, str]]:
    """Return the jobs of these runs as the schedulers know them, and scheduler -> error.

    All remembered runs are asked for at once: the next run is then no new question.
    """
    unsettled: dict[str, list[str]] = {}
    for run in dict.fromkeys([*runs, *submission.remembered()]):
        for record in submission.of_run(run):
            unsettled.setdefault(record.scheduler, []).extend(record.unsettled())
    known: list[QueuedJob] = []
    silent: dict[str, str] = {}
    for name, numbers in sorted(unsettled.items()):
        try:
            known += scheduler.jobs(name, numbers) if numbers else []
        except HpczeroError as error:
            silent[name] = str(error)
    return known, silent


def _as_data(states: Sequence[Progress]) -> list[dict[str, object]]:
    return [asdict(progress) | {"run": str(progress.run)} for progress in states]


def _row(progress: Progress, name: str, longest: int) -> list[str]:
    """Return the cells of `_COLUMNS`."""
    return [printable(name, longest), progress.state, *figures_of(progress)]


class Figures(NamedTuple):
    """Figures of a run in words: "?" or "" where they are not known."""

    step: str
    loss: str
    speed: str  # tokens per second
    left: str  # time
    saved: str  # step of the last save


def figures_of(progress: Progress) -> Figures:
    loss = format_loss(progress.loss)
    speed = left = "?"
    if progress.tokens_per_second is not None:
        speed = f"{progress.tokens_per_second:,.4g}"
    if progress.state == "finished":
        left = ""
    elif progress.seconds_left is not None:
        left = format_duration(progress.seconds_left)
    saved = "" if progress.last_save is None else f"{progress.last_save:,}"
    return Figures(f"{progress.step:,}/{progress.steps:,}", loss, speed, left, saved)


def _jobs(progress: Progress) -> str:
    alive = [link for link in progress.links if link.state in ("queued", "held", "running")]
    reasons = [f" ({printable(link.reason)})" if link.reason else "" for link in alive]
    return ", ".join(
        f"{link.number} {link.state}{reason}" for link, reason in zip(alive, reasons, strict=True)
    )


def _in_full(progress: Progress) -> list[str]:
    step, loss, speed, left, saved = figures_of(progress)
    reason = f" ({printable(progress.reason, _LONGEST)})" if progress.reason else ""
    if progress.seconds_per_step is not None:
        speed += f" tokens/s, {progress.seconds_per_step:.3g} s a step"
    else:
        speed += " tokens/s"
    if left and progress.job_seconds_left is not None:
        left += f"; of its job {format_duration(progress.job_seconds_left)}"
    held = progress.held
    validated = progress.validation_loss
    validation = "" if validated is None else f", validation loss {format_loss(validated)}"
    node_hours = f"{progress.node_hours:.3g} node-hours, " if progress.links else ""
    lines = [
        f"{printable(str(progress.run))}: {progress.state}{reason}",
        f"  step        {step}, loss {loss}{validation}",
        f"  speed       {speed}",
        *([f"  time left   {left}"] if left else []),
        f"  last save   {f'step {saved}' if saved else 'none yet'}",
        *([f"  memory      at most {format_bytes(int(held))} a rank"] if held else []),
        *_goodput(progress.run),
        f"  used        {node_hours}{_bytes_below(progress.run) / 1e6:,.1f} MB on disk",
    ]
    width = max((len(link.number) for link in progress.links), default=0)
    for link in progress.links:
        start = f"start {link.start}" if link.start and link.state == "queued" else ""
        more = "; ".join(printable(words) for words in (link.reason, start) if words)
        lines.append(f"  job {link.number:<{width}}  {link.state}" + (f": {more}" if more else ""))
    if progress.last_lines:
        lines += [
            "  the last lines of its log:",
            *(f"    {printable(line, 300)}" for line in progress.last_lines),
        ]
    return lines


def _goodput(run: Path) -> list[str]:
    """Say what the run's time and energy went into, if that is known and soon found out."""
    booked = _booked(run)
    if booked is None or booked.share is None:
        return []
    waited = "" if booked.queued is None else f"; {format_duration(booked.queued)} in the queue"
    parts = sorted(booked.of_kind.items(), key=lambda part: -part[1])
    shares = [(kind, seconds / booked.allocated) for kind, seconds in parts]
    words = ", ".join(f"{kind} {share:.0%}" for kind, share in shares if share >= 0.005)
    return [
        f"  goodput     {booked.share:.0%} of its ranks' time trained: {words}{waited}",
        f"  energy      {energy.read(run, booked.tokens).words}",
    ]


def _booked(run: Path) -> Goodput | None:
    try:
        return goodput_in(run)
    except InputError:
        return None


def _bytes_below(run: Path) -> int:
    total = 0
    for path in run.rglob("*"):
        try:
            total += path.lstat().st_size if path.is_file() else 0
        except OSError:  # a file that is being replaced
            continue
    return total


# The verb `runs`: all runs below a folder, found by their files, whoever started them.

# What runs are listed by; those of which it is not known come last.
_ORDERS: dict[str, Callable[[Progress], Any]] = {
    "name": lambda progress: progress.run,
    "state": lambda progress: progress.state,
    "loss": lambda progress: _unknown_last(progress.loss),
    "validation": lambda progress: _unknown_last(progress.validation_loss),
    "speed": lambda progress: _unknown_last(progress.tokens_per_second, -1),
    "age": lambda progress: _unknown_last(progress.age_seconds),
}
_STARTED = ("events.jsonl", "metrics.jsonl", "checkpoints")  # beside spec.toml


def runs(options: Namespace) -> int:
    folder = Path(options.folder)
    if not folder.is_dir():
        raise InputError(
            f"{printable(str(folder))} is no folder: "
            "hpczero runs FOLDER lists the runs below it (default: runs)"
        )
    unreadable: list[str] = []
    top = folder.absolute()
    states, silent = states_of(sorted(below(top, unreadable)))
    states.sort(key=_ORDERS[options.sort])
    if options.json:
        print(json.dumps(_as_data(states), indent=2))
    elif states:
        print(format_table(*_listed(states, top)))
    else:
        print(f"no run lies below {printable(str(folder))}")
    print_silent(silent)
    for words in unreadable:
        print(f"hpczero: not looked into: {printable(words)}", file=sys.stderr)
    return 0


def _unknown_last(figure: float | None, sign: int = 1) -> float:
    return math.inf if figure is None else sign * figure


def _listed(states: Sequence[Progress], top: Path) -> tuple[list[str], list[list[str]]]:
    """Return the head and the rows; the losses of evaluations have a column if there are any."""
    evaluated = any(progress.validation_loss is not None for progress in states)
    rows = []
    for progress in states:
        name = progress.run.name if progress.run == top else str(progress.run.relative_to(top))
        validated = progress.validation_loss
        validation = ["" if validated is None else format_loss(validated)] if evaluated else []
        rows.append([*_row(progress, name, 60), *validation, format_age(progress.age_seconds)])
    return [*_COLUMNS, *(["validation"] if evaluated else []), "age"], rows


def below(folder: Path, unreadable: list[str]) -> Iterator[Path]:
    """Yield the folders of runs, also the given one; look into no run and follow no link."""
    walk = os.walk(
        folder, onerror=lambda error: unreadable.append(f"{error.filename}: {error.strerror}")
    )
    for path, folders, files in walk:
        if sweep_runs.is_run(Path(path), [*folders, *files]):
            folders.clear()
            yield Path(path)
        folders[:] = [name for name in folders if not name.startswith(".")]
