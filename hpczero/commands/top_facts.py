"""The look of a run now, from its directory alone: `Viewer.facts`, again and again."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import inf, isfinite
from pathlib import Path
from typing import Any

from hpczero.batch import run_status, scheduler
from hpczero.batch.run_status import Progress, lines_of
from hpczero.comm import node_file
from hpczero.comm.live import ASK_EVERY, Onlooker
from hpczero.comm.node_file import NodeFile
from hpczero.commands.blame import Finding, find, states_of
from hpczero.commands.top_ranks import SILENT_AFTER, RankNow, ranks_now
from hpczero.runs import rank_times
from hpczero.runs.columns import Numbers, number
from hpczero.runs.growing_losses import GrowingLosses
from hpczero.runs.record import Run, read_run
from hpczero.runs.stragglers import LATEST_OF_ALL, Straggler, stragglers
from hpczero.text import format_age, printable

_EVENTS = 50
_SLACK = 2.0  # seconds between clocks of computers
_LONG_STEPS, _LONG = 5, 10.0  # a wait of so many steps, and seconds
_LONG_IF_WRONG = 2.0  # where something is wrong with a process
_SOON = 10.0  # seconds in which the ranks mostly answer


@dataclass(frozen=True)
class Memory:
    """The fullest rank of a step that was measured; in bytes."""

    step: int
    rank: int
    host: str
    held: float
    predicted: float


@dataclass(frozen=True)
class Seen:
    """The nodes' words on their ranks; `words`: how old that is, or why it is not known."""

    files: Sequence[NodeFile] = ()
    words: str = ""
    is_live: bool = False  # they have answered


@dataclass(frozen=True)
class Facts:
    progress: Progress
    ranks: Sequence[RankNow]
    seen: str  # how old the ranks' states are, or why they are not known
    complete: bool  # False: the ranks may answer yet
    behind: Finding | None
    slow: Sequence[Straggler]
    memory: Memory | None
    events: Sequence[Mapping[str, Any]]
    steps: Numbers
    losses: Numbers

    def as_data(self) -> dict[str, Any]:
        behind: dict[str, Any] | None = None
        if self.behind:
            behind = {"ranks": list(self.behind.ranks), "words": self.behind.words}
            behind["details"] = list(self.behind.details)
        return {
            **asdict(self.progress),
            "run": str(self.progress.run),
            "ranks": [asdict(one) for one in self.ranks],
            "ranks_seen": self.seen,
            "behind": behind,
            "slow": [asdict(one) for one in self.slow],
            "memory": asdict(self.memory) if self.memory else None,
            "events": list(self.events),
        }


class Viewer:
    """Asks the ranks of a run that goes on what they do; of one that has ended it only reads."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._losses = GrowingLosses(path / "metrics.jsonl")
        self._run = read_run(path, figures=False)
        self._read_at = _stamp(path / "events.jsonl")
        self._onlooker = Onlooker(path / node_file.FOLDER)
        self._began: float | None = None  # to ask
        self._asked = 0.0
        self._refusal = ""

    def facts(self) -> Facts:
        stamp = _stamp(self._path / "events.jsonl")
        if stamp != self._read_at:
            self._run, self._read_at = read_run(self._path, figures=False), stamp
        run = self._run
        progress = run_status.status_of(self._path, [], silent=scheduler.SCHEDULERS)
        self._losses.read()
        goes_on = progress.state in ("running", "STALLED")
        seen = self._states(run) if goes_on else Seen()
        now = time.time()
        hosts = run.jobs[-1].hosts if run.jobs else {}
        may_answer = goes_on and len(hosts) != 1 and self._onlooker.may_be_answered
        behind = _behind(run, seen.files, progress, now) if seen.files else None
        if not goes_on and progress.state != "finished":
            left = self._left_behind(run)
            behind = find(run, left) if left else None
        return Facts(
            progress,
            ranks_now(seen.files, hosts, now, SILENT_AFTER if seen.is_live else inf),
            seen.words,
            seen.is_live or not may_answer,
            behind,
            stragglers(run, rank_times.read(run.path, LATEST_OF_ALL)),
            _memory(self._path),
            [_plain(event) for event in run.events[-_EVENTS:]],
            self._losses.steps,
            self._losses.losses,
        )

    def _states(self, run: Run) -> Seen:
        """Ask the ranks what they do, and return what is known by now."""
        now = time.monotonic()
        self._began = now if self._began is None else self._began
        if now - self._asked >= ASK_EVERY:
            self._asked, self._refusal = now, self._onlooker.ask()
        if files := self._onlooker.files():
            age = max(0.0, time.time() - max(file.at for file in files))
            return Seen(files, f"seen {format_age(age)} ago", is_live=True)
        if run.jobs and len(run.jobs[-1].ranks) == 1:
            return Seen(words="of one rank alone no more is known")
        if self._refusal:
            why = f"what they do now cannot be asked for: {printable(self._refusal)}"
        elif now - self._began < _SOON:
            why = "they are being asked"
        else:
            why = f"none has answered for {format_age(now - self._began)}"
        if left := self._left_behind(run):
            recorded = max(0.0, time.time() - max(file.at for file in left))
            why = f"as recorded {format_age(recorded)} ago; {why}"
        return Seen(left, why)

    def _left_behind(self, run: Run) -> list[NodeFile]:
        """Return what the nodes have recorded of their own accord, unless steps were done since."""
        files = states_of(run)
        stepped = self._losses.written
        return files if files and max(file.at for file in files) > stepped - _SLACK else []


def _plain(event: Mapping[str, Any]) -> dict[str, Any]:
    """Return an event without its lists and tables, which may be as long as the job has ranks."""
    return {key: value for key, value in event.items() if not isinstance(value, list | dict)}


def _behind(run: Run, files: Sequence[NodeFile], progress: Progress, now: float) -> Finding | None:
    """Say who is behind if ranks wait for long, or for one whose process stands still."""
    waited = max(
        (
            (state.waited or 0.0) + max(0.0, now - file.at)
            for file in files
            for state in file.states.values()
            if state.waited is not None
        ),
        default=0.0,
    )
    long = max(_LONG, _LONG_STEPS * (progress.seconds_per_step or 0.0))
    if any(file.notes for file in files):
        long = _LONG_IF_WRONG
    return find(run, files) if waited > long else None


def _memory(path: Path) -> Memory | None:
    for line in reversed(lines_of(path / "memory.jsonl")):
        parts = line.get("predicted")
        kinds = parts.values() if isinstance(parts, dict) else ()
        predicted = sum(size for size in map(number, kinds) if isfinite(size))
        step, rank, held = (number(line.get(name)) for name in ("step", "rank", "held"))
        if all(map(isfinite, (step, rank, held))):
            host = printable(str(line.get("host")), 100)
            return Memory(int(step), int(rank), host, held, predicted)
    return None


def _stamp(path: Path) -> tuple[int, int, int]:
    """Return what changes when the file does."""
    try:
        facts = path.stat()
    except OSError:
        return 0, 0, 0
    return facts.st_ino, facts.st_size, facts.st_mtime_ns
