"""A step composed of its pieces, by cause (pure).

Stages carry out their schedule; each waits where the course of the pipeline says so. The data axis
works beside the actions: what is longer than the computing beside it shows. The rank on which the
last backward ends is the one whose time is broken down: its own actions, its waits (the bubble, and
what messages add to it), what data adds before and after, and what follows for all.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from math import fsum
from typing import TypeVar

from hpczero.planner.step_costs import CAUSES, StepCosts
from hpczero.planner.timetable import Course, Durations, course_of

KINDS = ("forward", "backward")
CourseOf = Callable[[str, int, int, int, Durations], Course]
_Value = TypeVar("_Value")


@dataclass(frozen=True)
class Pipeline:
    """The schedule of a step: `kind` of `parallel.pipeline.schedule`."""

    kind: str
    stages: int
    chunks: int
    micro_batches: int


def compose(
    pipeline: Pipeline, costs: StepCosts, course_of: CourseOf = course_of
) -> tuple[dict[str, float], Durations]:
    """Return the seconds of a step by cause, and the durations of its actions and messages."""
    durations, shown = _durations(pipeline, costs)
    course = _course(pipeline, durations, course_of)
    undelayed = course
    if any(durations.transfers):
        still = replace(durations, transfers=[0.0] * len(durations.transfers))
        undelayed = _course(pipeline, still, course_of)
    stages = range(pipeline.stages)
    after = _by_stage(costs, stages, lambda stage: _after(pipeline, costs, durations, stage))
    last = max(stages, key=lambda stage: course.ends[stage] + after[stage])
    causes = dict.fromkeys(CAUSES, 0.0)
    for chunk in range(pipeline.chunks):
        for cause, seconds in shown[costs.like(last), chunk].items():
            causes[cause] += seconds * pipeline.micro_batches
    idle = max(0.0, course.ends[last] - fsum(causes.values()))
    delayed = min(idle, max(0.0, course.ends[last] - undelayed.ends[last]))
    causes["messages"] += delayed  # beside what actions wait for messages themselves
    causes["bubble"] += idle - delayed
    data, offload = _late(pipeline, costs, durations, course)
    causes["data"] += data + after[last]
    causes["offload"] += offload
    for cause, seconds in costs.after().items():
        causes[cause] += seconds
    causes["data"] += costs.beside_next(fsum(causes.values()))
    causes["checkpoint"] += costs.checkpoint(fsum(causes.values()))
    return causes, durations


def _course(pipeline: Pipeline, durations: Durations, course_of: CourseOf) -> Course:
    return course_of(
        pipeline.kind, pipeline.stages, pipeline.chunks, pipeline.micro_batches, durations
    )


def _by_stage(
    costs: StepCosts, stages: Iterable[int], value: Callable[[int], _Value]
) -> list[_Value]:
    """Return the value of each stage, asked for once where stages are alike."""
    known: dict[int, _Value] = {}
    values = []
    for stage in stages:
        like = costs.like(stage)
        if like not in known:
            known[like] = value(like)
        values.append(known[like])
    return values


def _late(
    pipeline: Pipeline, costs: StepCosts, durations: Durations, course: Course
) -> tuple[float, float]:
    """Return by how much the step is late because weights are: of data, and of states elsewhere.

    A stage needs its weights when it begins; what then remains of their time is hidden behind its
    first forward, data's first.
    """

    def weights(stage: int) -> tuple[float, float]:
        edge = costs.weights(stage)
        forward = _of_stage(pipeline, durations.forward, stage)
        data = edge.uncovered + _exposed(edge.coverable, forward, costs.hidden())
        return data, max(0.0, edge.offload - max(0.0, forward - edge.coverable))

    most = 0.0, 0.0
    stages = range(pipeline.stages)
    for (data, offload), begin in zip(
        _by_stage(costs, stages, weights), course.begins, strict=True
    ):
        late = max(0.0, data + offload - begin)
        of_data = min(late, data)
        most = max(most, (of_data, late - of_data), key=sum)
    return most


def _after(pipeline: Pipeline, costs: StepCosts, durations: Durations, stage: int) -> float:
    edge = costs.gradients(stage)
    computing = _of_stage(pipeline, durations.backward, stage)
    return edge.uncovered + _exposed(edge.coverable, computing, costs.hidden())


def _exposed(seconds: float, computing: float, hidden: float) -> float:
    """Return the seconds that show beside so much computing."""
    return seconds - hidden * min(seconds, computing)


def _of_stage(pipeline: Pipeline, durations: Sequence[float], stage: int) -> float:
    """Return the seconds of one micro-batch in all of a stage's chunks."""
    return sum(durations[chunk * pipeline.stages + stage] for chunk in range(pipeline.chunks))


def _durations(
    pipeline: Pipeline, costs: StepCosts
) -> tuple[Durations, dict[tuple[int, int], dict[str, float]]]:
    """Return the durations by part, and the causes of a micro-batch in the chunks of a stage."""
    stages = range(pipeline.stages)
    forward: list[float] = []
    backward: list[float] = []
    shown: dict[tuple[int, int], dict[str, float]] = {}
    for chunk in range(pipeline.chunks):

        def both(stage: int, chunk: int = chunk) -> tuple[float, float]:
            there, back = (causes_of_action(costs, kind, stage, chunk) for kind in KINDS)
            shown[stage, chunk] = {
                cause: there.get(cause, 0.0) + back.get(cause, 0.0) for cause in {**there, **back}
            }
            return sum(there.values()), sum(back.values())

        seconds = _by_stage(costs, stages, both)
        forward += [each for each, _ in seconds]
        backward += [each for _, each in seconds]
    parts = len(forward) if pipeline.stages > 1 else 1
    transfers = [costs.transfer(part) for part in range(parts - 1)]
    return Durations(forward, backward, transfers), shown


def causes_of_action(costs: StepCosts, kind: str, stage: int, chunk: int) -> dict[str, float]:
    """Return the seconds of an action; data and bus go on at once, beside its computing."""
    causes = dict(costs.action(kind, stage, chunk))
    computing = sum(causes.values())
    causes["data"] = _exposed(costs.data(kind, stage, chunk), computing, costs.hidden())
    causes["offload"] = max(0.0, costs.bus(kind, stage, chunk) - computing - causes["data"])
    return causes
