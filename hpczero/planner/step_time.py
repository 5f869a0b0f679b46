"""The time of a step on a cluster, by cause, and what follows from it (pure)."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import fsum

from hpczero.errors import InputError
from hpczero.model.families import known
from hpczero.model.shapes import Layer
from hpczero.parallel.pipeline.schedule import schedule
from hpczero.parallel.pipeline.simulate import Interval, Times, simulate
from hpczero.planner.advice import sentence
from hpczero.planner.allocation import Allocation
from hpczero.planner.cluster import Cluster
from hpczero.planner.composed import Pipeline, compose
from hpczero.planner.once import Once
from hpczero.planner.platform import Platform
from hpczero.planner.predicted import Computing, Predicted
from hpczero.planner.software import Software, own
from hpczero.planner.step_work import StepWork
from hpczero.planner.timetable import Durations
from hpczero.spec.schema import Spec


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step by cause, and what follows from them.

    `model_operations`: of the model's formula, without what is computed again. `peak`: operations a
    second of all devices.
    """

    spec: Spec
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
        return [
            (cause, self.causes[cause] / self.seconds, sentence(cause, self.spec))
            for cause in ranked
        ]

    def intervals(self) -> tuple[tuple[Interval, ...], ...]:
        """Return when each stage carries out which action, for a drawing."""
        of = self.pipeline
        actions = {"forward": self.durations.forward, "backward": self.durations.backward}
        times = Times(actions, self.durations.transfers)
        plan = schedule(of.kind, of.stages, of.chunks, of.micro_batches)
        return simulate(plan, of.chunks, of.micro_batches, times).intervals


def predict(
    spec: Spec,
    layers: Sequence[Layer],
    nodes: Allocation,
    cluster: Cluster,
    platform: Platform,
    software: Software | None = None,
) -> StepTime:
    """Return the time of a step on so many ranks of a cluster."""
    return StepTimes(layers, cluster, platform, software).of(spec, nodes)


class StepTimes:
    """The times of a step in any layouts of one job: what they share is counted once.

    The specs have the same [model], `data.seq_len` and `train.precision`, on nodes with as many
    ranks.
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        cluster: Cluster,
        platform: Platform,
        software: Software | None = None,
    ) -> None:
        self._layers, self._cluster, self._platform = layers, cluster, platform
        self._software = software or own(platform)
        self._counts, self._seconds = Once(), Once()

    def of(self, spec: Spec, nodes: Allocation) -> StepTime:
        """Return the time of a step, by the course that its pipeline takes."""
        work = self._work(spec, nodes)
        return time_of(work, self._cluster, self._software, self._seconds)

    def at_least(self, spec: Spec, nodes: Allocation) -> float:
        """Return seconds in closed form: those of a step, or a little less."""
        work = self._work(spec, nodes, bounds=True)
        return _in_closed_form(Predicted(work, self._cluster, self._software, self._seconds))

    def of_computing(self, spec: Spec, nodes: Allocation) -> float:
        """Return the part of them that a step has with any states, in any order of the axes."""
        work = self._work(spec, nodes, bounds=True)
        return _in_closed_form(Computing(work, self._cluster, self._software, self._seconds))

    def _work(self, spec: Spec, nodes: Allocation, bounds: bool = False) -> StepWork:
        if not known(spec.model):
            raise InputError(
                f"{spec.model.family} has to be built before its operations are known: "
                "no time is predicted for it"
            )
        return StepWork(spec, self._layers, nodes, self._platform, self._counts, bounds)


def time_of(
    work: StepWork, cluster: Cluster, software: Software, once: Once | None = None
) -> StepTime:
    """Return the time of a step whose work is counted already; `once` as for `Predicted`."""
    costs = Predicted(work, cluster, software, once)
    pipeline = pipeline_of(work)
    causes, durations = compose(pipeline, costs)
    samples, seq_len = work.spec.train.global_batch, work.spec.seq_len
    peak = costs.rates.peak * work.nodes.ranks
    operations = samples * work.operations
    return StepTime(work.spec, causes, samples * seq_len, operations, peak, pipeline, durations)


def _in_closed_form(costs: Predicted) -> float:
    from hpczero.planner.shortest_course import shortest_course  # numpy, for the search alone

    causes, _ = compose(pipeline_of(costs.work), costs, shortest_course)
    return fsum(causes.values())


def pipeline_of(work: StepWork) -> Pipeline:
    parallel = work.spec.parallel
    kind = parallel.schedule if parallel.pipeline > 1 else "1f1b"
    return Pipeline(kind, parallel.pipeline, len(work.parts[0]), work.batch.micro_batches)
