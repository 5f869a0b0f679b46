"""Rates that the trace of a finished run shows (pure, but for reading its files).

- *Computing*: the operations of the model's formula by the seconds inside forward and backward that
  are neither waiting nor moving messages. What lies between the products is in these seconds, and
  what is computed again is not in the operations.
- *Memory*: the bytes of an update by the seconds of the optimizer step, likewise.
- *Collectives*: of the ranks that take part in one, the last to come waits for nobody: the shortest
  of their times counts, and its median over the steps.
- *Overhead*: the seconds of a step outside of these.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpczero.calibrate.run_trace import RunTrace
from hpczero.comm.grid import Grid
from hpczero.comm.trace import OPERATION, Event
from hpczero.model.families import family, parameter_count
from hpczero.model.shapes import ffn
from hpczero.parallel.states import Sharded
from hpczero.spec.schema import Spec
from hpczero.train import trace_file

_COMPUTING = ("forward", "backward")
_UPDATE = "optimizer step"
_BESIDE = ("step", "data", "loss agreement")  # a step's seconds besides
_MOMENTS_AND_MASTER = 24  # bytes of an element that an update reads and writes


@dataclass(frozen=True)
class TracedRun:
    """A run's layout, and its median step."""

    name: str
    steps: str
    precision: str
    kind: str  # of the devices
    device: str
    ranks: int
    ranks_on_node: int
    threads: int
    product: tuple[int, int, int]  # a typical one of its blocks
    rate: float  # operations a second of a rank that computes
    bandwidth: float  # bytes a second of a rank's update
    step_seconds: float  # besides computing, update and waits
    # operation -> (bytes sent, seconds), along axes inside nodes, and along axes across real nodes
    inside: Mapping[str, Sequence[tuple[float, float]]]
    between: Mapping[str, Sequence[tuple[float, float]]]


def read(run: Path) -> TracedRun:
    """Return what a run's trace shows; InputError where there is none, or it says too little."""
    trace = RunTrace.read(run)
    spec, nodes, events, steps = trace.spec, trace.start.nodes, trace.events, trace.steps
    start = trace.start
    seconds = [
        [trace_file.exclusive_seconds(trace_file.of_step(of_rank, step)) for step in steps]
        for of_rank in events.values()
    ]
    grid = trace.grid
    inside, between = _collectives(events, steps, grid.by_axis(spec.zero.shard_ranks))
    simulated = len(set(start.hosts)) < len(set(nodes))
    of_sample = sum(family(spec.model).operations(spec.model, spec.seq_len))
    return TracedRun(
        name=spec.name,
        steps=f"{steps[0]}-{steps[-1]}",
        precision=spec.train.precision,
        kind="cpu" if start.device == "the CPU" else "cuda",
        device=start.device,
        ranks=len(nodes),
        ranks_on_node=nodes.count(nodes[0]),
        threads=start.threads,
        product=_product(spec),
        rate=spec.train.global_batch * of_sample / _median_sum(seconds, _COMPUTING),
        bandwidth=_updated(spec, grid) * len(nodes) / _median_sum(seconds, (_UPDATE,)),
        step_seconds=_median_sum(seconds, _BESIDE) / len(nodes),
        inside=inside,
        between={} if simulated else between,
    )


def _median_sum(seconds: Sequence[Sequence[Mapping[str, float]]], names: Sequence[str]) -> float:
    """Return the seconds of all ranks together in these spans, in the median step."""
    of_steps = [
        sum(of_step.get(name, 0.0) for of_step in step for name in names)
        for step in zip(*seconds, strict=True)
    ]
    return max(statistics.median(of_steps), 1e-9)


def _product(spec: Spec) -> tuple[int, int, int]:
    wide = max(1, ffn(spec.model) // spec.parallel.tensor)
    return spec.train.micro_batch * spec.seq_len, wide, spec.model.hidden


def _updated(spec: Spec, grid: Grid) -> float:
    """Return the bytes that a rank's update reads and writes, on average."""
    divided = grid.shards_and_replicas(spec.zero.shard_ranks)
    parts = len(grid.rank_at_place) // divided.size("replica")
    if not Sharded.at_stage(spec.zero.stage, node_shared=False).optimizer:
        parts //= divided.size("shard")
    half = spec.train.precision != "fp32"
    of_element = _MOMENTS_AND_MASTER + (2 + 2 if half else 4)
    return parameter_count(spec.model) * of_element / parts


def _collectives(
    events: Mapping[int, Sequence[Event]], steps: Sequence[int], grids: Mapping[str, Grid]
) -> tuple[dict[str, list[tuple[float, float]]], dict[str, list[tuple[float, float]]]]:
    shortest: dict[tuple[str, str, int, int, int], float] = {}
    for of_rank in events.values():
        for step in steps:
            for event in trace_file.of_step(of_rank, step):
                what = event.what
                if what.kind == OPERATION and event.bytes > 0 and not what.unfinished:
                    key = what.axis, what.name, event.bytes, step, event.number
                    seconds = (event.end - event.begin) / 1e9
                    shortest[key] = min(seconds, shortest.get(key, seconds))
    found: dict[tuple[str, str, int], list[float]] = {}
    for (axis, name, size, _, _), seconds in shortest.items():
        found.setdefault((axis, name, size), []).append(seconds)
    inside: dict[str, list[tuple[float, float]]] = {}
    between: dict[str, list[tuple[float, float]]] = {}
    for (axis, name, size), times in found.items():
        if grid := grids.get(axis):
            groups = len(grid.rank_at_place) // grid.size(axis)
            across = grid.groups_across_nodes(axis)
            if across in (0, groups):
                points = (between if across else inside).setdefault(name, [])
                points.append((float(size), statistics.median(times)))
    return inside, between
