"""The trace of a finished run, and how its last job started (pure, but for reading its files)."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from hpczero import safe_files
from hpczero.comm.grid import Grid
from hpczero.comm.trace import SPAN, Event
from hpczero.errors import InputError
from hpczero.model.families import known
from hpczero.planner.volumes import resolved
from hpczero.spec.load import load
from hpczero.spec.schema import Spec
from hpczero.text import printable
from hpczero.train import trace_file

TRACE = "trace.json.gz"
_LARGEST = 1 << 28  # bytes of a file of lines


@dataclass(frozen=True)
class Start:
    """Where the ranks of a run's last job ran."""

    nodes: list[int]
    hosts: list[str]
    device: str
    threads: int


@dataclass(frozen=True)
class RunTrace:
    """The events of each rank, and the steps that are whole on all of them."""

    spec: Spec
    start: Start
    events: Mapping[int, Sequence[Event]]
    steps: Sequence[int]

    @classmethod
    def read(cls, run: Path) -> "RunTrace":
        """Return the trace of a run; InputError where there is none, or it says too little."""
        spec = load(str(run / "spec.toml")).spec
        if not known(spec.model):
            what = f"the operations of {spec.model.family} are not known"
            raise InputError(f"{printable(str(run))}: {what}")
        events = _events_of_ranks(run)
        start = start_of(run)
        if sorted(events) != list(range(len(start.nodes))):
            raise InputError(
                f"{printable(str(run))}: its trace has {len(events)} of {len(start.nodes)} ranks"
            )
        steps = _common_steps(events.values())
        if not steps:
            raise InputError(
                f"{printable(str(run))}: no step of its trace is complete on all ranks"
            )
        return cls(spec, start, events, steps)

    @cached_property
    def grid(self) -> Grid:
        return Grid.build(resolved(self.spec, self.start.nodes), self.start.nodes)

    def of_step(self, rank: int, step: int) -> list[Event]:
        return trace_file.of_step(self.events[rank], step)


def _events_of_ranks(run: Path) -> dict[int, list[Event]]:
    path = run / TRACE
    if not safe_files.is_seen(path):
        raise InputError(
            f"{printable(str(run))} has no {TRACE}: a run that ended with train.trace = true has"
        )
    try:
        return trace_file.read(path)
    except (OSError, EOFError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{printable(str(path))} is no trace of a run: {error!r}") from error


def start_of(run: Path) -> Start:
    """Return how the job started that left the trace: the last one."""
    path = run / "events.jsonl"
    try:
        last = {event["event"]: event for event in whole_lines(path)}
        places = sorted(last["start"]["ranks"], key=lambda place: int(place["rank"]))
        return Start(
            nodes=[int(place["node"]) for place in places],
            hosts=[str(place["host"]) for place in places],
            device=printable(str(places[0]["device"])),
            threads=int(last["layout"].get("threads_per_rank") or 1),
        )
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise InputError(f"{printable(str(path))} does not say how the run started") from error


def whole_lines(path: Path) -> list[dict[str, Any]]:
    """Return the whole lines of a run's file; none where there is no such file."""
    if not safe_files.is_seen(path):
        return []
    lines = []
    for line in safe_files.read_small(path, _LARGEST).decode(errors="replace").splitlines():
        try:
            found = json.loads(line)
        except ValueError:  # cut off when the computer went down
            continue
        lines += [found] if isinstance(found, dict) else []
    return lines


def _common_steps(ranks: Iterable[Sequence[Event]]) -> list[int]:
    numbers = [
        {event.number for event in events if event.what[:2] == (SPAN, "step")} for events in ranks
    ]
    steps = sorted(set.intersection(*numbers)) if numbers else []
    return steps[1:] if len(steps) > 1 else steps  # the first one may be the run's first
