"""The time of a step by all actions of its schedule, which the planner's quick ways are held to."""

from collections.abc import Sequence
from math import fsum

from hpczero.model.shapes import Layer
from hpczero.parallel.pipeline.schedule import schedule
from hpczero.parallel.pipeline.simulate import Times, simulate
from hpczero.planner.allocation import Allocation
from hpczero.planner.composed import compose
from hpczero.planner.predicted import Predicted
from hpczero.planner.search import Machine
from hpczero.planner.software import own
from hpczero.planner.step_time import pipeline_of
from hpczero.planner.step_work import StepWork
from hpczero.planner.timetable import Course, Durations
from hpczero.spec.schema import Spec


def exact_seconds(
    spec: Spec, layers: Sequence[Layer], nodes: Allocation, machine: Machine
) -> float:
    """Return the seconds of a step in which nothing is counted for another layout, or stage."""
    work = EveryStage(spec, layers, nodes, machine.platform)
    costs = Predicted(work, machine.cluster, own(machine.platform))
    causes, _ = compose(pipeline_of(work), costs, simulated)
    return fsum(causes.values())


class EveryStage(StepWork):
    """The work of a step whose stages are counted one by one."""

    def _alike_stages(self) -> list[int]:
        return list(self.stages)


def simulated(
    kind: str, stages: int, chunks: int, micro_batches: int, durations: Durations
) -> Course:
    actions = {"forward": durations.forward, "backward": durations.backward}
    plan = schedule(kind, stages, chunks, micro_batches)
    times = Times(actions, durations.transfers)
    intervals = simulate(plan, chunks, micro_batches, times).intervals
    return Course([each[0].begin for each in intervals], [each[-1].end for each in intervals])
