"""The time of a step, composed of its pieces, by cause (pure).

Stages carry out their schedule; each waits where the course of the pipeline says so. The data axis
works beside the actions: what is longer than the computing beside it shows. The rank on which the
last backward ends is the one whose time is broken down: its own actions, its waits (the bubble, and
what messages add to it), what data adds before and after, and what follows for all.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import fsum

from hpczero.errors import InputError
from hpczero.model.families import family, known
from hpczero.model.shapes import Layer
from hpczero.parallel.pipeline.schedule import schedule
from hpczero.parallel.pipeline.simulate import Interval, Times, simulate
from hpczero.planner.allocation import Allocation
from hpczero.planner.cluster import Cluster
from hpczero.planner.platform import Platform
from hpczero.planner.predicted import Predicted
from hpczero.planner.software import Software, own
from hpczero.planner.step_costs import CAUSES, Edge, StepCosts
from hpczero.planner.step_work import StepWork
from hpczero.planner.timetable import Course, Durations, course_of
from hpczero.spec.schema import Spec

KINDS = ("forward", "backward")


@dataclass(frozen=True)
class Pipeline:
    """The schedule of a step: `kind` of `parallel.pipeline.schedule`."""

    kind: str
    stages: int
    chunks: int
    micro_batches: int


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step by cause, and what follows from them.

    `model_operations`: of the model's formula, without what is computed again. `peak`: operations a
    second of all devices.
    """

    causes: dict[str, float]
    tokens: int
    model_operations: float
    peak: float
    pipeline: Pipeline
    durations: Durations

    @property
    def seconds(self) -> float:
        return fsum(self.causes.values())

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    @property
    def utilisation(self) -> float:
        return self.model_operations / self.seconds / self.peak

    def largest(self, count: int = 3) -> list[tuple[str, float, str]]:
        """Return the largest causes: name, share of the step, what would shrink it."""
        ranked = sorted(self.causes, key=lambda cause: -self.causes[cause])[:count]
        return [(cause, self.causes[cause] / self.seconds, _sentence(cause)) for cause in ranked]

    def intervals(self) -> tuple[tuple[Interval, ...], ...]:
        """Return when each stage carries out which action, for a drawing."""
        of = self.pipeline
        actions = {"forward": self.durations.forward, "backward": self.durations.backward}
        times = Times(actions, self.durations.transfers)
        plan = schedule(of.kind, of.stages, of.chunks, of.micro_batches)
        return simulate(plan, of.chunks, of.micro_batches, times).intervals


def _sentence(cause: str) -> str:
    called, shrinks = CAUSES[cause]
    return f"{called}: less with {shrinks}"


def predict(
    spec: Spec,
    layers: Sequence[Layer],
    nodes: Allocation,
    cluster: Cluster,
    platform: Platform,
    software: Software | None = None,
) -> StepTime:
    """Return the time of a step on so many ranks of a cluster."""
    if not known(spec.model):
        raise InputError(
            f"{spec.model.family} has to be built before its operations are known: "
            "no time is predicted for it"
        )
    return time_of(StepWork(spec, layers, nodes, platform), cluster, software or own(platform))


def time_of(work: StepWork, cluster: Cluster, software: Software) -> StepTime:
    """Return the time of a step whose work is counted already."""
    spec = work.spec
    costs = Predicted(work, cluster, software)
    stages = spec.parallel.pipeline
    kind = spec.parallel.schedule if stages > 1 else "1f1b"
    pipeline = Pipeline(kind, stages, len(work.parts[0]), work.batch.micro_batches)
    causes, durations = compose(pipeline, costs)
    samples = spec.train.global_batch
    operations = samples * sum(family(spec.model).operations(spec.model, spec.seq_len))
    peak = costs.rates.peak * work.nodes.ranks
    return StepTime(causes, samples * spec.seq_len, operations, peak, pipeline, durations)


