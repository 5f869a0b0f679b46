"""The trace of a run (`train.trace`): recorded on every rank, written at its end.

At an end that all ranks reach, whatever the reason, rank 0 writes the events of all of them as
<run>/trace.json.gz. A rank that fails, or whose wait the watchdog ends, writes its own events as
<run>/trace-rank-<number>.json.gz before it ends the job.
"""

import base64
import contextlib
import time
import zlib
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from hpczero.comm.grid import Grid
from hpczero.comm.trace import OPERATION, ROW, EventKind, Recording, Trace, TracedStep, events
from hpczero.comm.world import World
from hpczero.safe_files import remove
from hpczero.spec.schema import Spec
from hpczero.train import trace_file
from hpczero.train.run_directory import path_of

NAME = "trace.json.gz"
MOST = 1_000_000  # events in the file: the viewers cannot show many more

Ahead = Callable[[int], int]  # a time of this host's clock -> how far it is ahead of rank 0's


@dataclass(frozen=True)
class Selection:
    """The part of a trace that is written: these steps, of the first `ranks` ranks."""

    steps: Sequence[int]
    ranks: int


class Tracing:
    """Records from its construction to `conclude`; both are collective."""

    def __init__(self, spec: Spec, world: World, grid: Grid) -> None:
        self._world = world
        self._run = spec.name
        self._folder = path_of(spec)
        grids = grid.by_axis(spec.zero.shard_ranks).items()
        coordinates = ", ".join(f"{axis} {of.coordinate(world.rank, axis)}" for axis, of in grids)
        self._name = f"rank {world.rank} on {world.hosts[world.rank]} ({coordinates})"
        self._begun = datetime.now(UTC).isoformat(timespec="seconds")
        if world.rank == 0:
            for old in (self._folder / NAME, *self._folder.glob(_name_of("*"))):
                remove(old)
        self._clock = world.clock()
        self._read = time.perf_counter_ns()
        self._recording = Recording()
        world.record(self._recording)
        world.status.last_words = self._leave

    def conclude(self) -> dict[str, Any] | None:
        """Stop recording and write the file; return on rank 0 what it holds. Collective."""
        world = self._world
        recording = self._recording
        world.record(Trace())
        world.status.last_words = str
        clock = world.clock()
        read = time.perf_counter_ns()
        drift = (clock.ahead - self._clock.ahead) / (read - self._read)
        sizes = world.all_gather_objects([(step.number, step.size) for step in recording.steps])
        selection = select([dict(of_rank) for of_rank in sizes], MOST)
        chosen = [step for step in recording.steps if step.number in selection.steps]
        written = chosen if world.rank < selection.ranks else []
        packed = _packed(
            written, recording.whats, lambda at: clock.ahead + round(drift * (at - read))
        )
        uncertainty = max(clock.uncertainty, self._clock.uncertainty)
        parts = world.gather_objects(self._described(packed, uncertainty))
        figures = world.gather_objects([_figures(step, recording.whats) for step in chosen])
        if parts is None or figures is None:
            return None
        facts = self._facts(selection, parts)
        path = self._folder / NAME
        begin = min((part["begin"] for part in parts if part["events"]), default=0)
        try:
            ranks = (_unpacked(rank, part) for rank, part in enumerate(parts[: selection.ranks]))
            trace_file.write(path, ranks, facts, begin)
        except OSError as error:
            facts["problem"] = f"cannot write {path}: {error.strerror}"
        return facts | {"mean_step": mean([of_step for of_rank in figures for of_step in of_rank])}

    def _leave(self) -> None:
        """Write the events of this rank alone, before it ends the job.

        An error here must not hide why the job ends.
        """
        rank = self._world.rank
        recording = self._recording
        recording.keep_unfinished()
        steps = list(recording.steps)
        if not steps:
            return
        packed = _packed(steps, recording.whats, lambda at: self._clock.ahead)
        part = self._described(packed, self._clock.uncertainty)
        facts = self._facts(Selection([step.number for step in steps], 1), [part]) | {"rank": rank}
        path = self._folder / _name_of(rank)
        with contextlib.suppress(Exception):
            trace_file.write(path, [_unpacked(rank, part)], facts, part["begin"])

    def _described(self, packed: dict[str, Any], uncertainty: int) -> dict[str, Any]:
        return packed | {
            "name": self._name,
            "first": self._recording.first,
            "lost": self._recording.lost,
            "uncertainty": uncertainty,
        }

    def _facts(self, selection: Selection, parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return what the trace holds and what it lacks."""
        first = parts[0]["first"]
        return {
            "run": self._run,
            "begun": self._begun,
            "steps": _span(selection.steps),
            "steps_left_out": _span(range(first, selection.steps[0])) if selection.steps else "",
            "ranks": selection.ranks,
            "ranks_left_out": max(0, len(parts) - selection.ranks),
            "events": sum(part["events"] for part in parts),
            "events_left_out": sum(part["lost"] for part in parts),
            "clock_uncertainty_us": max(part["uncertainty"] for part in parts) / 1e3,
        }


def select(sizes: Sequence[Mapping[int, int]], most: int) -> Selection:
    """Select the last steps that all ranks have, as many as fit into `most` events (pure).

    `sizes`: how many events each rank has of each step. Of a step that does not fit alone, the
    first ranks are taken.
    """
    steps: list[int] = []
    room = most
    for step in sorted(set.intersection(*(set(of_rank) for of_rank in sizes)), reverse=True):
        room -= sum(of_rank[step] for of_rank in sizes)
        if room < 0 and steps:
            break
        steps.insert(0, step)
        if room < 0:
            return Selection(steps, _ranks_that_fit([of_rank[step] for of_rank in sizes], most))
    return Selection(steps, len(sizes))


def _ranks_that_fit(sizes: Sequence[int], most: int) -> int:
    fitting = (ranks for ranks in range(len(sizes) - 1, 0, -1) if sum(sizes[:ranks]) <= most)
    return next(fitting, 1)


def mean(steps: Sequence[Mapping[str, Mapping[str, float]]]) -> dict[str, dict[str, float]]:
    """Return the means of `_figures` over steps and ranks.

    A step without some kind of event spent 0 seconds on it; a step without operations of an axis
    does not count in that axis's hidden share.
    """
    kinds = sorted({kind for step in steps for kind in step["seconds"]})
    axes = sorted({axis for step in steps for axis in step["hidden"]})
    seconds = {
        kind: sum(step["seconds"].get(kind, 0.0) for step in steps) / len(steps) for kind in kinds
    }
    shares = {
        axis: [step["hidden"][axis] for step in steps if axis in step["hidden"]] for axis in axes
    }
    hidden = {axis: sum(of_steps) / len(of_steps) for axis, of_steps in shares.items()}
    return {"seconds": seconds, "hidden": hidden}


def _figures(step: TracedStep, whats: list[EventKind]) -> dict[str, dict[str, float]]:
    inside = trace_file.of_step(events(step.rows, whats), step.number)
    seconds = trace_file.exclusive_seconds(inside)
    seconds["other"] = seconds.pop("step", 0.0)
    axes = {event.what.axis for event in inside if event.what.kind == OPERATION}
    return {"seconds": seconds, "hidden": {axis: trace_file.hidden(inside, axis) for axis in axes}}


def _packed(steps: Sequence[TracedStep], whats: list[EventKind], ahead: Ahead) -> dict[str, Any]:
    """Return the steps as JSON can carry them, with times by rank 0's clock."""
    rows = array("q")
    for step in steps:
        rows.extend(step.rows)
    for column in (1, 2):
        rows[column::ROW] = array("q", [at - ahead(at) for at in rows[column::ROW]])
    return {
        "rows": base64.b64encode(zlib.compress(rows.tobytes(), 1)).decode(),
        "whats": whats,
        "events": len(rows) // ROW,
        "begin": min(rows[1::ROW], default=0),
    }


def _unpacked(rank: int, part: Mapping[str, Any]) -> trace_file.Rank:
    rows = array("q")
    rows.frombytes(zlib.decompress(base64.b64decode(part["rows"])))
    whats = [EventKind(*what) for what in part["whats"]]
    return trace_file.Rank(rank, part["name"], list(events(rows, whats)))


def _span(steps: Sequence[int]) -> str:
    return f"{steps[0]}-{steps[-1]}" if steps else ""


def _name_of(rank: int | str) -> str:
    return f"trace-rank-{rank}.json.gz"
