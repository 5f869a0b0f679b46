"""Traces of steps that take known times, as runs with `train.trace = true` leave them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from hpczero.calibrate.run_trace import RunTrace, Start
from hpczero.comm.trace import Event
from hpczero.parallel.pipeline.schedule import schedule
from hpczero.parallel.pipeline.simulate import Interval, Simulation, Times, simulate
from hpczero.planner.composed import Pipeline
from hpczero.spec.schema import Parallel, Spec
from tests.support.trace_events import span, wait


@dataclass(frozen=True)
class Known:
    """Nanoseconds of a step: of the actions and messages by part, and of what is around them.

    `waits`: of each action along an axis, at its begin. `late`: the first rank of the only stage
    waits for the others in its update so much longer, and computes so much less.
    """

    forward: Sequence[int]
    backward: Sequence[int]
    transfers: Sequence[int] = ()
    waits: Mapping[str, int] = field(default_factory=dict)
    data: int = 300_000
    update: int = 700_000
    agreement: int = 100_000
    late: int = 0


def course(of: Pipeline, known: Known, transfers: bool = True) -> Simulation:
    """Return when the actions of a step are; without the time of messages if it is asked for."""
    actions = {"forward": known.forward, "backward": known.backward}
    times = Times(actions, known.transfers if transfers else ())
    plan = schedule(of.kind, of.stages, of.chunks, of.micro_batches)
    return simulate(plan, of.chunks, of.micro_batches, times)


def traced(of: Pipeline, known: Known, columns: int = 1, steps: int = 2) -> RunTrace:
    """Return the trace of a pipeline, or of several beside each other on the data axis."""
    parallel = Parallel(
        pipeline=of.stages, chunks=of.chunks, schedule=of.kind, order="tensor,data,pipeline"
    )
    spec = Spec(name="traced", parallel=parallel)
    nodes = [0] * (of.stages * columns)
    start = Start(nodes, ["a"] * len(nodes), "the CPU", 1)
    numbers = list(range(1, steps + 1))
    trace = RunTrace(spec, start, {}, numbers)
    stages = [trace.grid.coordinate(rank, "pipeline") for rank in range(len(nodes))]
    ran = course(of, known)
    events = {
        rank: list(_events(ran, known, stage, known.late * (rank == 0), numbers))
        for rank, stage in enumerate(stages)
    }
    return RunTrace(spec, start, events, numbers)


def _events(
    ran: Simulation, known: Known, stage: int, late: int, numbers: Sequence[int]
) -> Iterator[Event]:
    around = known.data + known.update + known.agreement
    length = round(ran.makespan) + around
    for number in numbers:
        begin = number * (length + 1_000_000)
        yield span("step", begin, begin + length, number)
        yield span("data", begin, begin + known.data)
        yield from _of_actions(ran.intervals[stage], known, begin + known.data, late)
        last = begin + known.data + round(ran.intervals[stage][-1].end) - late
        end = begin + length - known.agreement
        yield span("optimizer step", last, end)
        yield wait("data", last, end - known.update)
        yield span("loss agreement", end, end + known.agreement)


def _of_actions(
    intervals: Sequence[Interval], known: Known, begin: int, late: int
) -> Iterator[Event]:
    free = begin
    for number, one in enumerate(intervals):
        at = begin + round(one.begin)
        end = begin + round(one.end) - late * (number == len(intervals) - 1)
        if at > free:
            yield wait("pipeline", free, at)
        yield span(one.action.kind, at, end)
        free = end
        for axis, seconds in known.waits.items():
            yield wait(axis, at, at + seconds)
            at += seconds
