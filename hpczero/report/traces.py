"""Facts of a run that lie in its trace and its layout: its grid, and a step to draw."""

import gzip
import os
from dataclasses import dataclass
from math import prod

from hpczero import safe_files
from hpczero.calibrate.run_trace import TRACE, RunTrace
from hpczero.comm.grid import Grid
from hpczero.comm.trace import SPAN
from hpczero.data.samples import micro_batch_sizes
from hpczero.errors import InputError
from hpczero.planner.volumes import resolved
from hpczero.report.pipeline import Plan, Traced, chosen, first_of_each_stage
from hpczero.runs.columns import number
from hpczero.runs.record import Job, Run
from hpczero.train import trace_file

_LARGEST = 1 << 30  # bytes of a trace when it is unpacked
_PIECE = 1 << 22


@dataclass(frozen=True)
class Layout:
    """The grid of a run's last job; `hosts` of its ranks."""

    grid: Grid
    hosts: list[str]


def layout_of(run: Run) -> Layout | None:
    """Return the layout, None if spec and events do not tell it."""
    if not run.jobs or not run.spec or not run.jobs[-1].ranks:
        return None
    nodes, hosts = _places(run.jobs[-1])
    parallel = run.spec.parallel
    if not nodes or len(nodes) % prod((parallel.tensor, parallel.pipeline)):
        return None
    return Layout(Grid.build(resolved(run.spec, nodes), nodes), hosts)


def _places(job: Job) -> tuple[list[int], list[str]]:
    """Return node and host of each rank; none if they are not numbered from 0 on."""
    found = {}
    for one in job.ranks:
        rank, node = number(one.get("rank")), number(one.get("node"))
        if rank == rank and node == node:
            found[int(rank)] = int(node), str(one.get("host", "?"))
    if sorted(found) != list(range(len(found))):
        return [], []
    return [found[rank][0] for rank in range(len(found))], [
        found[rank][1] for rank in sorted(found)
    ]


def plan_of(run: Run, layout: Layout) -> Plan | None:
    """Return the pipeline of a run; None for a single stage."""
    spec = run.spec
    if not spec or spec.parallel.pipeline < 2:
        return None
    data = layout.grid.size("data")
    count, *_ = micro_batch_sizes(spec.train.global_batch, spec.train.micro_batch, data)
    return Plan(spec.parallel.schedule, spec.parallel.pipeline, spec.parallel.chunks, count)


def traced_step(run: Run, layout: Layout) -> Traced:
    """Return the step of the median time; InputError where the trace has none."""
    _refuse_too_large(run)
    trace = RunTrace.read(run.path)
    if len(trace.start.nodes) != len(layout.hosts):
        raise InputError("the trace is not of the last job's ranks")
    seconds = {
        event.number: (event.end - event.begin) / 1e9
        for event in trace.events[0]
        if event.what[:2] == (SPAN, "step")
    }
    step = chosen(trace.steps, seconds)
    stages = [trace.grid.coordinate(rank, "pipeline") for rank in sorted(trace.events)]
    every = [
        trace_file.main_track(trace.of_step(rank, step)) for rank in first_of_each_stage(stages)
    ]
    return Traced(step, every)


def _refuse_too_large(run: Run) -> None:
    path = run.path / TRACE
    size = 0
    try:
        with os.fdopen(safe_files.open_to_read(path), "rb") as packed, gzip.open(packed) as file:
            while piece := file.read(_PIECE):
                size += len(piece)
                if size > _LARGEST:
                    raise InputError(f"{TRACE} unpacks to more than {_LARGEST:,} bytes")
    except (OSError, EOFError) as error:
        raise InputError(f"{TRACE} cannot be read: {error}") from error