def compose(pipeline: Pipeline, costs: StepCosts) -> tuple[dict[str, float], Durations]:
    """Return the seconds of a step by cause, and the durations of its actions and messages."""
    durations, shown = _durations(pipeline, costs)
    course = _course(pipeline, durations)
    undelayed = course
    if any(durations.transfers):
        undelayed = _course(pipeline, replace(durations, transfers=[0.0] * len(shown)))
    stages = range(pipeline.stages)
    after = [
        _after(costs.gradients(stage), _of_stage(pipeline, durations.backward, stage), costs)
        for stage in stages
    ]
    last = max(stages, key=lambda stage: course.ends[stage] + after[stage])
    causes = dict.fromkeys(CAUSES, 0.0)
    for chunk in range(pipeline.chunks):
        for cause, seconds in shown[chunk * pipeline.stages + last].items():
            causes[cause] += seconds * pipeline.micro_batches
    idle = max(0.0, course.ends[last] - fsum(causes.values()))
    causes["messages"] += min(idle, max(0.0, course.ends[last] - undelayed.ends[last]))
    causes["bubble"] += idle - causes["messages"]
    data, offload = _late(pipeline, costs, durations, course)
    causes["data"] += data + after[last]
    causes["offload"] += offload
    for cause, seconds in costs.after().items():
        causes[cause] += seconds
    causes["checkpoint"] += costs.checkpoint(fsum(causes.values()))
    return causes, durations


def _course(pipeline: Pipeline, durations: Durations) -> Course:
    return course_of(
        pipeline.kind, pipeline.stages, pipeline.chunks, pipeline.micro_batches, durations
    )


def _late(
    pipeline: Pipeline, costs: StepCosts, durations: Durations, course: Course
) -> tuple[float, float]:
    """Return by how much the step is late because weights are: of data, and of states elsewhere.

    A stage needs its weights when it begins; what then remains of their time is hidden behind its
    first forward, data's first.
    """
    most = 0.0, 0.0
    for stage in range(pipeline.stages):
        edge = costs.weights(stage)
        forward = _of_stage(pipeline, durations.forward, stage)
        data = edge.uncovered + _exposed(edge.coverable, forward, costs.hidden())
        offload = max(0.0, edge.offload - max(0.0, forward - edge.coverable))
        late = max(0.0, data + offload - course.begins[stage])
        of_data = min(late, data)
        most = max(most, (of_data, late - of_data), key=sum)
    return most


def _after(edge: Edge, computing: float, costs: StepCosts) -> float:
    return edge.uncovered + _exposed(edge.coverable, computing, costs.hidden())


def _exposed(seconds: float, computing: float, hidden: float) -> float:
    """Return the seconds that show beside so much computing."""
    return seconds - hidden * min(seconds, computing)


def _of_stage(pipeline: Pipeline, durations: Sequence[float], stage: int) -> float:
    """Return the seconds of one micro-batch in all of a stage's chunks."""
    return sum(durations[chunk * pipeline.stages + stage] for chunk in range(pipeline.chunks))


def _durations(pipeline: Pipeline, costs: StepCosts) -> tuple[Durations, list[dict[str, float]]]:
    """Return the durations by part, and the causes of a micro-batch's forward and backward."""
    found: dict[str, list[float]] = {kind: [] for kind in KINDS}
    causes: list[dict[str, float]] = []
    parts = pipeline.stages * pipeline.chunks
    for part in range(parts):
        chunk, stage = divmod(part, pipeline.stages)
        together: dict[str, float] = {}
        for kind in KINDS:
            shown = dict(costs.action(kind, stage, chunk))
            computing = sum(shown.values())
            data = costs.data(kind, stage, chunk)
            shown["data"] = _exposed(data, computing, costs.hidden())
            shown["offload"] = max(0.0, costs.bus(kind, stage, chunk) - computing)
            found[kind].append(sum(shown.values()))
            for cause, seconds in shown.items():
                together[cause] = together.get(cause, 0.0) + seconds
        causes.append(together)
    transfers = [costs.transfer(part) for part in range(parts - 1)] if pipeline.stages > 1 else []
    return Durations(found["forward"], found["backward"], transfers), causes
